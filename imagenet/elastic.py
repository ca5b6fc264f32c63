"""How a training continues on another number of processes: batches for any number of ranks, votes, restarts."""

import logging
import math
import os
import sys
import time

import torch
import torch.distributed as dist

from common.distributed import LaunchError
from common.errors import UserError
from imagenet import signals

MAX_COST = 0.01  # of a training step, for a vote
# seconds from a wish to the vote: a launcher kills 30 s after its signal, and saving takes time
LATENCY = 8
SIGNAL_DELAY = 10  # seconds: by then torchrun's own signal has arrived

log = logging.getLogger(__name__)


class Stopped(Exception):
    """All ranks agreed to stop at this point, because a signal reached one of them."""


class GlobalBatches:
    """A batch_sampler that gives every rank its share of each global batch, for any number of ranks.

    The images of an epoch and of each of its steps depend only on the seed and the epoch. Ranks and
    micro-batches cut the images of a step into pieces of nearly equal size, so a rank more or less
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
        self.images, self.accumulate, self.seed = images, accumulate, seed
        self.rank, self.world_size = rank, world_size
        self.steps = math.ceil(images / batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch, first_step=0):
        """Set the next epoch, and the step at which it starts."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self):
        return (self.steps - self.first_step) * self.accumulate

    def step_size(self, step):
        """Return the number of images of a step on all ranks together."""
        return self._cut(self.images, step + 1, self.steps) - self._cut(
            self.images, step, self.steps
        )

    def piece_sizes(self):
        """Return the smallest and the largest number of images of a micro-batch on one rank."""
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
                positions = range(
                    begin + self._cut(size, piece, pieces),
                    begin + self._cut(size, piece + 1, pieces),
                )
                yield [(self.epoch, order[k]) for k in positions]

    @staticmethod
    def _cut(count, piece, pieces):
        """Return where a piece begins when `count` items are cut into pieces of nearly equal size."""
        return count * piece // pieces


class Votes:
    """Wishes of single ranks (to stop, to save) that all ranks learn at the same step.

    A signal reaches one process. If that rank stopped alone, the others would wait for it. So all
    ranks vote: the vote travels while the step computes, and is counted at its end. Between N ranks
    it takes 2 (N - 1) messages, one after another. If that is more than 1 % of a step, the ranks
    vote only in every k-th step. They agree on k, because each vote also finds the longest time of
    a step. A wish is heard within LATENCY seconds.

    Args:
        group: a gloo process group of all ranks. Even where gradients use NCCL, counting votes must
            not make the CPU wait for the GPU.
    """

    def __init__(self, group):
        self.group, self.every, self.steps_left = group, 1, 0
        self.stop, self.save, self.work, self.cast_at = False, False, None, None
        self.seconds = self._time_vote()

    def _time_vote(self):
        """Return the seconds of a vote, the same on every rank: the shortest of five, on the slowest rank."""
        seconds = []
        for _ in range(5):  # the first one also waits for ranks that are late
            start = time.perf_counter()
            dist.all_reduce(torch.zeros(3), dist.ReduceOp.MAX, group=self.group)
            seconds.append(time.perf_counter() - start)
        shortest = torch.tensor(min(seconds))
        dist.all_reduce(shortest, dist.ReduceOp.MAX, group=self.group)
        return float(shortest)

    def cast(self, stop, save=False):
        """Wish to stop or to save. The wish is remembered until the next vote. Every rank must call it in each step."""
        self.stop, self.save = self.stop or bool(stop), self.save or bool(save)
        self.steps_left -= 1
        if self.steps_left > 0:
            return
        now = time.perf_counter()
        step_seconds = math.inf if self.cast_at is None else (now - self.cast_at) / self.every
        self.ballot, self.cast_at = torch.tensor([self.stop, self.save, step_seconds]), now
        self.work = dist.all_reduce(self.ballot, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def count(self):
        """Return (stop, save): whether any rank wishes it. Both are False in a step without a vote."""
        if self.work is None:
            return False, False
        self.work.wait()
        stop, save, step_seconds = self.ballot.tolist()
        self.stop, self.save, self.work = False, False, None
        wanted, most = (
            math.ceil(self.seconds / (MAX_COST * step_seconds)),
            round(LATENCY / step_seconds),
        )
        self.every = self.steps_left = max(1, min(wanted, most))
        return bool(stop), bool(save)


def check_launch(args, d):
    """Check that the launcher is the one of --dist-init-method, and that restarts can work.

    Raises:
        LaunchError, UserError: see the messages.
    """
    check_restarts(d, args.resume or args.evaluate)
    method = args.dist_init_method
    found = f"--dist-init-method {method} under {d.launcher}"
    if method == "env" and d.launcher not in ("torchrun", "nodes"):
        raise LaunchError(found, "torchrun", "torchrun --nproc-per-node=2 06_imagenet.py")
    if method == "slurm" and d.launcher != "srun":
        raise LaunchError(found, "srun", "srun python 06_imagenet.py")


def check_restarts(d, resume):
    """Check that a restart by torchrun continues the training.

    torchrun's agents share one store over all restarts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    Restarted workers then read the addresses of the workers before them, and wait for those. Only
    the agents can read the variable, so a script can only warn.

    Raises:
        UserError: each restart would train from the beginning.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0":
        return
    if not resume:
        raise UserError(
            f"--max-restarts={restarts} without --resume: each restart would begin at zero; add "
            "--resume"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and d.is_main:
        log.warning(
            "a restart may hang, or fail for minutes: torchrun was started without the variable "
            "that keeps restarts "
            "apart; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each machine"
        )


def exit_for_requeue(launcher):
    """Exit with code 75 when torchrun does not count it as a failure. The state must be saved.

    When a machine joins, each torchrun stops its own workers, some a little later than others. A
    worker that exits before its torchrun has sent the signal counts as crashed, so it waits for the
    signal.
    """
    deadline = time.monotonic() + SIGNAL_DELAY
    while launcher == "torchrun" and signals.stop.signal is None and time.monotonic() < deadline:
        time.sleep(0.05)
    signals.ignore()
    sys.exit(signals.EXIT_REQUEUE)
