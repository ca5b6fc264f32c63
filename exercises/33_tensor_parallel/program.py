"""Cut the two layers of a block, so that each rank holds and computes 1 / n of both.

All ranks read the same images. The first layer of the block should be cut by columns: each rank
computes some of its outputs, which are rows of the tensor, since torch stores a weight as (outputs,
inputs). The second should be cut by rows: each rank takes these outputs as its inputs, and the sum
over all ranks is the output. One all-reduce is enough in the forward pass, and one in
the backward pass: each rank needs the whole gradient of the block's input. The model should learn
the same, with any number of ranks that divides the weights.

Nothing fails. What check.py sees: each rank holds and computes all of both layers.
"""

import torch
import torch.distributed as dist
from torch import nn


class Column(nn.Module):
    """The first layer of a block: 64 inputs, 512 outputs."""

    def __init__(self):
        super().__init__()
        # 1. Here: keep some of the rows of this tensor, which are some of the outputs.
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(512, 64)))

    def forward(self, batch):
        # 2. Here: in the backward pass, the gradient of the batch is a sum over all ranks.
        return nn.functional.linear(batch, self.weight)


class Row(nn.Module):
    """The second layer of a block: 512 inputs, 64 outputs."""

    def __init__(self):
        super().__init__()
        # 3. Here: keep the columns of this tensor that belong to these outputs.
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(64, 512)))

    def forward(self, batch):
        # 4. Here: the output is a sum over all ranks. Its gradient is the same on all ranks.
        return nn.functional.linear(batch, self.weight)


dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
first, last = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)  # whole, on all ranks
model = nn.Sequential(first, nn.ReLU(), Column(), nn.ReLU(), Row(), nn.ReLU(), last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

images = torch.randn(128, 16)
targets = images[:, :4].argmax(dim=1)
for batch, labels in zip(images.split(32), targets.split(32), strict=True):
    loss = nn.functional.cross_entropy(model(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    outputs = model(images)  # check.py compares them with those of one process
dist.destroy_process_group()
