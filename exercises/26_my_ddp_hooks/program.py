"""Send each gradient as soon as it is complete, while the backward pass computes the next ones.

The messages of one training step should be under way together, and the backward pass should wait
for none of them. After finish_gradients(), all gradients should be the means over all ranks. The
weights should be those of torch's DDP, also if a weight is shared between two layers, or a
parameter is frozen or not used.

Nothing fails. What check.py sees: the ranks begin equal, but each trains a model of its own.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MyDDP(nn.Module):
    """A model whose gradients are averaged over all ranks."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        # 1. Here: have start() called for each parameter.

    def forward(self, batch):
        return self.model(batch)

    def start(self, parameter):
        """Start to average the gradient of a parameter. Called when the gradient is complete."""
        # 2. Here.

    def finish_gradients(self):
        """Wait until all gradients are the means over all ranks."""
        # 3. Here.


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
    ddp.finish_gradients()
    optimizer.step()

dist.destroy_process_group()
