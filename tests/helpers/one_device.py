"""Two ranks of 06 on one device: what DistributedDataParallel does there, where there is one GPU.

NCCL refuses two ranks on one GPU, and gloo takes them.
"""

import re

import pytest
import torch.distributed as dist

FLAGS = ["--epochs", 4, "--batch-size", 20, "--accumulate", 2, "--ema", 0.9, "--sync-bn"]
FLAGS += ["--clip-grad", 1, "--lr", 4, "--warmup-epochs", 0, "--time-communication"]
FLAGS += ["--arch", "small_net"]  # without dropout, which is random on each rank


def share_device(rank):
    """Give device 0 to every rank, and gloo where the backend would be NCCL."""
    from common import setup_distributed as distributed

    def setup_device(rank, size, original=distributed.setup_device):
        return original(0, 1)

    def default_backend(device, original=dist.get_default_backend_for_device):
        return "gloo" if device.type == "cuda" else original(device)

    distributed.setup_device = setup_device
    dist.get_default_backend_for_device = default_backend


def check_two_ranks_on_one_device(on_cpu, on_device, device, images, *flags):
    """Train with two ranks on the CPU, and on one device, where they must learn the same.

    Args:
        on_cpu, on_device: functions as the fixture `train`.
        device: str, as 06 prints it.
        images: path of the images.
        flags: more flags for both.
    """
    losses = []
    for name, start in (("cpu", on_cpu), ("device", on_device)):
        ranks = start(name, 2, images, *FLAGS, *flags)
        assert ranks.wait() == [0, 0], ranks.output()
        losses.append([float(loss) for loss in re.findall(r"loss: +([0-9.]+)", ranks.output())])
    assert f": {device},0 (" in ranks.output(), "both on device 0"
    assert "communication" in ranks.output()
    assert len(losses[0]) == 8 + 4, "of each step, and of the test images after each epoch"
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
