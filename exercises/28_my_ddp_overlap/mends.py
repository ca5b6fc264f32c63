"""Mends of exercise 28, right and wrong."""

ONE = "        # 1. Here: have complete() called for each parameter.\n"
TWO = "        # 2. Here.\n"
THREE = """\
        dist.all_reduce(flat)  # 3. Here: without waiting.
        self.sent.append((parameters, flat))
"""
FOUR = """\
        for bucket in self.buckets:  # 4. Here: only those that have not been sent.
            self.send(bucket)
        for parameters, flat in self.sent:
"""

HOOKS = """\
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.complete)
        self.left = [bucket[:] for bucket in self.buckets]  # parameters without a gradient
"""
COMPLETE = """\
        for bucket, left in zip(self.buckets, self.left, strict=True):
            if any(p is parameter for p in left):
                left[:] = [p for p in left if p is not parameter]
                if not left:
                    self.send(bucket)
"""
SEND = """\
        work = dist.all_reduce(flat, async_op=True)
        self.sent.append((parameters, flat, work))
"""
FINISH = """\
        for bucket, left in zip(self.buckets, self.left, strict=True):
            if left:
                self.send(bucket)
            left[:] = bucket
        for parameters, flat, work in self.sent:
            work.wait()
"""
ALL = [(ONE, HOOKS), (TWO, COMPLETE), (THREE, SEND), (FOUR, FINISH)]

# A bucket that is filled while the gradients are computed
FILL_LATER = """\
        self.left.append(parameter)
        if sum(p.nbytes for p in self.left) >= BUCKET_SIZE:
            self.send(self.left)
            self.left = []
"""
FINISH_LATER = FINISH.replace(FINISH.partition("        for parameters")[0], "")

RIGHT = {
    "a bucket that is filled later, the last one sent at the end": [
        (ONE, HOOKS.partition("        self.left")[0] + "        self.left = []\n"),
        (TWO, FILL_LATER),
        (THREE, SEND),
        (FOUR, f"        self.send(self.left)\n        self.left = []\n{FINISH_LATER}"),
    ],
}

WRONG = {
    "a bucket with an unused parameter is never sent": (
        [
            *ALL[:3],
            (FOUR, FINISH.replace("                self.send(bucket)\n", "                pass\n")),
        ],
        "With WORLD_SIZE=3 and ODD_MODEL=1",
    ),
    "all buckets again at the end": (
        [*ALL[:3], (FOUR, FINISH.replace("if left:", "if True:"))],
        "12 of 24 messages began after the backward pass",
    ),
}
