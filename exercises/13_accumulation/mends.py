"""Mends of exercise 13, right and wrong."""

FORWARD = "    loss = nn.functional.cross_entropy(ddp(batch), labels) / ACCUMULATE\n"
BACKWARD = "    loss.backward()\n"
STEP = "        optimizer.step()\n"
LOADER = "DataLoader(dataset, batch_size=16,"

RIGHT = {
    "the attribute that no_sync sets": [
        (FORWARD, f"    ddp.require_backward_grad_sync = k % ACCUMULATE == 0\n{FORWARD}")
    ],
    "an average by hand before the step": [
        (FORWARD, f"    ddp.require_backward_grad_sync = False\n{FORWARD}"),
        (
            STEP,
            "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad)\n"
            f"            parameter.grad /= dist.get_world_size()\n{STEP}",
        ),
    ],
}

WRONG = {
    "never an exchange": (
        [(FORWARD + BACKWARD, f"    with ddp.no_sync():\n    {FORWARD}    {BACKWARD}")],
        "After training step 1, the weights of the ranks differ",
    ),
    "larger batches": (
        [("ACCUMULATE = 4", "ACCUMULATE = 1"), (LOADER, LOADER.replace("16", "64"))],
        "A forward pass had 64 images",
    ),
    "no_sync for the backward pass only": (
        [(BACKWARD, f"    with ddp.no_sync():\n    {BACKWARD}")],
        "no_sync() held only for the backward pass",
    ),
}
