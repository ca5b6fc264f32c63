"""Evaluate a model on 100 images: 70 on rank 0, 30 on rank 1.

Print the mean loss of the 100 images.

Nothing fails. What you see: a number, but not the mean loss of the 100 images.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(100, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
model = nn.Linear(16, 4)

mine = range(0, 70) if rank == 0 else range(70, 100)  # rank 0 has the faster GPU
loader = DataLoader(dataset, batch_size=16, sampler=mine)

mean_loss = torch.tensor(0.0)
with torch.no_grad():
    for batch, labels in loader:
        mean_loss += nn.functional.cross_entropy(model(batch), labels)
mean_loss /= len(loader)
dist.all_reduce(mean_loss)
mean_loss /= world_size
if rank == 0:
    print(f"the mean loss of {len(dataset)} images is {mean_loss.item():.4f}")

dist.destroy_process_group()
