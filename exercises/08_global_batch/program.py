"""Train with 96 images per training step and learning rate 0.5, on any number of processes.

One process alone takes 8 steps per epoch. What you see: two processes take 4, with 192 images
each. check.py starts the program with two and with three processes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 96  # of one process that trains alone
LR = 0.5  # for this batch size

dist.init_process_group("gloo")
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(768, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LR * world_size)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

for step, (batch, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {len(batch) * world_size} images, loss {loss.item():.3f}")

dist.destroy_process_group()
