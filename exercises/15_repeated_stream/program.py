"""Train for one epoch on a stream of 240 images, which two loader workers per rank read.

Each image should be trained once, by one of the ranks. check.py also starts three ranks.

Nothing fails. What you see: each of two ranks takes 12 training steps of 20 images, although half
of the stream is 6 steps.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(240, 16)
targets = images[:, :4].argmax(dim=1)


class Stream(IterableDataset):
    """The images of this rank, one after another, as if they arrived over a network."""

    def __iter__(self):
        for number in range(rank, len(images), world_size):
            yield images[number], targets[number]


model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
# fork: a worker of another kind would run this file again
loader = DataLoader(Stream(), batch_size=20, num_workers=2, multiprocessing_context="fork")

for step, (batch, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(ddp(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

dist.destroy_process_group()
