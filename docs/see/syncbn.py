"""Batch norm over all ranks: torchrun --nproc-per-node=2 docs/see/syncbn.py"""

import torch
import torch.distributed as dist

IMAGES = torch.tensor([[1.0, 10.0], [3.0, 14.0], [5.0, 30.0], [7.0, 34.0]])  # a row per image


def batch_norm(images):
    mean = images.mean(0)
    variance = (images - mean).square().mean(0)
    outputs = (images - mean) / variance.sqrt()
    return outputs


def sync_batch_norm(images):
    sums = torch.cat([images.sum(0), torch.tensor([float(len(images))])])
    dist.all_reduce(sums)
    mean, count = sums[:-1] / sums[-1], sums[-1]
    squares = (images - mean).square().sum(0)
    dist.all_reduce(squares)
    variance = squares / count
    outputs = (images - mean) / variance.sqrt()
    return outputs


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images = IMAGES[2 * rank : 2 * rank + 2]  # two images of two channels
    batch_norm(images)
    sync_batch_norm(images)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
