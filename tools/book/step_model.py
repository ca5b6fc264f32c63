"""Predict the duration of a data-parallel training step on N devices from measurements on one device.

All times are in seconds, all sizes in bytes. notebooks/scaling.ipynb fits the prediction and shows its errors.
"""

from typing import NamedTuple

import numpy as np


def ring_seconds(size, devices, latency, bandwidth):
    """Return the seconds of a ring all_reduce.

    In each of 2 (N - 1) rounds, each device sends 1 / N of the tensor to the next device in the ring: in the first
    half to add, in the second half to distribute the sums. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations", 2009.

    Args:
        size: bytes of the tensor.
        devices: N.
        latency: seconds per round, however small the message.
        bandwidth: bytes per second that each device sends.
    """
    return 2 * (devices - 1) * (latency + size / devices / bandwidth)


def shared_ring_seconds(size, devices, latency, throughput):
    """Return the seconds between processes of one machine, which share a memory of `throughput` bytes per second."""
    return ring_seconds(size, devices, latency, throughput / devices)


def fit_ring(ring, measured):
    """Fit the latency and the bandwidth of a ring to measured times.

    The time is linear in the latency and in the seconds per byte. The fit minimizes relative errors, because the times
    span orders of magnitude.

    Args:
        ring: ring_seconds or shared_ring_seconds.
        measured: list of (size, devices, seconds).

    Returns:
        (latency, bandwidth), the last two arguments of `ring`.
    """
    rows = [[ring(0, n, 1, 1) / s, ring(size, n, 0, 1) / s] for size, n, s in measured]
    latency, per_byte = nonnegative_least_squares(np.array(rows), np.ones(len(rows)))
    return latency, 1 / per_byte if per_byte else float("inf")


def nonnegative_least_squares(rows, target):
    """Return the two factors >= 0 that minimize the squared error of rows @ factors - target."""
    both = np.linalg.lstsq(rows, target, rcond=None)[0]
    if (both >= 0).all():
        return both
    single = [max(0.0, rows[:, k] @ target / (rows[:, k] @ rows[:, k])) for k in (0, 1)]
    candidates = [np.array([single[0], 0.0]), np.array([0.0, single[1]])]
    return min(candidates, key=lambda factors: np.square(rows @ factors - target).sum())


class Step(NamedTuple):
    """A training step on one device without communication. Times are measured from the beginning of the step."""

    ready: tuple  # seconds until the gradients of each bucket are ready, in order; the last bucket ends backward
    buckets: tuple  # bytes per bucket
    total: float  # seconds until the optimizer has updated the weights

    def slower(self, factor):
        """Return this step on a device that takes `factor` times as long."""
        return Step(tuple(t * factor for t in self.ready), self.buckets, self.total * factor)


def step_seconds(step, all_reduce, overlap=1.0):
    """Return the seconds of a training step that sends its buckets one after the other, each as soon as it is ready.

    Args:
        step: Step.
        all_reduce: function from bytes to seconds.
        overlap: fraction of the communication that can run during the backward pass. 1 if the network hardware sends by
            itself, less if the device that computes also has to send.
    """
    end = 0.0
    for ready, size in zip(step.ready, step.buckets, strict=True):
        end = max(end, ready) + all_reduce(size)
    backward = step.ready[-1]
    sequential = backward + sum(map(all_reduce, step.buckets))
    return overlap * end + (1 - overlap) * sequential + step.total - backward


def fit_overlap(measured):
    """Fit the overlap in step_seconds to measured times.

    Args:
        measured: list of (step, all_reduce, seconds).
    """
    rows = [(step_seconds(s, a, 1.0), step_seconds(s, a, 0.0), seconds) for s, a, seconds in measured]
    gains = np.array([(sequential - hidden) / seconds for hidden, sequential, seconds in rows])
    target = np.array([(sequential - seconds) / seconds for hidden, sequential, seconds in rows])
    return float(np.clip(gains @ target / (gains @ gains), 0, 1)) if gains.any() else 1.0


def efficiency(step, all_reduce):
    """Return the speed of a device with communication divided by its speed without: 1 if all is hidden."""
    return step.total / step_seconds(step, all_reduce)
