"""Flip each image at random.

The ranks should flip independently, and a second run should flip as the first did.

Nothing fails. What you see: both ranks print the same first flips.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
images = torch.randn(256, 4, 4)
targets = images[:, 0].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

flips = []  # of each batch: which images are flipped
for batch, labels in loader:
    flip = torch.rand(len(batch)) < 0.5
    flips.append(flip)
    batch[flip] = batch[flip].flip(1)  # upside down
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the first flips: {flips[0][:10].int().tolist()}")

dist.destroy_process_group()
