"""Two training steps of DDP: torchrun --nproc-per-node=2 docs/see/step.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IMAGES = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 2.0]])
TARGETS = torch.tensor([[1.0], [0.0], [3.0], [1.0]])


def train(rank, model, ddp):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, targets = IMAGES[rank::2], TARGETS[rank::2]
    for _ in range(2):
        optimizer.zero_grad()
        outputs = ddp(images)
        loss = (outputs - targets).square().mean()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)  # small: a bucket for each layer
    for _ in range(2):  # when its second step begins, DDP sorts the gradients into buckets
        ddp(IMAGES).sum().backward()
    model.zero_grad()
    train(dist.get_rank(), model, ddp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
