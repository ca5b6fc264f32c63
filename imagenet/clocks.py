"""Clocks for parts of a training step."""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from common.report import Epoch, warmup_steps


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


class TimedEpoch(Epoch):
    """An epoch of 06: with micro-batches, perhaps begun by another process, and with more clocks.

    Args:
        communication: Spans of the time in which a step waits for gradients.
        totals: list of numbers that the process before has counted: sum of losses, correct
            answers, correct answers among the first five, images.
        first_step: int, above 0 if that process trained the steps before it.
        accumulate: int, batches of a step.
    """

    def __init__(self, number, steps, device, communication, totals, first_step, accumulate):
        super().__init__(number, steps, device)
        self.totals = totals
        self.first_step = first_step
        self.accumulate = accumulate
        self.waiting = Spans(device)  # for the loader
        self.communication = communication
        self.communicated = 0.0  # seconds of it

    def batches(self, batches, images_of):
        """Yield batches, and measure how long the loop waits for them.

        Args:
            images_of: function of a step, counted from 0: its images on all ranks. Pieces of a step
                may differ in size by one image.
        """
        warmup = warmup_steps(self.steps - self.first_step) * self.accumulate
        self.waiting.begin()
        for count, batch in enumerate(batches, 1):
            self.waiting.end()
            if count % self.accumulate == 0:
                self.images += images_of(self.first_step + count // self.accumulate - 1)
            yield batch
            if count == warmup:
                self.warm = self.mark()
            self.waiting.begin()

    def end_line(self, totals):
        """Begin another line.

        Args:
            totals: list of numbers, since the start of the epoch.

        Returns:
            (totals since the last line, share of its time waiting for data, and for gradients).
        """
        new = [now - then for now, then in zip(totals, self.totals, strict=True)]
        before = self.line
        self.line = self.mark()
        self.totals = totals
        seconds = self.line.seconds - before.seconds
        waited = self.waiting.read()
        communicated = self.communication.read()
        self.waited += waited
        self.communicated += communicated
        return new, waited / seconds, communicated / seconds

    def record(self):
        share = round(self.communicated / self.seconds, 4)
        return super().record() | {"communication_share": share}
