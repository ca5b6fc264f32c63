"""Mends of exercise 6, right and wrong."""

SAMPLER = "sampler = DistributedSampler(dataset, shuffle=False)"
COUNT = """\
        correct += (model(batch).argmax(dim=1) == labels).sum()
        total += len(labels)
"""
CORRECT = "dist.all_reduce(correct)\n"
TOTAL = "dist.all_reduce(total)\n"
PRINT = '    print(f"{correct.item()} of {total.item()} answers are correct")\n'

RIGHT = {
    "the repeated image does not count": [
        (SAMPLER, f"{SAMPLER}\nleft = len(range(rank, len(dataset), world_size))"),
        (
            COUNT,
            "        right = (model(batch).argmax(dim=1) == labels)[:left]\n"
            "        left -= len(right)\n"
            "        correct += right.sum()\n"
            "        total += len(right)\n",
        ),
    ],
    "one message, and other names": [
        (SAMPLER, "sampler = range(rank, len(dataset), world_size)"),
        (CORRECT, "counts = torch.stack([correct, total]).float()\n"),
        (TOTAL, "dist.all_reduce(counts)\n"),
        (PRINT, '    print(f"{counts[0]} of {counts[1]} answers are correct")\n'),
    ],
}

WRONG = {
    "drop_last": (
        [("shuffle=False", "shuffle=False, drop_last=True")],
        "not evaluated: 1 of 101",
    ),
    "all images on rank 0": (
        [(SAMPLER, "sampler = range(len(dataset)) if rank == 0 else []")],
        "Rank 0 evaluated 101 images and rank 1 0",
    ),
    "all images on both ranks": (
        [(SAMPLER, "sampler = range(len(dataset))"), (CORRECT, "")],
        "Each rank evaluated all 101 images",
    ),
}
