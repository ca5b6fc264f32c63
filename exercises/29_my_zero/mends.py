"""Mends of exercise 29, right and wrong."""

OPTIMIZER = "        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=momentum)\n"
STEP = "        self.optimizer.step()\n"

SHARES = """\
        count = dist.get_world_size()
        size = -(-len(self.parameters) // count)
        self.parts = [self.parameters[k * size : (k + 1) * size] for k in range(count)]
        mine = self.parts[dist.get_rank()]
        self.optimizer = torch.optim.SGD(mine, lr=lr, momentum=momentum)
"""

RIGHT = {
    "a part of one long vector": [
        (
            OPTIMIZER,
            "        weights = nn.utils.parameters_to_vector(self.parameters).detach()\n"
            "        parts = weights.chunk(dist.get_world_size())\n"
            "        self.mine = nn.Parameter(parts[dist.get_rank()].clone())\n"
            "        self.optimizer = torch.optim.SGD([self.mine], lr=lr, momentum=momentum)\n",
        ),
        (
            STEP,
            "        gradients = [torch.zeros_like(p) if p.grad is None else p.grad\n"
            "                     for p in self.parameters]\n"
            "        flat = nn.utils.parameters_to_vector(gradients)\n"
            "        self.mine.grad = flat.chunk(dist.get_world_size())[dist.get_rank()]\n"
            "        self.optimizer.step()\n"
            "        for rank, part in enumerate(flat.chunk(dist.get_world_size())):\n"
            "            part.copy_(self.mine.data) if rank == dist.get_rank() else None\n"
            "            dist.broadcast(part, src=rank)\n"
            "        nn.utils.vector_to_parameters(flat, self.parameters)\n",
        ),
    ],
}

WRONG = {
    "no broadcast": (
        [(OPTIMIZER, SHARES)],
        "At the end with 2 ranks, the ranks have different weights",
    ),
    "torch's own": (
        [
            (
                OPTIMIZER,
                "        from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
                "        self.optimizer = ZeroRedundancyOptimizer(\n"
                "            self.parameters, torch.optim.SGD, lr=lr, momentum=momentum\n"
                "        )\n",
            )
        ],
        "ZeroRedundancyOptimizer of torch does this already",
    ),
}
