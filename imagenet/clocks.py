"""Clocks for parts of a training step."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from common.report import Spans


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
