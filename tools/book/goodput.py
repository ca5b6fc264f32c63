"""Predict how much of its time a training on many machines trains, and how often to save, when
machines fail.

All times are in seconds. Failures come at random, with `mtbf` seconds between them on average: that
of one machine divided by the number of machines. A failure loses the work since the last
checkpoint, and costs `restart` seconds. notebooks/scaling.ipynb draws the prediction and checks it
by simulation.
"""

import math
import random


def job_mtbf(machine_mtbf, machines):
    """Return the mean time between failures of a job that any of its machines ends."""
    return machine_mtbf / machines


def young_interval(mtbf, checkpoint):
    """Return how many seconds to train between two checkpoints: Young, "A first order
    approximation", 1974.
    """
    return math.sqrt(2 * checkpoint * mtbf)


def daly_interval(mtbf, checkpoint):
    """Return the same to a higher order: Daly, "A higher order estimate of the optimum checkpoint
    interval", 2006.

    Args:
        checkpoint: seconds for which a checkpoint stops the training.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    root = math.sqrt(checkpoint / (2 * mtbf))
    return young_interval(mtbf, checkpoint) * (1 + root / 3 + root**2 / 9) - checkpoint


def goodput(interval, mtbf, checkpoint, restart):
    """Return the share of time in which a job trains, without what is lost and trained again.

    Daly, 2006.

    Args:
        interval: seconds of training between two checkpoints.
        checkpoint: seconds for which a checkpoint stops the training.
        restart: seconds from a failure until the job trains again. Failures may also come in that
            time.
    """
    seconds = mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf)
    return interval / seconds


def simulate(interval, mtbf, checkpoint, restart, work, seed):
    """Return the share of time in which one simulated job trains, with failures at random times.

    Args:
        work: seconds of training that the job must do, at least.
        seed: int, for the times of the failures.
    """
    draw = random.Random(seed)
    now = 0.0
    intervals = math.ceil(work / interval)
    fails_at = draw.expovariate(1 / mtbf)
    left = intervals
    while True:
        # whole intervals until the next failure
        saved = min(left, int((fails_at - now) / (interval + checkpoint)))
        now = now + saved * (interval + checkpoint)
        left = left - saved
        if left == 0:
            return intervals * interval / now
        now = fails_at
        # it fails again while it starts
        while (fails_at := now + draw.expovariate(1 / mtbf)) < now + restart:
            now = fails_at
        now += restart
