"""Mends of exercise 33, right and wrong."""

COLUMN = "        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(512, 64)))\n"
ROW = "        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(64, 512)))\n"
TWO = """\
        # 2. Here: in the backward pass, the gradient of the batch is a sum over all ranks.
        return nn.functional.linear(batch, self.weight)
"""
FOUR = """\
        # 4. Here: the output is a sum over all ranks. Its gradient is the same on all ranks.
        return nn.functional.linear(batch, self.weight)
"""
CLASS = "class Column(nn.Module):\n"

SUM = f"""\
def total(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


{CLASS}"""
EVERY = """\
        weight = nn.init.kaiming_uniform_(torch.empty(512, 64))
        self.weight = nn.Parameter(weight[rank::world_size])
"""
EVERY_COLUMN = """\
        weight = nn.init.kaiming_uniform_(torch.empty(64, 512))
        self.weight = nn.Parameter(weight[:, rank::world_size])
"""
HOOK = """\
        batch = batch.view_as(batch)
        if batch.requires_grad:
            batch.register_hook(total)
        return nn.functional.linear(batch, self.weight)
"""
ADD = """\
        part = nn.functional.linear(batch, self.weight)
        return part + total(part.detach()) - part.detach()
"""
OF_TORCH = """\
        from torch.distributed.nn.functional import all_reduce

        return all_reduce(nn.functional.linear(batch, self.weight))
"""
ALL = [(CLASS, SUM), (COLUMN, EVERY), (ROW, EVERY_COLUMN), (TWO, HOOK), (FOUR, ADD)]

RIGHT = {"every n-th column, a hook, and a constant that is added": ALL}

WRONG = {
    "no sum in the backward pass": (
        [*ALL[:3], ALL[4]],
        "the layer before the block gets on rank 0 a gradient of norm 0.1",
    ),
    "the gradient of the output is summed too": (
        [*ALL[:4], (FOUR, OF_TORCH)],
        "a gradient of norm 0.5",
    ),
}
