"""What the book says about torch, on the installed version."""

import json
import re

import pytest
import torch
from processes import ROOT
from ranks import Ranks

BUCKETS = """\
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common.distributed import cleaned_up


def bucket_bytes(ddp, when):
    sizes = ddp._get_ddp_logging_data()[when]
    return [int(size) for size in str(sizes).split(",")]


@cleaned_up()
def main():
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024) for _ in range(5)))  # 8 MiB each
    model.forward = lambda x: sum(layer(x).sum() for layer in model)
    ddp = DistributedDataParallel(model)
    seen = {"first": bucket_bytes(ddp, "bucket_sizes")}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    broadcasts = []
    original = dist.broadcast
    for step in range(4):
        ddp(torch.ones(1, 2048)).backward()
        dist.broadcast = lambda tensor, *args, **more: (
            broadcasts.append(tensor.numel()),
            original(tensor, *args, **more),
        )[1]
        optimizer.step()
        dist.broadcast = original
    seen["later"] = bucket_bytes(ddp, "rebuilt_bucket_sizes")
    seen["broadcast"] = sum(broadcasts) / 4
    seen["weights"] = sum(p.numel() for p in model.parameters())
    print(json.dumps(seen))


main()
"""


@pytest.fixture(scope="module")
def ddp_facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    script = folder / "buckets.py"
    script.write_text(BUCKETS)
    ranks = Ranks(folder, 2, [], script=script)
    assert set(ranks.wait()) == {0}, ranks.output()
    line = next(line for line in ranks.output().splitlines() if line.startswith("{"))
    return json.loads(line)


def test_the_first_step_of_ddp_has_one_bucket_and_later_ones_have_more(ddp_facts):
    assert ddp_facts["first"] == [4 * ddp_facts["weights"]]
    assert len(ddp_facts["later"]) > 1 and sum(ddp_facts["later"]) == 4 * ddp_facts["weights"]


def test_zero_redundancy_optimizer_broadcasts_all_weights_in_each_step(ddp_facts):
    assert ddp_facts["broadcast"] == ddp_facts["weights"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_asks_the_device_for_an_overflow_unless_the_optimizer_is_fused(
    monkeypatch, fused
):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (read.append(self), item(self))[1])
    scaler.step(optimizer)
    assert len(read) == (0 if fused else 1)
    assert weight.detach().tolist() == pytest.approx([-0.1])


def test_each_copy_of_a_stream_reads_all_of_it():
    page = (ROOT / "docs/data-loading.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "Stream" in block
    )
    namespace = {}
    exec(code.partition("\nloaders =")[0], namespace)
    read = []
    items = (read.append(item) or item for item in range(12))
    assert list(namespace["Stream"](items, rank=1, world_size=4)) == [1, 5, 9]
    assert read == list(range(12))
