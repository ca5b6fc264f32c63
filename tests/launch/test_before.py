"""check_ranks.py --before: a converted script against the one that it was converted from."""

import functools
import os
import re

import pytest
from ranks import Ranks

OLD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 8, generator=generator), torch.arange(64) % 2
data, test_data = TensorDataset(x, y), TensorDataset(x[:21] + 1, y[:21])
loader = DataLoader(data, batch_size=8, shuffle=True)
test_loader = DataLoader(test_data, batch_size=5)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
for epoch in range(3):
    net.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    net.eval()
    total = 0
    with torch.no_grad():
        for x, y in test_loader:
            total += nn.functional.cross_entropy(net(x), y).item() * len(x)
    print(f"test loss {total / len(test_data):.6f}")
"""

# A data set that reads whole batches
BATCHES = """\
class Batches(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


dist.init"""

# Converted: two micro-steps of two samples on each of two ranks.
NEW = """\
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
ddp = DistributedDataParallel(net)
torch.manual_seed(100 + rank)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 8, generator=generator), torch.arange(64) % 2
data, test_data = TensorDataset(x, y), TensorDataset(x[:21] + 1, y[:21])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
test_loader = DataLoader(test_data, batch_size=5, sampler=range(rank, 21, world_size))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader) // 2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    net.train()
    for k, (x, y) in enumerate(loader):
        with contextlib.nullcontext() if k % 2 else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(x), y) / 2
            loss.backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    net.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            total[0] += nn.functional.cross_entropy(net(x), y, reduction="sum")
            total[1] += len(x)
    dist.all_reduce(total)
    if rank == 0:
        print(f"test loss {total[0] / total[1]:.6f}")
dist.destroy_process_group()
"""

NOISY = """\
class Noisy(TensorDataset):
    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        return x + 0.1 * torch.randn(8) + random.random(), y


data, test_data = Noisy(x, y)"""

LABELS = "torch.arange(64) % 2"  # in both scripts
# name: (what is replaced in NEW, by what, what is found)
MISTAKES = {
    "the loss of all ranks is summed": [
        ("(ddp(x), y) / 2", "(ddp(x), y) / 2 * world_size"),
        r"training step 1 differs: the mean loss is 1\.\d+ on 2 ranks and 0\.\d+ in one process, "
        r"the norm of the gradient (\S+) and \S+ \(train.py:\d+\)\. Both are 2 times as large",
    ],
    "gradients that are divided twice": [
        (
            "            optimizer.step()",
            "            for p in net.parameters():\n                p.grad /= world_size\n"
            "            optimizer.step()",
        ),
        r"training step 1 differs: .*The gradient is 2 times as small, the loss is not: gradients "
        r"are divided by the world size twice",
    ],
    "a mean of means": [
        (
            LABELS,
            "torch.where(torch.arange(64) % 5 > 0, torch.arange(64) % 2, -100)",
        ),
        r"training step 1 differs: .*Each rank divides by its own number of samples",
    ],
    "a scheduler that is stepped too often": [
        (
            "            scheduler.step()",
            "            [scheduler.step() for _ in range(3)]",
        ),
        r"before training step 2 the scheduler has made 3 steps on each rank, 1 in one process",
    ],
    "a schedule that is divided twice": [
        ("len(loader) // 2", "len(loader) // 2 // world_size"),
        r"in training step 2 the lr of 4 of 4 parameters, such as 0.weight, is 0.0098\d* on the "
        r"ranks and 0.0099\d* in one process: its schedule ends 2 times as early",
    ],
    "a batch size that was not divided": [
        ("batch_size=2", "batch_size=4"),
        r"2 ranks train on 16 samples in a training step, the script before on 8",
    ],
    "a test loss that is a mean of the ranks' means": [
        (
            "    dist.all_reduce(total)\n",
            "    total = total[0] / total[1]\n    dist.all_reduce(total)\n"
            "    total = torch.stack([total, torch.tensor(float(world_size))])\n",
        ),
        r"the evaluation after training step 8 prints .*: a mean of the ranks' means, and the "
        r"ranks' shares have 11 and 10 samples",
    ],
    "half of the training steps": [
        ("for epoch in range(3):", "for epoch in range(2):"),
        r"the ranks end after 16 training steps, one process goes on after",
    ],
}


def enter(folder, rank):
    os.chdir(folder)


@pytest.fixture
def compare(tmp_path):
    """A function (text of the old script or "same", of the new one, *flags) -> (code, output)."""

    def compare(old, new, *flags):
        (tmp_path / "train_old.py").write_text(old)
        (tmp_path / "train.py").write_text(new)
        before = old if old == "same" else "train_old.py"
        command = ["--before", before, *flags, "train.py"]
        options = {"script": "launch/check_ranks.py", "prepare": functools.partial(enter, tmp_path)}
        ranks = Ranks(tmp_path, 2, command, **options)
        codes = ranks.wait(120)
        assert codes[1] == 0, ranks.output(1)
        return codes[0], ranks.output()

    return compare


def test_a_right_conversion_is_the_script_before_up_to_rounding(compare):
    plain = "data, test_data = TensorDataset(x, y)"
    old, new = (f"import random\n{text.replace(plain, NOISY)}" for text in (OLD, NEW))
    new = new.replace(
        "batch_size=2, ", "batch_size=2, num_workers=1, multiprocessing_context='fork', "
    )
    code, output = compare(old, new, "--no-random")
    assert code == 0 and "found: " not in output, output
    rounding = re.search(
        r"as in train_old.py: same for 20 steps, up to (\S+); the same sch", output
    )
    assert float(rounding[1]) < 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("often" not in name)) for name in MISTAKES],
)
def test_a_mistake_that_all_ranks_make_is_found(compare, name):
    *changes, expected = MISTAKES[name]
    new, old = NEW, OLD
    for text, other in changes:
        assert text in new, text
        new = new.replace(text, other)
        old = old.replace(text, other) if text == LABELS else old
    code, output = compare(old, new, "--no-random", "--steps", "0")
    found = [line for line in output.splitlines() if line.startswith("found: ")]
    assert len(found) == 1 and re.match(f"found: --before: {expected}", found[0]), output
    assert code == 1


@pytest.mark.slow
def test_a_script_with_dropout_is_compared_loosely(compare):
    code, output = compare("same", NEW)
    assert code == 0 and "found: " not in output, output
    assert (
        "note: --before: the forward pass draws random numbers, as dropout does: try --no-"
        in output
    )
    assert "same for" not in output
    code, output = compare("same", NEW, "--no-random")
    assert code == 0 and "as in one process: same for 20 steps, up to " in output, output


@pytest.mark.slow
def test_what_cannot_be_compared_is_a_note(compare):
    new = NEW.replace("rank, world_size =", "assert dist.get_world_size() == 2\nrank, world_size =")
    code, output = compare("same", new)
    note = "note: --before: not compared with one process: it failed after 0 training steps: Assert"
    assert code == 0 and note in output, output
    new = NEW.replace(
        "enumerate(loader)", "enumerate([(torch.randn(2, 8), torch.tensor([0, 1]))] * 16)"
    )
    code, output = compare("same", new, "--no-random")
    assert code == 0 and "same for" not in output, output
    assert "note: --before: training step 1 has other inputs: not read by index" in output
    new = NEW.replace("dist.init", BATCHES).replace("TensorDataset(x, y)", "Batches(x, y)")
    new = new.replace("sampler=sampler", "sampler=sampler, collate_fn=lambda batch: batch")
    new = new.replace("ddp(x)", "ddp(x + torch.randn(x.shape))")
    code, output = compare("same", new, "--no-random")
    assert code == 0 and "note: --before: training step 1 has other inputs" in output, output


def test_batch_norm_is_seen_though_the_model_is_evaluated_first(compare):
    new = NEW.replace("nn.Dropout(0.5)", "nn.BatchNorm1d(8)")
    new = new.replace("ddp = ", "net.eval()(torch.zeros(1, 8))\nnet.train()\nddp = ")
    code, output = compare("same", new, "--steps", "4")
    assert code == 0 and "note: --before: batch norm sees only the samples" in output, output
