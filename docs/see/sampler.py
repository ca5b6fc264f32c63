"""Which rank reads which image: torchrun --nproc-per-node=2 docs/see/sampler.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def train(images, rank):
    sampler = DistributedSampler(images, shuffle=True, seed=1)
    loader = DataLoader(images, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        read = []
        for batch in loader:
            read += batch.tolist()


def evaluate(images, rank, n):
    read = []
    for image in range(rank, len(images), n):  # no padding: each image once
        read.append(image)
    count = torch.tensor([float(len(read))])
    dist.all_reduce(count)


def main():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    images = torch.arange(7)  # an image is its number here
    train(images, rank)
    evaluate(images, rank, n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
