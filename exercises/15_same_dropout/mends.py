"""Mends of exercise 15, right and wrong."""

SEED = "    torch.manual_seed(epoch)  # an epoch is then the same after a restart\n"
FIRST_SEED = "torch.manual_seed(0)\n"
LOADER = "loader = DataLoader(dataset, batch_size=32, sampler=sampler)\n"
MODEL = "model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))\n"
CLASS = """\
class Net(nn.Sequential):
    def forward(self, batch):
        return self[1](drop(self[0](batch)))


model = Net(nn.Linear(16, 64), nn.Linear(64, 4))
"""
FUNCTION = f"drop = nn.functional.dropout\n\n\n{CLASS}"
MASK = f"""\
def drop(activations):
    return activations * (torch.rand(activations.shape, generator=generator) < 0.5) * 2


{CLASS}"""

RIGHT = {
    "a seed for each epoch and rank": [
        (SEED, "    torch.manual_seed(epoch * dist.get_world_size() + rank)\n")
    ],
    "one seed for each rank, after the data": [
        (SEED, ""),
        (LOADER, f"{LOADER}torch.manual_seed(1 + rank)\n"),
    ],
    "dropout as a function": [
        (MODEL, FUNCTION),
        (SEED, "    torch.manual_seed(2 * epoch + rank)\n"),
    ],
    "a mask of one's own": [
        (MODEL, MASK),
        (SEED, "    generator = torch.Generator().manual_seed(2 * epoch + rank)\n"),
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
    "the same masks as a function": ([(MODEL, FUNCTION)], "both ranks drop the same activations"),
    "masks of one's own, the same ones": (
        [
            (MODEL, MASK),
            (SEED, "    generator = torch.Generator().manual_seed(epoch)\n"),
        ],
        "both ranks drop the same activations",
    ),
    "one rank is some numbers ahead": (
        [(SEED, f"{SEED}    torch.rand(16 * rank)\n")],
        "The ranks draw the same random numbers, one of them 8 later",
    ),
    "another probability on each rank": (
        [("nn.Dropout(0.5)", "nn.Dropout(0.4 + 0.1 * rank)")],
        "The random choices of a rank depend on those of the other",
    ),
    "all images on both ranks": (
        [
            (SEED, "    torch.manual_seed(2 * epoch + rank)\n"),
            ("DistributedSampler(dataset)", "DistributedSampler(dataset, 1, 0)"),
        ],
        "Each rank trained on all 256 images",
    ),
}
