"""FSDP by hand 2: reduce-scatter the gradients.

The program holds a part of each weight, and gathers it when it is needed. But the backward pass of
a layer gives the mean of the whole gradient to all ranks, although a rank needs only its part. And
this part is a view, which keeps the whole tensor. Each rank should get and hold only its part: the
messages of a training step then have three quarters of the bytes.

The outputs are right. What check.py sees: each rank sends too much, and holds whole gradients.
"""

import torch
import torch.distributed as dist
from torch import nn


def gather(part):
    """Return the whole weight, of which each rank has a part."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


class Product(torch.autograd.Function):
    """batch @ weight.T, for a weight of which this rank has a part."""

    @staticmethod
    def forward(ctx, batch, part):
        ctx.save_for_backward(batch, part)
        return batch @ gather(part).T

    @staticmethod
    def backward(ctx, gradient):
        batch, part = ctx.saved_tensors
        weight_gradient = gradient.T @ batch / world_size
        # Here.
        dist.all_reduce(weight_gradient)
        part_gradient = weight_gradient.chunk(world_size)[rank]
        return gradient @ gather(part), part_gradient


class Linear(nn.Module):
    """A linear layer without bias. Its weight is divided among the ranks."""

    def __init__(self, inputs, outputs):
        super().__init__()
        weight = nn.init.kaiming_uniform_(torch.empty(outputs, inputs))
        self.part = nn.Parameter(weight.chunk(world_size)[rank].clone())

    def forward(self, batch):
        return Product.apply(batch, self.part)


dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
layers = [Linear(16, 256), nn.ReLU()]
for _ in range(6):
    layers += [Linear(256, 256), nn.ReLU()]
model = nn.Sequential(*layers, Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

images = torch.randn(128, 16)
targets = images[:, :4].argmax(dim=1)
for batch, labels in zip(images.split(32), targets.split(32), strict=True):
    outputs = model(batch[rank::world_size])
    loss = nn.functional.cross_entropy(outputs, labels[rank::world_size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    outputs = model(images)  # check.py compares them with those of one process
dist.destroy_process_group()
