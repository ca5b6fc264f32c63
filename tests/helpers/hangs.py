"""Programs that stand still: python hangs.py CASE, on two or three ranks."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

tensor = torch.ones(3)


def rank_0_alone(rank):
    if rank == 0:
        dist.all_reduce(tensor)  # of the evaluation, which only rank 0 does
    dist.barrier()
    dist.barrier()


def uneven_batches(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3 + rank):
        model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        time.sleep(1000)


def other_shapes(rank):
    dist.all_reduce(torch.ones(3 + rank))
    dist.barrier()


def in_a_handler(rank):
    try:
        if rank == 1:
            raise ValueError("a damaged image")
        dist.barrier()
    except ValueError:
        time.sleep(1000)


def not_at_all(rank):
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(tensor)


def stopped(rank):
    while True:
        dist.all_reduce(tensor)
        time.sleep(0.01)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(os.environ["WHY_HANG"], f"started-{dist.get_rank()}").touch()
    globals()[sys.argv[1]](dist.get_rank())
