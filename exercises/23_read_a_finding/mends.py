"""Mends of exercise 23, right and wrong."""

STEP = "    scheduler.step(total)\n"
TENSOR = "    shared = torch.tensor(total)\n"

RIGHT = {
    "the loss of rank 0": [
        (STEP, f"{TENSOR}    dist.broadcast(shared, src=0)\n    scheduler.step(shared.item())\n")
    ],
    "the learning rate of rank 0": [
        (
            STEP,
            f"{STEP}    lr = [optimizer.param_groups[0]['lr']]\n"
            "    dist.broadcast_object_list(lr)\n"
            "    optimizer.param_groups[0]['lr'] = lr[0]\n",
        )
    ],
}

WRONG = {
    "only rank 0 decides": (
        [(STEP, "    if rank == 0:\n        scheduler.step(total)\n")],
        "the learning rate is 0.5 on rank 0 and 1 on rank 1",
    ),
    "only rank 0 gets the sum": (
        [(STEP, f"{TENSOR}    dist.reduce(shared, dst=0)\n    scheduler.step(shared.item())\n")],
        "the schedulers got different numbers",
    ),
    "the learning rate never falls": ([(STEP, "")], "The learning rate goes from 1 to 1"),
}
