"""FSDP by hand 1: hold a part of each weight, and gather a layer only while it computes.

Each rank should hold 1 / n of each weight, its part, and give only its parts to the optimizer. A
layer gathers its whole weight from all ranks for its forward pass, and again for its backward
pass, and frees it each time: between two layers, a rank holds its parts, and one whole weight at
most. The model should learn the same, with any number of ranks that divides the weights.

Nothing fails. What check.py sees: each rank holds all weights.
"""

import torch
import torch.distributed as dist
from torch import nn


class Product(torch.autograd.Function):
    """batch @ weight.T, and in the backward pass the mean of the weight's gradient over all ranks.

    What forward() gives to ctx.save_for_backward() is held until the backward pass of the layer.
    backward() returns a gradient for each argument of forward().
    """

    @staticmethod
    def forward(ctx, batch, weight):
        ctx.save_for_backward(batch, weight)
        return batch @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        batch, weight = ctx.saved_tensors
        weight_gradient = gradient.T @ batch / dist.get_world_size()
        dist.all_reduce(weight_gradient)
        return gradient @ weight, weight_gradient


class Linear(nn.Module):
    """A linear layer without bias."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(outputs, inputs)))

    def forward(self, batch):
        return Product.apply(batch, self.weight)


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
