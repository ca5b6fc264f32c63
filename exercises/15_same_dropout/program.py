"""Train with dropout for two epochs.

Each rank should drop other activations, each epoch too, and a second run should drop the same as
the first.

Nothing fails. What check.py sees: in each training step, all ranks drop the same activations.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

for epoch in range(2):
    torch.manual_seed(epoch)  # an epoch is then the same after a restart
    sampler.set_epoch(epoch)
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

dist.destroy_process_group()
