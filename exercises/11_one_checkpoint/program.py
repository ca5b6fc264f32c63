"""Save the weights once, in one file, so that a program without DDP can load them on every rank.

What you see: loading fails, because keys are missing. And once that is mended, look who writes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
ddp(torch.randn(32, 16)).square().mean().backward()
optimizer.step()

path = "exercise-11.pt"
torch.save(ddp.state_dict(), path)

loaded = nn.Linear(16, 4)  # as another program, without DDP, would load it
loaded.load_state_dict(torch.load(path))
print(f"loaded: {loaded.weight.sum().item():.4f}, trained: {model.weight.sum().item():.4f}")

dist.destroy_process_group()
