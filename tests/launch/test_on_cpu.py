"""launch/check_ranks.py --cpu and why_hang.py run --cpu, on scripts that are written for GPUs."""

import functools
import os
import re

import pytest
import torch
from processes import ROOT
from ranks import Ranks

# What public scripts write for GPUs
FOR_GPUS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

assert torch.cuda.is_available() and torch.cuda.device_count() > 1
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", torch.cuda.current_device())
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
data = TensorDataset(torch.randn(96, 3, 6, 6), torch.randint(2, (96,)))
with torch.device("cuda"):
    head = nn.Linear(64, 2)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), head)
net = torch.compile(net.to(local_rank))
ddp = DistributedDataParallel(net, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler("cuda")
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler, pin_memory=True)
stream = torch.cuda.Stream()
start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
weights = torch.tensor([1.0, 2.0], device=f"cuda:{local_rank}")
noise = torch.randn(1, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
kept = torch.zeros(2)
on_gpu = kept.cuda()
on_gpu += 1
start.record()
for x, y in loader:
    with torch.cuda.stream(stream):
        x = x.to(device, non_blocking=True) + noise
        y = y.cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(stream)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(ddp(x), y, weights.type(torch.cuda.FloatTensor))
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    mean = loss.detach() + x.new_zeros(1, device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    print(f"loss {mean.item()!r}", flush=True)
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() == 0
assert kept.sum() == 0
if local_rank == 0:
    torch.save(net.state_dict(), "net.pt")
dist.barrier(device_ids=[local_rank])
net.load_state_dict(torch.load("net.pt", map_location=f"cuda:{local_rank}"))
dist.destroy_process_group()
"""

# The same training, as it is written for the CPU
FOR_CPUS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3, 6, 6), torch.randint(2, (96,)))
head = nn.Linear(64, 2)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), head)
ddp = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
weights = torch.tensor([1.0, 2.0])
noise = torch.randn(1, generator=torch.Generator().manual_seed(1))
for x, y in loader:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(ddp(x + noise), y, weights)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach() / 2
    dist.all_reduce(mean)
    print(f"loss {mean.item()!r}", flush=True)
"""

SYNC_BATCH_NORM = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(0)
images = torch.randn(7, 3, 2, 2) + 100
shares = [slice(0, 3), slice(3, 7)]  # of the ranks
whole = nn.BatchNorm2d(3, momentum=0.3)
x = images.clone().requires_grad_()
expected = whole(x)
expected.square().mul(torch.arange(7).view(7, 1, 1, 1)).sum().backward()
norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3, momentum=0.3)).cuda()
share = images[shares[rank]].requires_grad_()
result = norm(share.cuda())
result.square().mul(torch.arange(7)[shares[rank]].view(-1, 1, 1, 1)).sum().backward()
torch.testing.assert_close(result, expected[shares[rank]], rtol=1e-4, atol=1e-4)
torch.testing.assert_close(share.grad, x.grad[shares[rank]], rtol=1e-3, atol=1e-3)
torch.testing.assert_close(norm.running_var, whole.running_var)
torch.testing.assert_close(norm.eval()(images), whole.eval()(images))
print("equal")
"""


def enter(folder, rank):
    os.chdir(folder)


@pytest.fixture
def run(tmp_path):
    """A function (text of a script, *flags, of which tool) -> (exit codes, output of each rank)."""

    def run(text, *flags, tool="check_ranks.py"):
        script = tmp_path / "train.py"
        script.write_text(text)
        options = {"script": f"launch/{tool}", "prepare": functools.partial(enter, tmp_path)}
        ranks = Ranks(tmp_path, 2, [*flags, script], **options)
        return ranks.wait(120), [ranks.output(rank) for rank in (0, 1)]

    return run


def test_a_script_for_gpus_trains_as_on_the_cpu(run):
    codes, outputs = run(FOR_GPUS, "--cpu")
    assert codes == [0, 0] and "\nok: 12 training steps" in outputs[0], outputs
    losses = re.findall("loss (.*)", outputs[0])
    assert len(losses) == 12
    assert losses == re.findall("loss (.*)", run(FOR_CPUS)[1][0])


def test_synchronized_batch_norm_sees_the_images_of_all_ranks(run):
    _, outputs = run(SYNC_BATCH_NORM, "--cpu")
    assert all("equal" in output for output in outputs), outputs


def test_what_has_no_place_on_the_cpu_is_named_with_its_line(run):
    head, _, tail = FOR_GPUS.partition("stream = torch.cuda.Stream()\n")
    _, outputs = run(f"{head}import flash_attn\n{tail}", "--cpu")
    line = "--cpu cannot replace what train.py:25 asks of a GPU: ModuleNotFoundError: No module"
    assert outputs[0].count(line) == 1 and "Traceback" not in "".join(outputs), outputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script would get a GPU")
def test_why_hang_runs_it_too(run):
    codes, outputs = run(FOR_GPUS, "run", "--cpu", tool="why_hang.py")
    assert codes == [0, 0] and outputs[0].count("loss") == 12, outputs
    codes, outputs = run(FOR_GPUS, "run", tool="why_hang.py")
    assert codes == [1, 1] and "Traceback" not in "".join(outputs)
    assert outputs[0].startswith("why_hang.py: train.py:8 asks for a GPU, and PyTorch sees none (")
    assert "run --cpu train.py" in outputs[0] and outputs[0].count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script would get a GPU")
def test_a_script_that_looks_for_gpus_and_exits_is_told_of_the_flag(run):
    codes, outputs = run("import torch\nif not torch.cuda.is_available():\n    raise SystemExit")
    assert codes[0] == 2 and "--cpu train.py" in outputs[0] and "found" not in outputs[0]


def test_errors_that_have_nothing_to_do_with_gpus_keep_their_traceback(monkeypatch):
    errors = {
        RuntimeError("0 active drivers ([]). There should only be one. (triton)"): True,
        RuntimeError("Backend gloo does not support reduce_scatter"): True,
        NotImplementedError("Could not run 'my::op' with arguments from the 'CPU' backend"): True,
        ImportError("FlashAttention2 has been toggled on, but it cannot be used"): True,
        ValueError("no images in ./data"): False,
        FileNotFoundError("No such file or directory: '/data/gpu/train'"): False,
    }
    monkeypatch.syspath_prepend(ROOT / "launch")
    from rank_watch import on_cpu

    monkeypatch.setenv(on_cpu.VARIABLE, "1")
    for error, asks in errors.items():
        assert bool(on_cpu.explain(error, "check_ranks.py", "check_ranks.py")) == asks
