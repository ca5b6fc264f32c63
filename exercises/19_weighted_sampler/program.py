"""Train for two epochs on images that a sampler draws, those of a rare class more often.

In an epoch, all ranks together should draw 96 images with the weights, none of them twice, and
train on each once. Each epoch should draw again. check.py also starts three ranks.

Nothing fails. What you see: each rank trains on all 96 images of an epoch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(240, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
weights = torch.ones(240)
weights[:30] = 50  # the images of a rare class

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sampler = WeightedRandomSampler(weights, 96, replacement=False)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

for epoch in range(2):
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

dist.destroy_process_group()
