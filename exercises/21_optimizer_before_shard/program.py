"""Train a model whose weights are divided between the ranks by fully_shard.

The ranks should train as one process does with the images of all ranks, and each rank should hold
half of the weights.

Nothing fails. What you see: the loss does not fall.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
fully_shard(model, mesh=mesh)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

dist.destroy_process_group()
