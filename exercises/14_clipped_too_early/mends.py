"""Mends of exercise 14, right and wrong."""

CLIP = "    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n"
REDUCE = "        dist.all_reduce(parameter.grad)\n"
DIVIDE = "        parameter.grad /= world_size\n"
LOOP = "    for parameter in model.parameters():\n"
AVERAGE = LOOP + REDUCE + DIVIDE
MODEL = "model = nn.Linear(16, 4)\n"

RIGHT = {
    "DDP averages, then clip": [
        (MODEL, "model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))\n"),
        (CLIP + AVERAGE, CLIP),
    ],
}

WRONG = {
    "a sum, not the mean": (
        [(CLIP + AVERAGE, LOOP + REDUCE + CLIP)],
        "after training step 4 not those of one process",
    ),
    "clipped after the step": (
        [
            (CLIP + AVERAGE, AVERAGE),
            ("    optimizer.step()\n", f"    optimizer.step()\n{CLIP}"),
        ],
        "In training step 1, the optimizer got a gradient with norm 0.686",
    ),
    "the sum clipped, then divided": (
        [(CLIP + AVERAGE, f"{LOOP}{REDUCE}{CLIP}{LOOP}{DIVIDE}")],
        "The gradient is 0.5 times as large; expected the mean",
    ),
}
