"""Train for three epochs on 256 images. Each epoch should have an order of its own.

Nothing fails. What you see: every epoch begins with the same five images, and in every epoch a
rank reads the images that it read before.
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
dataset = TensorDataset(images, targets, torch.arange(256))

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

for epoch in range(3):
    for step, (batch, labels, numbers) in enumerate(loader):
        if step == 0:
            print(f"epoch {epoch} begins with images {numbers[:5].tolist()}")
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
