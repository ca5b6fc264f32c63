"""What the book says about torch, on the installed version."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def test_the_first_step_of_ddp_has_one_bucket_and_zero_broadcasts_all_weights(alone, monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024) for _ in range(5)))  # 8 MiB each
    model.forward = lambda x: sum(layer(x).sum() for layer in model)
    weights = sum(p.numel() for p in model.parameters())
    ddp = DistributedDataParallel(model)

    def bucket_bytes(when):
        return [int(size) for size in str(ddp._get_ddp_logging_data()[when]).split(",")]

    first = bucket_bytes("bucket_sizes")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    sent = []
    broadcast = dist.broadcast

    def count(tensor, *args, **options):
        sent.append(tensor.numel())
        return broadcast(tensor, *args, **options)

    monkeypatch.setattr(dist, "broadcast", count)
    for _ in range(4):
        ddp(torch.ones(1, 2048)).backward()
        optimizer.step()
    later = bucket_bytes("rebuilt_bucket_sizes")
    assert first == [4 * weights]
    assert len(later) > 1 and sum(later) == 4 * weights
    assert sum(sent) == 4 * weights, "in each of the four steps"


def test_a_grad_scaler_asks_the_device_for_an_overflow_unless_the_optimizer_is_fused(monkeypatch):
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (read.append(self), item(self))[1])
    for fused, reads in ((False, 1), (True, 0)):
        read.clear()
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert len(read) == reads
        assert weight.detach().tolist() == pytest.approx([-0.1])
