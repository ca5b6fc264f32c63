"""Clocks for parts of a training step."""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


class Spans:
    """Spans of time on a device.

    On a GPU, events measure them in its stream, so no step waits for the GPU.

    Args:
        device: torch.device.
    """

    def __init__(self, device):
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.start = None  # of the span that is open
        self.spans = []  # (start, end), since the last reading

    def begin(self):
        self.start = self._now()

    def end(self):
        self.spans.append((self.start, self._now()))

    def read(self):
        """Return the seconds of all spans since the last reading.

        The device must have finished its work.
        """
        spans = self.spans
        self.spans = []
        if self.is_cpu:
            return sum(end - start for start, end in spans)
        return sum(start.elapsed_time(end) / 1000 for start, end in spans)

    def _now(self):
        if self.is_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


class CommunicationClock:
    """How long a step waits for gradients after its own backward pass.

    This is communication that no computation hides. DistributedDataParallel sends gradients in
    buckets while the backward pass computes others. When the last bucket is full, this rank has
    nothing more to compute. The rest is the time of the network, and of slower ranks.

    Args:
        ddp: DistributedDataParallel.
        device: torch.device.
    """

    def __init__(self, ddp, device):
        self.spans = Spans(device)
        self.open = False  # whether a span has begun
        self.side_stream = torch.Stream(device) if device.type != "cpu" else None
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _, bucket):
        if bucket.is_last():
            self.spans.begin()
            self.open = True
        if self.side_stream is None:
            return allreduce_hook(dist.group.WORLD, bucket)
        # On a side stream, since get_future() makes the current stream wait for the gradients.
        self.side_stream.wait_stream(torch.accelerator.current_stream())
        with self.side_stream:
            return allreduce_hook(dist.group.WORLD, bucket)

    def backward_done(self):
        """Note that the last backward pass of a step has returned."""
        if self.open:
            self.spans.end()
            self.open = False
