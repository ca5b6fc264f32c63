"""Mends of exercise 8, right and wrong."""

LR = "lr=LR * world_size"
LOADER = "loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)"
SHARE = "loader = DataLoader(dataset, batch_size=BATCH_SIZE // world_size, sampler=sampler)"
WORLD_SIZE = "world_size = dist.get_world_size()\n"

RIGHT = {
    "the batch size of a process at the top": [
        (WORLD_SIZE, f"{WORLD_SIZE}BATCH_SIZE //= world_size\n"),
        (LR, "lr=LR"),
    ],
}

WRONG = {
    "only the batch size": (
        [(LOADER, SHARE)],
        "With 2 processes, the learning rate was 1 instead of 0.5",
    ),
    "the batch size of two processes": (
        [(LOADER, SHARE.replace("world_size", "2")), (LR, "lr=LR")],
        "With 3 processes, a training step had 144 images instead of 96",
    ),
    "without a sampler": (
        [(LOADER, SHARE.replace("sampler=sampler", "shuffle=True")), (LR, "lr=LR")],
        "Each rank trained on all 768 images",
    ),
}
