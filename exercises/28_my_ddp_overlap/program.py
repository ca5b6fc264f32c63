"""Send each bucket while the backward pass runs: as soon as its gradients are complete.

The program fills buckets of about 40 kB, and sends them after the backward pass, which is too late:
meanwhile the network waits, and then the computation. The backward pass should wait for no message.
The weights should be those of torch's DDP, also if a parameter is frozen or not used.

The weights are right. What check.py sees: all messages begin after the backward pass.
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
        self.buckets = []  # lists of parameters
        for parameter in reversed(list(model.parameters())):
            if parameter.requires_grad:
                if not self.buckets or sum(p.nbytes for p in self.buckets[-1]) >= BUCKET_SIZE:
                    self.buckets.append([])
                self.buckets[-1].append(parameter)
        self.sent = []  # (parameters, the gradients as one tensor)
        # 1. Here: have complete() called for each parameter.

    def forward(self, batch):
        return self.model(batch)

    def complete(self, parameter):
        """Send the bucket of a parameter, if its gradient is the last one of the bucket."""
        # 2. Here.

    def send(self, bucket):
        parameters = [p for p in bucket if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in parameters]) / dist.get_world_size()
        dist.all_reduce(flat)  # 3. Here: without waiting.
        self.sent.append((parameters, flat))

    def finish_gradients(self):
        """Make all gradients the means over all ranks."""
        for bucket in self.buckets:  # 4. Here: only those that have not been sent.
            self.send(bucket)
        for parameters, flat in self.sent:
            parts = flat.split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                p.grad.copy_(part.view_as(p))
        self.sent.clear()


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
