"""Mends of exercise 31, right and wrong."""

SUM = "        dist.all_reduce(weight_gradient)\n"
PART = "        part_gradient = weight_gradient.chunk(world_size)[rank]\n"
SCATTER = """\
        part_gradient = torch.empty_like(part)
        dist.reduce_scatter_tensor(part_gradient, weight_gradient)
"""
EXCHANGE = """\
        received = torch.empty_like(weight_gradient)
        dist.all_to_all_single(received, weight_gradient)
        part_gradient = sum(received.chunk(world_size))
"""

RIGHT = {"each part to its rank, which adds them up": [(SUM, ""), (PART, EXCHANGE)]}

WRONG = {
    "a copy of the part of the sum": (
        [(PART, PART.replace("[rank]", "[rank].clone()"))],
        "rank 0 sends 3,186,688 bytes per training step",
    ),
    "the part of the rank's own gradient": ([(SUM, "")], "has other outputs"),
    "whole gradients that are kept": (
        [(SUM, SCATTER), (PART, "        part.whole = weight_gradient\n")],
        "between two layers of the backward pass",
    ),
}
