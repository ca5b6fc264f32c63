"""Predict the duration of a data-parallel training step on N devices from measurements on one
device.

All times are in seconds, all sizes in bytes. docs/performance.md shows published results beside it.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from tools.planning.layers import torchvision_layers


class Cluster(NamedTuple):
    """Nodes of several GPUs. A bandwidth is in bytes per second, a hop in seconds per message."""

    gpus_per_node: int
    network: float  # bandwidth of a node's network cards together
    inside: float  # bandwidth between the GPUs of a node
    hop_inside: float = 3e-6
    hop_between: float = 7e-6
    start: float = 10e-6  # seconds until a collective starts


def cluster_seconds(size, devices, cluster):
    """Return the seconds of an all_reduce between GPUs of several nodes: those of a ring or of a
    tree, the shorter.

    A ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009) sends each byte nearly twice through each link, and needs a hop per GPU. A
    tree needs hops for the GPUs of one node and for the logarithm of the number of nodes, and
    reaches 90 % of the bandwidth. NCCL also estimates both and takes the faster one (its
    src/graph/tuning.cc). The slowest link decides the bandwidth: a node's network cards, or, within
    one node, its own links.
    """
    if devices == 1:
        return 0.0
    per_node = min(cluster.gpus_per_node, devices)
    nodes = math.ceil(devices / per_node)
    bandwidth = cluster.inside if nodes == 1 else min(cluster.network, cluster.inside)
    hops = 2 * (devices - 1) - 2 * (nodes - 1)
    ring = hops * cluster.hop_inside + 2 * (nodes - 1) * cluster.hop_between
    ring += 2 * (devices - 1) / devices * size / bandwidth
    tree = 2 * ((per_node - 1) * cluster.hop_inside + math.log2(nodes) * cluster.hop_between)
    tree += 2 * size / (0.9 * bandwidth)
    return cluster.start + min(ring, tree)


@functools.cache
def expected_maximum(count):
    """Return how many standard deviations the largest of `count` normal values is above their mean,
    on average: each value times the probability that the largest is there.
    """
    edges = np.linspace(-10, 10, 4001)
    below = np.array([math.erfc(-edge / math.sqrt(2)) / 2 for edge in edges]) ** count
    return float(np.diff(below) @ (edges[:-1] + edges[1:]) / 2)


def slowest(devices, spread):
    """Return how much longer than the average the slowest of N devices takes for a step.

    Args:
        spread: standard deviation of the time of a step, as a share of its mean.
    """
    return 1 + spread * expected_maximum(devices)


def efficiency_band(step, devices, cluster, spread, reference=1):
    """Return the speed per device on N devices, divided by the speed per device on `reference`
    devices: without overlap and with perfect overlap of communication.

    With these inputs, the model allows no more than the second. Less than the first is possible:
    the model has no slow loaders, and no software that sends more slowly than the network can.
    """

    def seconds(n, overlap):
        alone = step_seconds(step, lambda size: cluster_seconds(size, n, cluster), overlap)
        return alone * slowest(n, spread)

    return tuple(seconds(reference, share) / seconds(devices, share) for share in (0.0, 1.0))


class Step(NamedTuple):
    """A training step on one device without communication.

    Times are measured from the beginning of the step.
    """

    # seconds until the gradients of each bucket are ready, in order; the last bucket ends backward
    ready: tuple
    buckets: tuple  # bytes per bucket
    total: float  # seconds until the optimizer has updated the weights


# Of the time of a step between GPUs. The only number that was chosen to fit published efficiencies,
# of the first five runs in results/published.json; the others were added later.
SPREAD = 0.02


def published_band(run):
    """Return the efficiency of a run in results/published.json in the model: (from, to)."""
    inside = run["inside_gbytes"] * 1e9
    network = run["network_gbits"] * 1e9 / 8 if run["network_gbits"] else inside
    cluster = Cluster(run["gpus_per_node"], network, inside)
    if "model" in run:
        step = layered_step(run["seconds_per_step"], torchvision_layers(run["model"]))
    else:
        step = even_step(run["seconds_per_step"], 4 * run["weights"])
    return efficiency_band(step, run["devices"], cluster, SPREAD, run["reference"])


def distance(value, band):
    """Return how far a value is above (> 0) or below (< 0) a band, 0 inside."""
    low, high = band
    return max(value - high, 0) + min(value - low, 0)


MIB = 2**20
BUCKET = 25 * MIB  # of DistributedDataParallel
FIRST_BUCKET = MIB  # small, so that sending starts early
BACKWARD = 2 / 3  # of a step: it computes two gradients per layer, the forward pass one output


def even_step(seconds, gradients):
    """Return a Step of so many seconds whose gradients, in bytes, become ready evenly during the
    backward pass.
    """
    count = max(1, round(gradients / BUCKET))
    ready = (seconds * (1 - BACKWARD * (1 - k / count)) for k in range(1, count + 1))
    return Step(tuple(ready), (gradients / count,) * count, seconds)


def layered_step(seconds, layers):
    """Return a Step whose gradients become ready layer by layer, the last layer's first.

    As in DistributedDataParallel, a bucket is full when it has reached its size, so a large layer
    makes a large bucket. A layer's share of the backward pass is its share of the multiply-adds.

    Args:
        seconds: float, of the whole step.
        layers: list of layers.Layer in the order of the backward pass.
    """
    total = sum(layer.multiply_adds for layer in layers)
    ready = []
    buckets = []
    done = 0  # multiply-adds
    waiting = 0  # bytes in the bucket that is not full
    for layer in layers:
        done += layer.multiply_adds
        waiting += layer.gradients
        if waiting >= (BUCKET if buckets else FIRST_BUCKET):
            ready.append(seconds * (1 - BACKWARD + BACKWARD * done / total))
            buckets.append(waiting)
            waiting = 0
    if waiting:
        ready.append(seconds)
        buckets.append(waiting)
    return Step(tuple(ready), tuple(buckets), seconds)


def step_seconds(step, all_reduce, overlap=1.0):
    """Return the seconds of a training step that sends its buckets one after the other, each as
    soon as it is ready.

    Args:
        step: Step.
        all_reduce: function from bytes to seconds.
        overlap: fraction of the communication that can run during the backward pass. 1 if the
            network hardware sends by itself, less if the device that computes also has to send.
    """
    end = 0.0
    for ready, size in zip(step.ready, step.buckets, strict=True):
        end = max(end, ready) + all_reduce(size)
    backward = step.ready[-1]
    sequential = backward + sum(map(all_reduce, step.buckets))
    return overlap * end + (1 - overlap) * sequential + step.total - backward
