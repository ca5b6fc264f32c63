"""Train on images of which one is damaged.

The ranks must not wait for each other forever: either all of them end, and at least one says why
with an error, or all of them train on, with equal weights.

What you see: rank 1 skips a batch, rank 0 does not, and the program never ends.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
images[48] = float("nan")  # a damaged image
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    try:
        if batch.isnan().any():
            raise ValueError("a damaged image")
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except ValueError as error:
        print(f"skipping a batch: {error}")

dist.barrier()  # the epoch is over
dist.destroy_process_group()
