"""Mends of exercise 10, right and wrong."""

EVAL = "model.eval()\n"
FORWARD = "model(images[mine])"

RIGHT = {
    "evaluate the DDP object, which copies the statistics": [(FORWARD, "ddp(images[mine])")],
    "the mean of the statistics": [
        (
            EVAL,
            f"{EVAL}for buffer in model.buffers():\n"
            "    dist.all_reduce(buffer)\n"
            "    buffer.copy_(buffer / world_size)\n",
        )
    ],
}

WRONG = {
    "statistics of the batch": ([(EVAL, "")], "expected model.eval()"),
    "only the mean": (
        [(EVAL, f"{EVAL}dist.broadcast(model[0].running_mean, src=0)\n")],
        "the running_var of the first pixel is",
    ),
    "statistics summed": (
        [(EVAL, f"{EVAL}for buffer in model.buffers():\n    dist.all_reduce(buffer)\n")],
        "but not one that the training has collected",
    ),
}
