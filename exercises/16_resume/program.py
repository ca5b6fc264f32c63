"""Train for an epoch of 8 steps.

The job is killed after step 3 and continues from its checkpoint. In the epoch, each image should
be read once for a training step. check.py runs the program a second time, killed after step 5.

Nothing fails. What check.py sees: some images are trained twice, others never.
"""

import os

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


def train(checkpoint, last_step):
    """Continue the epoch after the checkpoint up to this step. Return the new checkpoint."""
    model = nn.Linear(16, 4)
    model.load_state_dict(checkpoint["model"])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    step = checkpoint["step"]
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(ddp(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == last_step:
            break
    print(f"trained to step {step}")
    return {"model": model.state_dict(), "step": step}


checkpoint = {"model": nn.Linear(16, 4).state_dict(), "step": 0}
killed_after = int(os.environ.get("KILLED_AFTER", 3))  # in steps
checkpoint = train(checkpoint, last_step=killed_after)  # here the job is killed, and starts again
checkpoint = train(checkpoint, last_step=8)

dist.destroy_process_group()
