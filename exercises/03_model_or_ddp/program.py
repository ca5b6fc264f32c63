"""Train one model with DistributedDataParallel (DDP) on two ranks.

The ranks should have the same weights after every training step.

Nothing fails, and the loss falls. What you see: the ranks print different first weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(model(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the first weight is {model.weight[0, 0].item():.6f}")

dist.destroy_process_group()
