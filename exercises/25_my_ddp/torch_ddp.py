"""Exercises 25 to 29 with torch's DDP and an ordinary SGD, to compare with."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # the ranks would begin with different weights
layers = [nn.Linear(16, 64), nn.ReLU()]
for _ in range(6):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 4))
if "ODD_MODEL" in os.environ:
    layers[4].weight = layers[2].weight
    layers[6].requires_grad_(False)
    model.unused = nn.Parameter(torch.zeros(64))
ddp = DistributedDataParallel(model, find_unused_parameters="ODD_MODEL" in os.environ)
lr, momentum = (float(os.environ.get(*pair)) for pair in (("LR", 0.5), ("MOMENTUM", 0)))
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

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
