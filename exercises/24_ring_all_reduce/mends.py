"""Mends of exercise 24, right and wrong."""

HERE = "    # Here.\n"
RING = """\
    parts = tensor.chunk(world_size)
    for step in range(2 * (world_size - 1)):
        part = parts[(rank - step - 1) % world_size]
        received = torch.empty_like(part)
        work = dist.isend(parts[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        work.wait()
        part.copy_(received + part if step < world_size - 1 else received)
"""
DIRECT = """\
    parts = tensor.chunk(world_size)
    others = [other for other in range(world_size) if other != rank]
    received = [torch.empty_like(parts[rank]) for _ in others]
    works = [dist.isend(parts[other], other) for other in others]
    works += [dist.irecv(*pair) for pair in zip(received, others, strict=True)]
    for work in works:
        work.wait()
    parts[rank].add_(sum(received))
    works = [dist.isend(parts[rank], other) for other in others]
    works += [dist.irecv(parts[other], other) for other in others]
    for work in works:
        work.wait()
"""
WHOLE = """\
    passed_on = tensor.clone()
    for _ in range(world_size - 1):
        work = dist.isend(passed_on, (rank + 1) % world_size)
        received = torch.empty_like(tensor)
        dist.recv(received, (rank - 1) % world_size)
        work.wait()
        tensor += received
        passed_on = received
"""
# The works live on: what becomes of a message without its work is chance

RIGHT = {"each part to the rank that sums it": [(HERE, DIRECT)]}

WRONG = {
    "whole tensors": ([(HERE, WHOLE)], "sends 96,000 bytes, 2 times the tensor. 64,000 are"),
    "six steps with any number of ranks": (
        [(HERE, RING.replace("range(2 * (world_size - 1))", "range(6)"))],
        "but with 3 ranks, rank 0 sends 96,000 bytes",
    ),
    "a collective": ([(HERE, "    dist.all_reduce(tensor)\n")], "dist.all_reduce, a collective"),
}
