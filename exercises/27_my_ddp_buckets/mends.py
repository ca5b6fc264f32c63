"""Mends of exercise 27, right and wrong."""

ONE = """\
        # 1. Here: divide the parameters into buckets, and register a hook for each parameter.
"""
TWO = "        # 2. Here.\n"
THREE = "        # 3. Here.\n"
SIZE = "BUCKET_SIZE = 40_000"

# Buckets that are filled before the training
FILL = """\
        self.buckets = []
        parameters, size = [], 0
        for parameter in reversed(list(model.parameters())):
            parameters.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= BUCKET_SIZE:
                self.buckets.append({"parameters": parameters, "ready": 0})
                parameters, size = [], 0
        if parameters:
            self.buckets.append({"parameters": parameters, "ready": 0})
"""
HOOKS = """\
        for bucket in self.buckets:
            for parameter in bucket["parameters"]:
                parameter.register_post_accumulate_grad_hook(lambda _, b=bucket: self.count(b))
        self.works = []
"""
COUNT = """\
        bucket["ready"] += 1
        if bucket["ready"] == len(bucket["parameters"]):
            flat = torch.cat([p.grad.flatten() for p in bucket["parameters"]])
            self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
"""
GATHER = """\
            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            self.works.append((bucket, parts, dist.all_gather(parts, flat, async_op=True)))
"""
FINISH = """\
        for bucket, flat, work in self.works:
            work.wait()
            flat /= dist.get_world_size()
            first = 0
            for p in bucket["parameters"]:
                p.grad.copy_(flat[first : first + p.numel()].view_as(p))
                first += p.numel()
            bucket["ready"] = 0
        self.works.clear()
"""

# A bucket that is filled while the gradients are computed
FILL_LATER = """\
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.count)
        self.ready = []
        self.works = []
"""
COUNT_LATER = """\
        self.ready.append(bucket)
        if sum(parameter.nbytes for parameter in self.ready) >= BUCKET_SIZE:
            self.send()

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.ready])
        bucket = {"parameters": self.ready}
        self.works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        self.ready = []
"""

RIGHT = {
    "dictionaries": [(ONE, FILL + HOOKS), (TWO, COUNT), (THREE, FINISH)],
    "all gradients on all ranks": [
        (ONE, FILL + HOOKS),
        (TWO, COUNT.partition("            self.works")[0] + GATHER),
        (THREE, FINISH.replace("flat /= dist.get_world_size()", "flat = sum(flat) / len(flat)")),
    ],
    "a bucket that is filled later, the last one sent at the end": [
        (ONE, FILL_LATER),
        (TWO, COUNT_LATER),
        (THREE, f"        self.send()\n{FINISH}"),
    ],
}

WRONG = {
    "nothing": ([], "After training step 1, the weights of the ranks differ"),
    "one bucket": (
        [
            (SIZE, "BUCKET_SIZE = 1_000_000"),
            (ONE, FILL + HOOKS),
            (TWO, COUNT),
            (THREE, FINISH),
        ],
        "The first message began when the backward pass had computed 15 of its 15 matrix products",
    ),
    "all buckets after the backward pass": (
        [
            (ONE, FILL + HOOKS),
            (
                THREE,
                "        for bucket in self.buckets:\n"
                '            bucket["ready"] = len(bucket["parameters"]) - 1\n'
                f"            self.send(bucket)\n{FINISH}\n"
                f"    def send(self, bucket):\n{COUNT}",
            ),
        ],
        "12 of 12 messages began after the backward pass",
    ),
    "half of the sum, whatever the number of ranks": (
        [
            (ONE, FILL + HOOKS),
            (TWO, COUNT),
            (THREE, FINISH.replace("dist.get_world_size()", "2")),
        ],
        "With three ranks, they are not those of one process",
    ),
}
