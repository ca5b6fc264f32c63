"""A model of a data-parallel training step: how long it takes on N devices, from what one of them was measured to do.

All times are seconds, all sizes bytes. notebooks/scaling.ipynb fits it and shows how far it can be trusted.
"""

from typing import NamedTuple

import numpy as np


def ring_seconds(size, devices, latency, bandwidth):
    """Seconds of a ring all_reduce of `size` bytes.

    Each of 2 (N - 1) rounds sends one N-th of the bytes to the next device of the ring: first to add up, then to
    hand round. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Args:
        size: bytes of the tensor.
        devices: N.
        latency: seconds that a round takes however little it sends.
        bandwidth: bytes a second that each device sends.
    """
    return 2 * (devices - 1) * (latency + size / devices / bandwidth)


def shared_ring_seconds(size, devices, latency, throughput):
    """The same between processes of one machine, whose memory moves `throughput` bytes a second for all together."""
    return ring_seconds(size, devices, latency, throughput / devices)


def fit_ring(ring, measured):
    """The latency and the bandwidth with which a ring comes nearest to measured times.

    Latency and seconds a byte enter linearly. Errors count relative to the time, since times span orders of magnitude.

    Args:
        ring: ring_seconds or shared_ring_seconds.
        measured: list of (size, devices, seconds).

    Returns:
        (latency, bandwidth), each what `ring` takes.
    """
    rows = [[ring(0, n, 1, 1) / s, ring(size, n, 0, 1) / s] for size, n, s in measured]
    latency, per_byte = nonnegative_least_squares(np.array(rows), np.ones(len(rows)))
    return latency, 1 / per_byte if per_byte else float("inf")


def nonnegative_least_squares(rows, wanted):
    """The two factors >= 0 of two columns whose sum comes nearest to what is wanted."""
    both = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    if (both >= 0).all():
        return both
    alone = [max(0.0, rows[:, k] @ wanted / (rows[:, k] @ rows[:, k])) for k in (0, 1)]
    candidates = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    return min(candidates, key=lambda factors: np.square(rows @ factors - wanted).sum())


class Step(NamedTuple):
    """A step on one device that sends nothing, measured from its beginning."""

    ready: (
        tuple  # seconds until the gradients of each bucket are there, in the order of sending; the last ends backward
    )
    buckets: tuple  # bytes of each
    total: float  # seconds until the optimizer has updated the weights

    def slower(self, factor):
        """The same step on a device that takes `factor` times as long."""
        return Step(tuple(t * factor for t in self.ready), self.buckets, self.total * factor)


def step_seconds(step, all_reduce, overlap=1.0):
    """Seconds of a step whose buckets are sent one after the other, each as soon as it is there.

    Args:
        step: Step.
        all_reduce: function of bytes, in seconds.
        overlap: the share of the sending that may go on beside the backward pass; 1 where the network does it by
            itself, less where the device that computes must also send.
    """
    end = 0.0
    for ready, size in zip(step.ready, step.buckets, strict=True):
        end = max(end, ready) + all_reduce(size)
    backward = step.ready[-1]
    apart = backward + sum(map(all_reduce, step.buckets))
    return overlap * end + (1 - overlap) * apart + step.total - backward


def fit_overlap(measured):
    """The overlap with which step_seconds comes nearest to measured times.

    Args:
        measured: list of (step, all_reduce, seconds).
    """
    rows = [(step_seconds(s, a, 1.0), step_seconds(s, a, 0.0), seconds) for s, a, seconds in measured]
    gains = np.array([(apart - hidden) / seconds for hidden, apart, seconds in rows])
    wanted = np.array([(apart - seconds) / seconds for hidden, apart, seconds in rows])
    return float(np.clip(gains @ wanted / (gains @ gains), 0, 1)) if gains.any() else 1.0


def efficiency(step, all_reduce):
    """What is left of a device's speed when it has to send: 1 if all of it is hidden."""
    return step.total / step_seconds(step, all_reduce)
