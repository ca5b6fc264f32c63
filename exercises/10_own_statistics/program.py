"""Train a model with batch norm, then evaluate it on 256 images, half of them on each rank.

Both ranks should evaluate the same model. nn.SyncBatchNorm cannot help here: it needs GPUs.

Nothing fails. What you see: the ranks print different running means.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
mine = range(rank, len(images), world_size)
with torch.no_grad():
    correct = (model(images[mine]).argmax(dim=1) == targets[mine]).sum()
dist.all_reduce(correct)
print(f"running mean {model[0].running_mean[0].item():.6f}, {correct.item()} of 256 correct")

dist.destroy_process_group()
