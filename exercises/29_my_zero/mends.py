"""Mends of exercise 29, right and wrong."""

OPTIMIZER = "        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=momentum)\n"
STEP = "        self.optimizer.step()\n"

HALVES = """\
        half = len(self.parameters) // 2
        self.parts = [self.parameters[:half], self.parameters[half:]]
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
            "        gradients = torch.cat([p.grad.flatten() for p in self.parameters])\n"
            "        self.mine.grad = gradients.chunk(dist.get_world_size())[dist.get_rank()]\n"
            "        self.optimizer.step()\n"
            "        parts = [torch.empty_like(self.mine) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(parts, self.mine.data)\n"
            "        nn.utils.vector_to_parameters(torch.cat(parts), self.parameters)\n",
        ),
    ],
    "torch's own": [
        (
            OPTIMIZER,
            "        from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
            "        self.optimizer = ZeroRedundancyOptimizer(\n"
            "            self.parameters, torch.optim.SGD, lr=lr, momentum=momentum\n"
            "        )\n",
        )
    ],
}

WRONG = {
    "no broadcast": (
        [(OPTIMIZER, HALVES)],
        "At the end, the ranks have different weights",
    ),
    "an optimizer for each parameter, on both ranks": (
        [
            (
                OPTIMIZER,
                "        self.optimizers = [\n"
                "            torch.optim.SGD([parameter], lr=lr, momentum=momentum)\n"
                "            for parameter in self.parameters\n"
                "        ]\n",
            ),
            (STEP, "        for optimizer in self.optimizers:\n            optimizer.step()\n"),
        ],
        "Rank 0 keeps 105,232 bytes of momentum, of 105,232",
    ),
}
