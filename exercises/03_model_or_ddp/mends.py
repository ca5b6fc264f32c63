"""Mends of exercise 3, right and wrong."""

BACKWARD = "    loss.backward()\n"
STEP = "    optimizer.step()\n"

RIGHT = {
    "one name for the model and DDP": [
        ("ddp = DistributedDataParallel(model)", "model = DistributedDataParallel(model)"),
        ("model.weight", "model.module.weight"),
    ],
    "weights averaged after the step": [
        ("ddp = DistributedDataParallel(model)\n", ""),
        (
            STEP,
            f"{STEP}    for parameter in model.parameters():\n"
            "        dist.all_reduce(parameter.data)\n"
            "        parameter.data /= dist.get_world_size()\n",
        ),
    ],
    "a call with a keyword": [("model(batch)", "ddp(input=batch)")],
}

WRONG = {
    "a class of one's own": (
        [
            ("model = nn.Linear(16, 4)", "class Net(nn.Linear):\n    pass\n\n\nmodel = Net(16, 4)"),
            ("model(batch)", "ddp(batch)"),
        ],
        "I cannot read the variable `model` in another process",
    ),
    "gradients summed": (
        [
            (
                BACKWARD,
                f"{BACKWARD}    for parameter in model.parameters():\n"
                "        dist.all_reduce(parameter.grad)\n",
            )
        ],
        "not those of one process",
    ),
    "a forward pass more, through DDP": (
        [("for batch, labels in loader:\n", "for batch, labels in loader:\n    ddp(batch)\n")],
        "Each image went through the model 2 times",
    ),
}
