"""Predict how much of its time a training on many machines trains, and how often to save, when
machines fail.

All times are in seconds. Failures come at random, with `mtbf` seconds between them on average: that
of one machine divided by the number of machines. A failure loses the work since the last
checkpoint that is completely written, and costs `restart` seconds. notebooks/scaling.ipynb draws
the prediction and checks it by simulation.
"""

import math
import random

from tools.records import published

DAY = 24 * 3600


def gpu_lifetimes():
    """Return {training or cluster: seconds between the failures of one GPU}, as published."""
    llama = published()["goodput"]
    clusters = published()["failures"]
    lifetimes = {"Llama 3": llama["days"] * DAY * llama["gpus"] / llama["interruptions"]}
    for name, failures in clusters["per_1000_machine_days"].items():
        lifetimes[name] = 1000 * DAY / failures * clusters["gpus_per_node"]
    return lifetimes


def job_mtbf(machine_mtbf, machines):
    """Return the mean time between failures of a job that any of its machines (or GPUs) ends."""
    return machine_mtbf / machines


def daly_interval(mtbf, checkpoint):
    """Return how many seconds to train between two checkpoints: Daly, "A higher order estimate of
    the optimum checkpoint interval", 2006. Its first term is the formula of Young, 1974.

    Args:
        checkpoint: seconds for which a checkpoint stops the training.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    root = math.sqrt(checkpoint / (2 * mtbf))
    return math.sqrt(2 * checkpoint * mtbf) * (1 + root / 3 + root**2 / 9) - checkpoint


def goodput(interval, mtbf, checkpoint, restart, write=0):
    """Return the share of time in which a job trains, without what is lost and trained again.

    Daly, 2006. A run of t seconds until its failure leaves the checkpoints that were complete
    `write` seconds before: on average as many as without this delay, times exp(-write / mtbf). So
    a second of writing costs as much as a second of restarting.

    Args:
        interval: seconds of training between two checkpoints, at least `write`.
        checkpoint: seconds for which a checkpoint stops the training.
        restart: seconds from a failure until the job trains again. Failures may also come in that
            time.
        write: seconds after that until a checkpoint is safe, if it is written while the training
            continues.
    """
    cycle = interval + checkpoint
    saved = -math.exp(-(cycle + restart + write) / mtbf) / math.expm1(-cycle / mtbf)  # per failure
    return saved * interval / mtbf


def simulate(interval, mtbf, checkpoint, restart, work, seed, write=0):
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
        # whole intervals whose checkpoints are safe at the next failure
        saved = max(0, int((fails_at - now - write) / (interval + checkpoint)))
        if saved >= left:
            return intervals * interval / (now + left * (interval + checkpoint) + write)
        left = left - saved
        now = fails_at
        # it fails again while it starts
        while (fails_at := now + draw.expovariate(1 / mtbf)) < now + restart:
            now = fails_at
        now += restart
