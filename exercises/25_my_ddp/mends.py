"""Mends of exercise 25, right and wrong."""

ONE = "        # 1. Here: all ranks get the weights of rank 0.\n"
TWO = "        # 2. Here.\n"

BROADCAST = """\
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
"""
SUM = """\
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
"""
AVERAGE = f"{SUM}                parameter.grad /= dist.get_world_size()\n"

RIGHT = {
    "the state, and one message with all gradients": [
        (
            ONE,
            "        state = [model.state_dict()]\n"
            "        dist.broadcast_object_list(state, src=0)\n"
            "        model.load_state_dict(state[0])\n",
        ),
        (
            TWO,
            "        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]\n"
            "        flat = torch.cat([gradient.flatten() for gradient in gradients])\n"
            "        dist.all_reduce(flat)\n"
            "        flat /= dist.get_world_size()\n"
            "        parts = flat.split([gradient.numel() for gradient in gradients])\n"
            "        for gradient, part in zip(gradients, parts, strict=True):\n"
            "            gradient.copy_(part.view_as(gradient))\n",
        ),
    ],
}

WRONG = {
    "sums": (
        [(ONE, BROADCAST), (TWO, SUM)],
        "The gradient is 2 times as large, as the sum over the ranks is; expected the mean",
    ),
    "no frozen or unused parameter": (
        [(ONE, BROADCAST), (TWO, AVERAGE.replace("if parameter.grad is not None", "if True"))],
        "failed, in the run with WORLD_SIZE=3, ODD_MODEL=1",
    ),
    "no wait": (
        [(ONE, BROADCAST), (TWO, AVERAGE.replace(".grad)", ".grad, async_op=True)"))],
        "does not wait for 16 of them",
    ),
}
