"""How all ranks learn, at the same step, that one of them should stop or save."""

import math
import time

import torch
import torch.distributed as dist

MAX_COST = 0.01  # of a training step, for a vote
# Seconds from a wish to its vote: a launcher kills 30 s after its signal, and saving takes time.
LATENCY = 8


class Stopped(Exception):
    """All ranks agreed to stop at this point, because a signal reached one of them."""


class Votes:
    """Wishes of single ranks (to stop, to save) that all ranks learn at the same step.

    A signal reaches one process. If that rank stopped alone, the others would wait for it. So all
    ranks vote: the vote travels while the step computes, and is counted at its end. Between N ranks
    it takes 2 (N - 1) messages, one after another. If that is more than 1 % of a step, the ranks
    vote only in every k-th step. They agree on k, because each vote also finds the longest time of
    a step. A wish is heard within about LATENCY seconds.

    Args:
        group: a gloo process group of all ranks. Even where gradients use NCCL, counting votes must
            not make the CPU wait for the GPU.
    """

    def __init__(self, group):
        self.group = group
        self.seconds = time_vote(group)
        self.stop = False  # what this rank wishes
        self.save = False
        self.ballot = None  # of the vote that travels: stop, save, seconds per step
        self.work = None  # the all_reduce of that vote
        self.restart()

    def restart(self):
        """Measure anew how long a step takes: a step of an evaluation is shorter than others."""
        self.every = 1  # a vote in every k-th step
        self.steps_left = 0  # until the next vote
        self.cast_at = None  # when this rank cast its last vote

    def cast(self, stop, save=False):
        """Wish to stop or to save. Every rank must call it in each step.

        A wish is remembered until the next vote.
        """
        self.stop = self.stop or bool(stop)
        self.save = self.save or bool(save)
        self.steps_left -= 1
        if self.steps_left > 0:
            return
        now = time.perf_counter()
        step_seconds = math.inf if self.cast_at is None else (now - self.cast_at) / self.every
        self.cast_at = now
        self.ballot = torch.tensor([self.stop, self.save, step_seconds])
        self.work = dist.all_reduce(self.ballot, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def count(self):
        """Return (stop, save): whether any rank wishes it.

        Both are False in a step without a vote.
        """
        if self.work is None:
            return False, False
        self.work.wait()
        self.work = None
        self.stop = False
        self.save = False
        stop, save, step_seconds = self.ballot.tolist()
        cheap = math.ceil(self.seconds / (MAX_COST * step_seconds))
        prompt = round(LATENCY / step_seconds)
        self.every = max(1, min(cheap, prompt))
        self.steps_left = self.every
        return bool(stop), bool(save)


def time_vote(group):
    """Return the seconds of a vote: the shortest of five, on the slowest rank. All ranks agree."""
    seconds = []
    for _ in range(5):  # the first one also waits for ranks that are late
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(3), dist.ReduceOp.MAX, group=group)
        seconds.append(time.perf_counter() - start)
    shortest = torch.tensor(min(seconds))
    dist.all_reduce(shortest, dist.ReduceOp.MAX, group=group)
    return float(shortest)
