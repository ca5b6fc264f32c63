"""Average the gradients in buckets of about 40 kB, each with one message.

A message has a fixed cost, so many small messages are slow. The model has 16 parameters; expect
three or four messages per training step. They may begin after the backward pass. The weights should
be those of torch's DDP, also if a parameter is frozen or not used.

Nothing fails. What check.py sees: the ranks begin equal, but each trains a model of its own.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUCKET_SIZE = 40_000  # bytes


class MyDDP(nn.Module):
    """A model whose gradients are averaged over all ranks."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        # 1. Here: divide the parameters into buckets.

    def forward(self, batch):
        return self.model(batch)

    def average_gradients(self):
        """Replace each gradient by its mean over all ranks, after the backward pass."""
        # 2. Here.


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # the ranks would begin with different weights
layers = [nn.Linear(16, 64), nn.ReLU()]
for _ in range(6):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 4))
if "ODD_MODEL" in os.environ:  # check.py tries both models
    layers[4].weight = layers[2].weight  # tied
    layers[6].requires_grad_(False)  # frozen
    model.unused = nn.Parameter(torch.zeros(64))
ddp = MyDDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    ddp.average_gradients()
    optimizer.step()

dist.destroy_process_group()
