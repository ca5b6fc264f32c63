"""Mends of exercise 30, right and wrong."""

CLASS = "class Product(torch.autograd.Function):\n"
FORWARD = """\
        ctx.save_for_backward(batch, weight)
        return batch @ weight.T
"""
BACKWARD = """\
        return gradient @ weight, weight_gradient
"""
INIT = "nn.Parameter(nn.init.kaiming_uniform_(torch.empty(outputs, inputs)))\n"

GATHER = f"""\
def gather(part):
    whole = part.new_empty(len(part) * world_size, part.shape[1])
    dist.all_gather_into_tensor(whole, part)
    return whole


{CLASS}"""
KEPT = FORWARD.replace(
    "        return batch @ weight.T",
    "        ctx.whole = gather(weight)\n        return batch @ ctx.whole.T",
)
PART = INIT.replace("nn.Parameter(", "").replace("inputs)))", "inputs)).chunk(world_size)[rank]")
ALL = [
    (CLASS, GATHER),
    (FORWARD, FORWARD.replace("weight.T", "gather(weight).T")),
    (
        BACKWARD,
        BACKWARD.replace("@ weight,", "@ gather(weight),").replace(
            "weight_gradient\n", "weight_gradient.chunk(world_size)[rank]\n"
        ),
    ),
    (INIT, f"nn.Parameter({PART[:-1]}.clone())\n"),
]

RIGHT = {"a gather into one tensor": ALL}

WRONG = {
    "a part that is a view of the whole": (
        [*ALL[:3], (INIT, f"nn.Parameter({PART[:-1]})\n")],
        "between two layers of the forward pass",
    ),
    "the gathered weight is kept for the backward pass": (
        [
            ALL[0],
            (FORWARD, KEPT),
            (BACKWARD, ALL[2][1].replace("gather(weight)", "ctx.whole")),
            ALL[3],
        ],
        "between two layers of the forward pass",
    ),
    "a sum": (
        [*ALL, (" / dist.get_world_size()", "")],
        "The gradients are 2 times as large, as a sum over the ranks is",
    ),
}
