"""Mends of exercise 15, right and wrong."""

SEED = "    torch.manual_seed(epoch)  # an epoch is then the same after a restart\n"
FIRST_SEED = "torch.manual_seed(0)\n"
LOADER = "loader = DataLoader(dataset, batch_size=32, sampler=sampler)\n"
MODEL = "model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))\n"
MASK = """\
class Net(nn.Sequential):
    def forward(self, batch):
        activations = self[0](batch)
        keep = torch.rand(activations.shape) < 0.5
        return self[1](activations * keep * 2)


model = Net(nn.Linear(16, 64), nn.Linear(64, 4))
"""

RIGHT = {
    "a seed for each epoch and rank": [
        (SEED, "    torch.manual_seed(epoch * dist.get_world_size() + rank)\n")
    ],
    "one seed for each rank, after the data": [
        (SEED, ""),
        (LOADER, f"{LOADER}torch.manual_seed(1 + rank)\n"),
    ],
    "a mask of one's own": [
        (MODEL, MASK),
        (SEED, "    torch.manual_seed(2 * epoch + rank)\n"),
    ],
}

WRONG = {
    "epoch + rank": (
        [(SEED, "    torch.manual_seed(epoch + rank)\n")],
        "Rank 0 in batch 4 and rank 1 in batch 0 draw the same random numbers",
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
    "one rank is some numbers ahead": (
        [(SEED, f"{SEED}    torch.rand(16 * rank)\n")],
        "The ranks draw the same random numbers, one of them 8 later",
    ),
    "another probability on each rank": (
        [("nn.Dropout(0.5)", "nn.Dropout(0.4 + 0.1 * rank)")],
        "The random choices of a rank depend on those of the other",
    ),
}
