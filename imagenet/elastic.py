"""What lets processes come and go while the training stays the same: batches of any number of ranks, and votes."""

import logging
import math
import os
import sys
import time

import torch
import torch.distributed as dist

from common.errors import UserError
from imagenet.signals import AGAIN

OWN_SIGNAL = 10  # seconds until torchrun's own must have come

log = logging.getLogger(__name__)


class GlobalBatches:
    """Which images this rank takes in each micro-batch: a batch_sampler, for any number of ranks.

    The images of an epoch, and of each of its steps, depend on the seed and the epoch alone. Ranks and micro-batches
    only cut a step's images into pieces, as equal as can be, so those who come and go change nothing else.
    No image is left out or taken twice: the N images of an epoch make ceil(N / batch_size) steps, also of sizes as
    equal as can be, instead of a small last one. (DistributedSampler repeats images, drop_last leaves some out.)

    Yields:
        list of (epoch, index): a data loader's workers live on from epoch to epoch, so they learn it this way.

    Args:
        images: int, N.
        batch_size: int, global.
        rank, world_size: int.
        accumulate: int, the micro-batches of a step.
        seed: int, or None to keep the images in order.
    """

    def __init__(self, images, batch_size, rank, world_size, accumulate=1, seed=None):
        self.images, self.accumulate, self.seed = images, accumulate, seed
        self.rank, self.world_size = rank, world_size
        self.steps = math.ceil(images / batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch, first_step=0):
        """Say which epoch comes next, and at which of its steps to begin."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self):
        return (self.steps - self.first_step) * self.accumulate

    def step_size(self, step):
        """The images of a step, on all ranks together."""
        return self._cut(self.images, step + 1, self.steps) - self._cut(self.images, step, self.steps)

    def piece_sizes(self):
        """The fewest and the most images of a micro-batch on one rank."""
        pieces = self.world_size * self.accumulate
        largest_step = math.ceil(self.images / self.steps)
        return self.images // self.steps // pieces, math.ceil(largest_step / pieces)

    def __iter__(self):
        order = range(self.images)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.images, generator=generator).tolist()
        pieces = self.world_size * self.accumulate
        for step in range(self.first_step, self.steps):
            begin, size = self._cut(self.images, step, self.steps), self.step_size(step)
            for piece in range(self.rank * self.accumulate, (self.rank + 1) * self.accumulate):
                some = range(begin + self._cut(size, piece, pieces), begin + self._cut(size, piece + 1, pieces))
                yield [(self.epoch, order[k]) for k in some]

    @staticmethod
    def _cut(count, piece, pieces):
        """Where a piece begins, when `count` things are cut into pieces as equal as can be."""
        return count * piece // pieces


class Votes:
    """What any rank wishes, known to all of them at the same step: to stop, to save.

    A signal reaches one process at a time, but a rank that left alone would leave the others waiting for it. So the
    ranks vote in every step. The vote is on its way while the step computes, and is counted at its end.

    Args:
        group: a gloo process group of all ranks, of its own even where gradients travel by NCCL: counting the votes
            then does not make the CPU wait for the GPU.
    """

    def __init__(self, group):
        self.group = group

    def cast(self, *wishes):
        self.wishes = torch.tensor([bool(wish) for wish in wishes], dtype=torch.int32)
        self.work = dist.all_reduce(self.wishes, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def count(self):
        """For each wish, whether any rank has it."""
        self.work.wait()
        return [bool(wish) for wish in self.wishes]


def check_restarts(d, resume):
    """Whether torchrun's restarts can work at all.

    torchrun's agents share one store over all restarts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: workers that come
    back then read the addresses of those that are gone, and wait for them. The agents must have it, so a script can
    only tell.

    Raises:
        UserError: each restart would begin at zero.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0":
        return
    if not resume:
        raise UserError(f"--max-restarts={restarts} without --resume: each restart would begin at zero; add --resume")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and d.is_main:
        log.warning(
            "a restart may hang, or fail for minutes: torchrun was started without the variable that keeps restarts "
            "apart; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each machine"
        )


def leave(launcher, stop):
    """End this process with the exit code AGAIN, all having been saved, at a moment when that is no failure.

    When a machine joins, every torchrun ends its own workers, one a little later than another. A worker whose
    torchrun has not got to it yet waits for that: to end before would count as a crash.
    """
    deadline = time.monotonic() + OWN_SIGNAL
    while launcher == "torchrun" and stop.signal is None and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.ignore()
    sys.exit(AGAIN)
