"""Mends of exercise 7, right and wrong."""

LOSS = "        mean_loss += nn.functional.cross_entropy(model(batch), labels)\n"
WEIGHTED = "        mean_loss += nn.functional.cross_entropy(model(batch), labels) * len(labels)\n"
DIVIDE = "mean_loss /= len(loader)\n"
REDUCE = "dist.all_reduce(mean_loss)\nmean_loss /= world_size\n"
MINE = "mine = range(0, 70) if rank == 0 else range(70, 100)"

RIGHT = {
    "means weighted with their images": [
        (LOSS, WEIGHTED),
        (DIVIDE, ""),
        (REDUCE, "dist.all_reduce(mean_loss)\nmean_loss /= len(dataset)\n"),
    ],
}

WRONG = {
    "the mean of the ranks' means": (
        [(LOSS, WEIGHTED), (DIVIDE, "mean_loss /= len(mine)\n")],
        "It is the mean of the means of the ranks",
    ),
    "the mean of batches of unequal sizes": (
        [(REDUCE, "mean_loss *= len(mine) / 100\ndist.all_reduce(mean_loss)\n")],
        "but the last batch of a rank is smaller",
    ),
    "parts of equal size": (
        [(MINE, "mine = range(rank, 100, 2)"), ("batch_size=16", "batch_size=50")],
        "Rank 0 evaluated 50 images and rank 1 50; expected 70 and 30",
    ),
}
