"""Send gradients in buckets of about 40 kB, while the backward pass runs.

A message has a fixed cost, so many small messages are slow. The model has 16 parameters; expect
three or four messages per training step. The weights should be those of torch's DDP.

Nothing fails. What check.py sees: the ranks begin equal, but each trains a model of its own.
"""

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
        # 1. Here: divide the parameters into buckets, and register a hook for each parameter.

    def forward(self, batch):
        return self.model(batch)

    def count(self, bucket):
        """Note that one more gradient of a bucket is complete; after the last, send the bucket."""
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
