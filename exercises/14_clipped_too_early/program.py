"""Average the gradients by hand, clip their norm to 0.6, and train.

Two ranks should train as one process does with the images of both.

Nothing fails. What you see: the ranks print different norms.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_NORM = 0.6

dist.init_process_group("gloo")
world_size = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(256, 16)
targets = images[:, :4].argmax(dim=1)
dataset = TensorDataset(images, targets)

model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

for batch, labels in loader:
    loss = nn.functional.cross_entropy(model(batch), labels)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    print(f"the norm of the gradient before clipping: {norm.item():.4f}")

dist.destroy_process_group()
