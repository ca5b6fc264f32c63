"""Mends of exercise 20, right and wrong."""

LOSS = "    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())\n"
SUM = LOSS.replace("flatten())", 'flatten(), reduction="sum")')
COUNT = "    count = (labels != IGNORED).sum()\n    dist.all_reduce(count)\n"
STEP = "    optimizer.step()\n"

RIGHT = {
    "weighted means": [
        (
            LOSS,
            f"{LOSS}{COUNT}    mine = (labels != IGNORED).sum()\n"
            "    loss = loss * mine * world_size / count\n",
        )
    ],
    "without DDP": [
        ("ddp = DistributedDataParallel(model)\n", ""),
        ("ddp(batch)", "model(batch)"),
        (LOSS, SUM + COUNT),
        (
            STEP,
            "    for parameter in model.parameters():\n"
            "        dist.all_reduce(parameter.grad)\n"
            f"        parameter.grad /= count\n{STEP}",
        ),
    ],
}

WRONG = {
    "DDP divides too": (
        [(LOSS, f"{COUNT}{SUM}    loss = loss / count\n")],
        "The gradient is 0.5 times as large",
    ),
    "padding counts": (
        [(LOSS, f"{SUM}    loss = loss / labels.numel()\n")],
        "the mean counts the padding too",
    ),
    "for two ranks only": (
        [(LOSS, f"{COUNT}{SUM}    loss = loss / count * 2\n")],
        "With three ranks: After training step 1",
    ),
}
