"""Mends of exercise 26, right and wrong."""

ONE = "        # 1. Here: have start() called for each parameter.\n"
TWO = "        # 2. Here.\n"
THREE = "        # 3. Here.\n"

HOOK = """\
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start)
        self.works = []
"""
SEND = """\
        parameter.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))
"""
WAIT = """\
        for work in self.works:
            work.wait()
        self.works.clear()
"""
SEND_LOSS = "        dist.all_reduce(loss.detach())\n"

RIGHT = {
    "the losses are summed too": [(ONE, HOOK), (TWO, SEND), (THREE, f"{WAIT}{SEND_LOSS}")],
    "futures": [
        (ONE, HOOK),
        (TWO, SEND.replace("async_op=True)", "async_op=True).get_future()")),
        (THREE, "        torch.futures.wait_all(self.works)\n        self.works.clear()\n"),
    ],
    "functional collectives": [
        (ONE, HOOK),
        (
            TWO,
            "        import torch.distributed._functional_collectives as functional\n\n"
            '        total = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)\n'
            "        self.works.append((parameter, total))\n",
        ),
        (
            THREE,
            "        for parameter, total in self.works:\n"
            "            parameter.grad = total / dist.get_world_size()\n"
            "        self.works.clear()\n",
        ),
    ],
}

WRONG = {
    "a wait in the hook": (
        [(ONE, HOOK), (TWO, SEND.replace("async_op=True)", "async_op=True).wait()"))],
        "The backward pass waits for its messages",
    ),
    "a list that is never empty again": (
        [(ONE, HOOK), (TWO, SEND), (THREE, WAIT.replace("        self.works.clear()\n", ""))],
        "empty the list",
    ),
    "hooks of frozen parameters": (
        [(ONE, HOOK.replace("parameter.requires_grad", "True")), (TWO, SEND), (THREE, WAIT)],
        "failed, in the run with WORLD_SIZE=3, ODD_MODEL=1",
    ),
}
