"""Accumulate the gradients of four batches for each training step.

The ranks should exchange gradients once per training step.

The result is right. What check.py sees: four messages per training step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4  # batches for one training step

dist.init_process_group("gloo")

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))

for k, (batch, labels) in enumerate(loader, start=1):
    loss = nn.functional.cross_entropy(ddp(batch), labels) / ACCUMULATE
    loss.backward()
    if k % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
