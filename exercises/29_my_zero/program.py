"""Divide the state of the optimizer: each rank keeps the momentum of about half of the weights.

A rank should update only its own parameters, with torch's SGD, and get the others from the rank
that updated them. The weights should be those of an ordinary SGD with momentum, bit for bit, with
two ranks or three. Gradients are averaged by DDP as usual. torch has all this, in
ZeroRedundancyOptimizer: here you write your own.

The result is right. What check.py sees: every rank keeps all of the momentum.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ShardedSGD:
    """SGD with momentum, of which each rank keeps a part."""

    def __init__(self, parameters, lr, momentum):
        self.parameters = list(parameters)
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=momentum)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
layers = [nn.Linear(16, 64), nn.ReLU()]
for _ in range(6):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 4))
if "ODD_MODEL" in os.environ:  # check.py tries both models
    layers[4].weight = layers[2].weight  # tied
    layers[6].requires_grad_(False)  # frozen
    model.unused = nn.Parameter(torch.zeros(64))
ddp = DistributedDataParallel(model, find_unused_parameters="ODD_MODEL" in os.environ)
optimizer = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9)

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
