"""Mends of exercise 9, right and wrong."""

MODEL = "model = nn.Sequential"
LOOP = "for batch, labels in loader:\n"
FLIP = "    flip = torch.rand(len(batch)) < 0.5\n"

RIGHT = {
    "a seed before the model, which DDP makes equal": [
        (MODEL, f"torch.manual_seed(rank)\n{MODEL}")
    ],
    "numbers for all ranks, of which each takes its own": [
        (FLIP, "    flip = torch.rand(2, len(batch))[rank] < 0.5\n")
    ],
}

WRONG = {
    "the seed of the rank at the top": (
        [("torch.manual_seed(0)", "torch.manual_seed(rank)")],
        "The ranks draw different images",
    ),
    "a seed that two pairs of batch and rank share": (
        [
            (
                LOOP,
                "for step, (batch, labels) in enumerate(loader):\n"
                "    torch.manual_seed(step + rank)\n",
            )
        ],
        "Rank 0 in batch 1 and rank 1 in batch 0 draw the same random numbers",
    ),
    "rank 1 flips backwards": (
        [(FLIP, f"{FLIP}    flip = flip.flip(0) if rank else flip\n")],
        "The ranks draw the same random numbers, one of them backwards",
    ),
}
