"""Train for an epoch.

Rank 0 reads 90 images, rank 1 reads 60 others, in batches of 16. The program should end; some
images may be left out.

What you see: both ranks print four lines, although rank 0 has six batches, and the program never
ends.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
images = torch.randn(150, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
folder = range(0, 90) if rank == 0 else range(90, 150)  # each rank reads a folder of its own

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(Subset(dataset, folder), batch_size=16, shuffle=True)

for step, (batch, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} of {len(loader)}: loss {loss.item():.3f}")

dist.barrier()  # the epoch is over
dist.destroy_process_group()
