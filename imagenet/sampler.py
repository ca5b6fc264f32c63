"""Batches for any number of ranks."""

import math

import torch


class GlobalBatchSampler:
    """A batch_sampler that gives every rank its share of each global batch.

    The images of an epoch and of each of its steps depend only on the seed and the epoch. The
    micro-batches of a step, of all ranks together, have nearly equal sizes, so a rank more or less
    changes nothing else. Every image is used exactly once: the N images of an epoch make ceil(N /
    batch_size) steps of nearly equal size, without a small last one. (DistributedSampler repeats
    images, drop_last leaves some out.)

    Yields:
        list of (epoch, index). The epoch is part of it because loader workers live longer than an
        epoch.

    Args:
        images: int, N.
        batch_size: int, the global batch size.
        rank, world_size: int.
        accumulate: int, micro-batches per step.
        seed: int, or None to keep the images in order.
    """

    def __init__(self, images, batch_size, rank, world_size, accumulate=1, seed=None):
        self.images = images
        self.rank = rank
        self.world_size = world_size
        self.accumulate = accumulate
        self.seed = seed
        self.steps = math.ceil(images / batch_size)
        self.epoch = 0
        self.first_step = 0  # of the next epoch

    def set_epoch(self, epoch, first_step=0):
        """Set the next epoch, and the step at which it starts."""
        self.epoch = epoch
        self.first_step = first_step

    def __len__(self):
        return (self.steps - self.first_step) * self.accumulate

    def step_size(self, step):
        """Return the number of images of a step on all ranks together."""
        return start_of(step + 1, self.steps, self.images) - start_of(step, self.steps, self.images)

    def micro_batch_sizes(self):
        """Return the smallest and the largest number of images of a micro-batch on one rank."""
        micro_batches = self.world_size * self.accumulate
        largest_step = math.ceil(self.images / self.steps)
        return self.images // self.steps // micro_batches, math.ceil(largest_step / micro_batches)

    def __iter__(self):
        order = range(self.images)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.images, generator=generator).tolist()
        micro_batches = self.world_size * self.accumulate
        first = self.rank * self.accumulate  # micro-batch of this rank
        for step in range(self.first_step, self.steps):
            step_start = start_of(step, self.steps, self.images)
            size = self.step_size(step)
            for micro_batch in range(first, first + self.accumulate):
                start = step_start + start_of(micro_batch, micro_batches, size)
                end = step_start + start_of(micro_batch + 1, micro_batches, size)
                yield [(self.epoch, index) for index in order[start:end]]


def micro_batches(args, world_size, state):
    """Return (accumulate, micro_batch_size): the micro-batches per step, and the images in one.

    A resumed training keeps its own, unless --accumulate has changed. On another number of ranks,
    micro-batches stay at most as large as they were.

    Args:
        state: a loaded checkpoint, or None.
    """
    is_kept = state and state["flags"].get("accumulate") in (None, str(args.accumulate))
    if not is_kept:
        return args.accumulate, math.ceil(args.batch_size / (world_size * args.accumulate))
    micro_batch_size = state["micro_batch"]
    if world_size == state["world_size"]:
        return state["accumulate"], micro_batch_size
    return math.ceil(args.batch_size / (world_size * micro_batch_size)), micro_batch_size


def start_of(part, parts, count):
    """Return where a part begins when `count` items are cut into parts of nearly equal size."""
    return count * part // parts
