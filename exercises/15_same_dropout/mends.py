"""Mends of exercise 15, right and wrong."""

SEED = "    torch.manual_seed(epoch)  # an epoch is then the same after a restart\n"
FIRST_SEED = "torch.manual_seed(0)\n"
LOADER = "loader = DataLoader(dataset, batch_size=32, sampler=sampler)\n"

RIGHT = {
    "a seed for each epoch and rank": [
        (SEED, "    torch.manual_seed(epoch * dist.get_world_size() + rank)\n")
    ],
    "one seed for each rank, after the data": [
        (SEED, ""),
        (LOADER, f"{LOADER}torch.manual_seed(1 + rank)\n"),
    ],
}

WRONG = {
    "epoch + rank": (
        [(SEED, "    torch.manual_seed(epoch + rank)\n")],
        "Rank 0 in step 1 of epoch 1 drops the same activations as rank 1 in step 1 of epoch 0",
    ),
    "the seed of the rank at the top": (
        [(SEED, ""), (FIRST_SEED, "torch.manual_seed(rank)\n")],
        "train on images that rank 0 does not have",
    ),
    "the time": (
        [
            (
                SEED,
                "    import time\n\n"
                "    torch.manual_seed(int(time.time()) + 1000 * rank + epoch)\n",
            )
        ],
        "Two runs of the program end with different weights",
    ),
}
