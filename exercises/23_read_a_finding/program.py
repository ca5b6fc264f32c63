"""Train for eight epochs, and halve the learning rate if the loss falls by less than a tenth.

The ranks should keep equal learning rates, and train as one process does with the images of both.

Nothing fails. launch/check_ranks.py, between torchrun and this program, says:

found: the lr of the ranks differs in training step 17: 1 on rank 0, 0.5 on rank 1.
ReduceLROnPlateau.step() got 4.16471 on rank 0, 4.44979 on rank 1 at program.py:44: all ranks must
decide on one number, so sum it over the ranks before (docs/copy-setup-distributed.md)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

for epoch in range(8):
    sampler.set_epoch(epoch)
    total = 0.0
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step(total)
    print(f"epoch {epoch}: loss {total / len(loader):.3f}, lr {scheduler.get_last_lr()[0]}")

dist.destroy_process_group()
