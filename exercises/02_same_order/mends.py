"""Mends of exercise 2, right and wrong."""

EPOCH = "for epoch in range(3):\n"
STEP = "        optimizer.step()\n"
SAMPLER = "sampler = DistributedSampler(dataset, shuffle=True)"
LOADER = "loader = DataLoader(dataset, batch_size=32, sampler=sampler)"

RIGHT = {
    "the next epoch is set at the end": [(STEP, f"{STEP}    sampler.set_epoch(epoch + 1)\n")],
    "a permutation that all ranks draw alike": [
        (
            EPOCH,
            f"{EPOCH}    order = torch.randperm(256)[dist.get_rank() :: 2].tolist()\n"
            "    loader = DataLoader(dataset, batch_size=32, sampler=order)\n",
        )
    ],
}

WRONG = {
    "another epoch on each rank": (
        [(EPOCH, f"{EPOCH}    sampler.set_epoch(epoch + dist.get_rank())\n")],
        "the ranks do not shuffle alike",
    ),
    "each rank shuffles its half": (
        [
            (SAMPLER, "part = torch.utils.data.Subset(dataset, range(dist.get_rank(), 256, 2))"),
            (LOADER, "loader = DataLoader(part, batch_size=32, shuffle=True)"),
        ],
        "rank 0 reads the same half",
    ),
}
