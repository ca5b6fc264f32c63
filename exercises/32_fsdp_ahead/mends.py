"""Mends of exercise 32, right and wrong."""

PRODUCT = "        return batch @ weight.T\n"
GATHER = """\
    def gather(self):
        \"\"\"Return the whole weight.\"\"\"
        parts = [torch.empty_like(self.part) for _ in range(world_size)]
        dist.all_gather(parts, self.part)
        return torch.cat(parts)
"""
STEP = "    outputs = model(batch[rank::world_size])\n"

NEXT = "        for following in layer.following:\n            following.start()\n"
START = """\
    def start(self):
        parts = [torch.empty_like(self.part) for _ in range(world_size)]
        self.ahead = parts, dist.all_gather(parts, self.part, async_op=True)

    def gather(self):
        if not hasattr(self, "ahead"):
            self.start()
        parts, work = self.ahead
        work.wait()
        del self.ahead
        return torch.cat(parts)
"""

RIGHT = {"parts that are there or not": [(PRODUCT, NEXT + PRODUCT), (GATHER, START)]}

WRONG = {
    "after the product": (
        [
            (PRODUCT, f"        output = batch @ weight.T\n{NEXT}        return output\n"),
            (GATHER, START),
        ],
        "Layer 1 computes its matrix product before the gather of the next weight begins",
    ),
    "a gather that waits": (
        [(PRODUCT, f"{NEXT}            following.ahead[1].wait()\n{PRODUCT}"), (GATHER, START)],
        "Layer 1 waits for the weight of the next one",
    ),
    "all layers at once": (
        [(STEP, f"    [layer.start() for layer in model[::2]]\n{STEP}"), (GATHER, START)],
        "between two layers of the forward pass",
    ),
}
