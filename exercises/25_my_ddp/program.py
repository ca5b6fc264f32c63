"""Write what DistributedDataParallel does, in the simplest way.

All ranks should begin with the weights of rank 0, and after the backward pass each gradient should
be the mean over all ranks, two or three. The weights should then be those of torch's DDP, up to
rounding. A model may share a weight between two layers, and a parameter may be frozen or unused.

Nothing fails. What check.py sees: the ranks begin with different weights, and each trains a model
of its own.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MyDDP(nn.Module):
    """A model whose gradients are averaged over all ranks."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # 1. Here: all ranks get the weights of rank 0.

    def forward(self, batch):
        return self.model(batch)

    def average_gradients(self):
        """Replace each gradient by its mean over all ranks, after the backward pass."""
        # 2. Here.


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # the ranks would begin with different weights
layers = [nn.Linear(16, 64), nn.ReLU()]
for _ in range(6):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 4))
if "ODD_MODEL" in os.environ:  # check.py tries both models
    layers[4].weight = layers[2].weight  # tied
    layers[6].requires_grad_(False)  # frozen
    model.unused = nn.Parameter(torch.zeros(64))
ddp = MyDDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    ddp.average_gradients()
    optimizer.step()

dist.destroy_process_group()
