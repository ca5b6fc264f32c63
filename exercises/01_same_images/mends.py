"""Mends of exercise 1, right and wrong."""

LOADER = "loader = DataLoader(dataset, batch_size=32, shuffle=True)"
LOOP = "for step, (batch, labels) in enumerate(loader):\n"
IMPORT = "from torch.utils.data import DataLoader, TensorDataset"

RIGHT = {
    "every second image, and its size and number are printed": [
        (
            LOADER,
            "loader = DataLoader(dataset, batch_size=32, sampler=range(rank, 256, 2))\n"
            "print(dataset[0][0].shape, dataset[1][0].shape, sum(len(x) for x, _ in loader))",
        )
    ],
}

WRONG = {
    "half the steps, in another order on each rank": (
        [
            (LOADER, f"torch.manual_seed(rank)\n{LOADER}"),
            (LOOP, f"{LOOP}    if step == 4:\n        break\n"),
        ],
        "images were trained on several ranks",
    ),
    "the sampler of rank 0 on both ranks": (
        [
            (IMPORT, "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset"),
            (
                LOADER,
                "sampler = DistributedSampler(dataset, num_replicas=2, rank=0)\n"
                "loader = DataLoader(dataset, batch_size=32, sampler=sampler)",
            ),
        ],
        "together they saw 50% of the training set",
    ),
    "a rank reads all images, and trains on half of each batch": (
        [(LOOP, f"{LOOP}    batch, labels = batch[rank::2], labels[rank::2]\n")],
        "trained on 128 images, but read 256",
    ),
}
