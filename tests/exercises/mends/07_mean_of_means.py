"""Mends of exercise 7, right and wrong."""

LOSS = "        mean_loss += nn.functional.cross_entropy(model(batch), labels)\n"
WEIGHTED = "        mean_loss += nn.functional.cross_entropy(model(batch), labels) * len(labels)\n"
DIVIDE = "mean_loss /= len(loader)\n"
REDUCE = "dist.all_reduce(mean_loss)\nmean_loss /= world_size\n"
MINE = "mine = range(0, 70) if rank == 0 else range(70, 100)"
PRINTED = "{mean_loss.item():.4f}"

RIGHT = {
    "means weighted with their images": [
        (LOSS, WEIGHTED),
        (DIVIDE, ""),
        (REDUCE, "dist.all_reduce(mean_loss)\nmean_loss /= len(dataset)\n"),
    ],
    "a sum that the print divides": [
        (LOSS, WEIGHTED),
        (DIVIDE, ""),
        (REDUCE, "dist.reduce(mean_loss, dst=0)\n"),
        (PRINTED, "{mean_loss.item() / len(dataset)}"),
    ],
    "the losses of all images gathered": [
        ("mean_loss = torch.tensor(0.0)", "losses = []"),
        (
            LOSS,
            "        outputs = model(batch)\n"
            '        of_batch = nn.functional.cross_entropy(outputs, labels, reduction="none")\n'
            "        losses += of_batch.tolist()\n",
        ),
        (
            f"{DIVIDE}{REDUCE}",
            "parts = [None] * world_size\n"
            "dist.all_gather_object(parts, losses)\n"
            "mean_loss = torch.tensor(sum(parts, [])).mean()\n",
        ),
    ],
}

WRONG = {
    "the mean of the ranks' means": (
        [(LOSS, WEIGHTED), (DIVIDE, "mean_loss /= len(mine)\n")],
        "It is the mean of the means of the ranks",
    ),
    "the mean of all batches": (
        [(DIVIDE, ""), (REDUCE, "dist.all_reduce(mean_loss)\nmean_loss /= 7\n")],
        "Rank 0 printed 1.60",
    ),
    "parts of equal size": (
        [(MINE, "mine = range(rank, 100, 2)"), ("batch_size=16", "batch_size=50")],
        "Rank 0 evaluated 50 images and rank 1 50; expected 70 and 30",
    ),
    "all images on rank 0": (
        [
            (MINE, "mine = range(100) if rank == 0 else []"),
            (LOSS, WEIGHTED),
            (DIVIDE, ""),
            (REDUCE, "mean_loss /= len(dataset)\n"),
        ],
        "Rank 0 evaluated 100 images and rank 1 0",
    ),
}
