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
    "one message, clipped by hand": [
        (
            CLIP + AVERAGE,
            "    flat = torch.cat([p.grad.flatten() for p in model.parameters()])\n"
            "    dist.all_reduce(flat)\n"
            "    flat /= world_size\n"
            "    norm = flat.norm()\n"
            "    flat *= (MAX_NORM / norm).clamp(max=1)\n"
            "    parts = flat.split([p.numel() for p in model.parameters()])\n"
            "    for p, part in zip(model.parameters(), parts, strict=True):\n"
            "        p.grad = part.view_as(p)\n",
        )
    ],
}

WRONG = {
    "a sum, not the mean": (
        [(CLIP + AVERAGE, LOOP + REDUCE + CLIP)],
        "after training step 4 not those of one process",
    ),
    "clipped before and after": (
        [(AVERAGE, AVERAGE + CLIP)],
        "after training step 1 not those of one process",
    ),
    "clipped after the step": (
        [
            (CLIP + AVERAGE, AVERAGE),
            ("    optimizer.step()\n", f"    optimizer.step()\n{CLIP}"),
        ],
        "In training step 1, the optimizer got a gradient with norm 0.686",
    ),
}
