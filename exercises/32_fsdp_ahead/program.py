"""FSDP by hand 3: gather the weight of the next layer while this one computes.

The program gathers a weight when its layer begins, and waits. Instead, the forward pass of a layer
should start to gather the next weight before its own matrix product, and only the next layer should
wait for it. At most one weight should be gathered ahead, else the memory that was saved is lost
again. The backward pass may stay as it is. The model should learn the same.

The outputs are right. What check.py sees: each layer waits for its weight, while nothing computes.
"""

import torch
import torch.distributed as dist
from torch import nn


class Product(torch.autograd.Function):
    """batch @ weight.T, for the weight of a layer of which this rank has a part."""

    @staticmethod
    def forward(ctx, batch, part, layer):
        ctx.save_for_backward(batch)
        ctx.layer = layer
        weight = layer.gather()
        return batch @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (batch,) = ctx.saved_tensors
        weight_gradient = gradient.T @ batch / world_size
        part_gradient = torch.empty_like(ctx.layer.part)
        dist.reduce_scatter_tensor(part_gradient, weight_gradient)
        return gradient @ ctx.layer.gather(), part_gradient, None


class Linear(nn.Module):
    """A linear layer without bias. Its weight is divided among the ranks."""

    def __init__(self, inputs, outputs):
        super().__init__()
        weight = nn.init.kaiming_uniform_(torch.empty(outputs, inputs))
        self.part = nn.Parameter(weight.chunk(world_size)[rank].clone())
        self.following = []  # the layer after this one, or nothing. No module: it is no part of it

    def gather(self):
        """Return the whole weight."""
        parts = [torch.empty_like(self.part) for _ in range(world_size)]
        dist.all_gather(parts, self.part)
        return torch.cat(parts)

    def forward(self, batch):
        return Product.apply(batch, self.part, self)


dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
layers = [Linear(16, 256), nn.ReLU()]
for _ in range(6):
    layers += [Linear(256, 256), nn.ReLU()]
model = nn.Sequential(*layers, Linear(256, 4))
for layer, following in zip(model[:-2:2], model[2::2], strict=True):
    layer.following.append(following)
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
