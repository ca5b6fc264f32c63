"""Stop cleanly when the cluster sends a signal to one process.

All ranks should stop after the same step, at most five steps after the signal. check.py runs the
program three times: with a signal for rank 1, with one for rank 0, and without a signal.

What you see: rank 1 stops after step 5, rank 0 does not, and the program never ends.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
gets_signal = rank == int(os.environ.get("SIGNALLED_RANK", 1))  # no other rank knows

stop = False


def on_signal(number, frame):
    global stop
    stop = True


signal.signal(signal.SIGUSR1, on_signal)
torch.manual_seed(0)
model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(1, 21):
    if gets_signal and step == 5:
        os.kill(os.getpid(), signal.SIGUSR1)  # as the cluster does, to one process
    ddp(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if stop:
        break
print(f"stopped after step {step}")

dist.barrier()  # then rank 0 would save a checkpoint
dist.destroy_process_group()
