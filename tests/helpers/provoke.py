"""Make the mistakes of docs/troubleshooting.md, one after another, without this project's checks.

    torchrun --nproc-per-node=2 tests/helpers/provoke.py    # mistakes with two ranks
    python tests/helpers/provoke.py launchers         # mistakes with torchrun
    python tests/helpers/provoke.py shared-memory     # with a small /dev/shm
    python tests/helpers/provoke.py join HOST RANK    # on each of two hosts

A line `== NUMBER: NAME` precedes torch's output for a mistake of the entry NUMBER of the page. With
`silent` in place of the number, it precedes a mistake that torch does not report, with `remedy`
what mends one: both must print no error and no warning.
"""

import contextlib
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import shared_memory
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import launch, run
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ddp.errors import lost_peer

SHORT = datetime.timedelta(seconds=2)


@contextlib.contextmanager
def mistake(name):
    """Print the exception, and the message that the scripts of this project would print for it."""
    sys.stderr.write(f"== {name}\n")
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        if reason := lost_peer(error):
            sys.stderr.write(f"provoke.py: error: {reason}\n")
    sys.stderr.flush()


def print_errors(name, mistakes):
    sys.stderr.write(f"== {name}\n")
    for function in mistakes:
        try:
            function()
        except BaseException:
            traceback.print_exc()


# Two ranks


@contextlib.contextmanager
def mistake_of_ranks(name):
    """Like mistake(), with a barrier before and after."""
    dist.barrier()
    with mistake(name):
        yield
    dist.barrier()


def short_lived_group():
    """Return a process group with a short timeout.

    After a failed collective, its connections are closed.
    """
    return dist.new_group(timeout=SHORT)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


class Checkpointed(nn.Module):
    """Calls one block twice, with activation checkpointing."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.block = nn.Linear(2, 2), nn.Linear(2, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x


def mark_twice():
    """Give a weight two gradients in one backward pass, and three ways not to."""
    ways = {
        "72: marked ready twice": (True, {}),
        "72: marked ready twice with find_unused_parameters": (
            True,
            {"find_unused_parameters": True},
        ),
        "remedy: not reentrant": (False, {"find_unused_parameters": True}),
        "remedy: static_graph": (True, {"static_graph": True}),
    }
    for name, (use_reentrant, options) in ways.items():
        with mistake_of_ranks(name):
            ddp = DistributedDataParallel(Checkpointed(use_reentrant), **options)
            for _ in range(2):
                ddp(torch.ones(1, 2)).sum().backward()


def accumulate_with_a_static_graph():
    """Do the first backward pass under no_sync(), and after one that sends gradients."""
    for name in ("86: static_graph and no_sync", "remedy: static_graph and no_sync"):
        with mistake_of_ranks(name):
            ddp = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
            if name.startswith("remedy"):
                ddp(torch.ones(1, 2)).sum().backward()
            with ddp.no_sync():
                ddp(torch.ones(1, 2)).sum().backward()
            ddp(torch.ones(1, 2)).sum().backward()


def make_ddp_refuse(rank):
    """Give DDP what it does not take, and a group or a store what they do not have."""
    checkpointed = Checkpointed(use_reentrant=True)
    checkpointed.first.requires_grad_(False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    no_time = datetime.timedelta(milliseconds=100)
    group = short_lived_group()
    other_group = short_lived_group()

    def build(*arguments, **options):
        return lambda: DistributedDataParallel(*arguments, **options)

    mistakes = [
        build(nn.Sequential(*(nn.Linear(2, 2) for _ in range(rank + 1))), process_group=group),
        build(nn.Linear(2, 2 + rank), process_group=other_group),
        lambda: DistributedDataParallel(nn.Linear(2, 2)).encode,
        build(nn.Linear(2, 2).requires_grad_(False)),
        build(nn.Linear(2, 2), device_ids=[0]),
        lambda: checkpoint(checkpointed.block, torch.ones(1, 2), use_reentrant=True).backward(),
        lambda: dist.init_process_group("gloo"),
        lambda: store.wait(["never"], no_time),
        lambda: list(DataLoader(Ending(), num_workers=1)),
    ]
    dist.barrier()
    print_errors("87: more texts", mistakes)
    dist.barrier()


class Ending(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os._exit(1)


def change_in_place():
    """Change what a backward pass still needs: the weights of a GAN, and batch norm's buffers."""
    with mistake_of_ranks("80: a step between forward and backward"):
        generator, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        generator, critic = map(DistributedDataParallel, (generator, critic))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        images = generator(torch.ones(4, 2))
        loss = -critic(images).mean()
        critic(images.detach()).mean().backward()
        optimizer.step()
        loss.backward()

    fails = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    twice = "80: two forward passes" if fails else "silent: two forward passes"
    for name in (twice, "remedy: two forward passes"):
        with mistake_of_ranks(name):
            ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
            ddp.broadcast_buffers = not name.startswith("remedy")
            one, other = ddp(torch.randn(4, 2)), ddp(torch.randn(4, 2))
            (one - other).square().mean().backward()


def two_ranks():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()

    group = short_lived_group()
    with mistake_of_ranks("1: a rank does not come"):
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)

    group = short_lived_group()
    with mistake_of_ranks("87: monitored barrier"):
        if rank == 0:
            dist.monitored_barrier(group=group, timeout=SHORT, wait_all_ranks=True)

    level = dist.get_debug_level()
    # like TORCH_DISTRIBUTED_DEBUG=DETAIL, but for one group
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dist.set_debug_level(level)
    with mistake_of_ranks("2: rank 0 alone evaluates"):
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)  # in its evaluation
        else:
            dist.broadcast(torch.ones(1), src=0, group=group)  # in the next training step

    with mistake_of_ranks("20: no gradient"):
        ddp = DistributedDataParallel(TwoHeads())
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()

    with mistake_of_ranks("20: no unused parameter"):
        ddp = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()

    mark_twice()
    accumulate_with_a_static_graph()
    make_ddp_refuse(rank)
    change_in_place()

    with mistake_of_ranks("74: broadcast_buffers"):
        DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
    with mistake_of_ranks("remedy: broadcast_buffers"):
        ddp = DistributedDataParallel(nn.BatchNorm1d(2))
        ddp.broadcast_buffers = False
        ddp(torch.ones(4, 2)).sum().backward()

    with mistake_of_ranks("71: a buffer that shares memory"):
        table = nn.Module()
        table.register_parameter("weight", nn.Parameter(torch.ones(1)))
        # like the position encoding in PyTorch's tutorial on nn.Transformer
        table.register_buffer("pe", torch.zeros(4, 2).unsqueeze(0).transpose(0, 1))
        table.forward = lambda x: table.weight * (x + table.pe)
        ddp = DistributedDataParallel(table)
        for _ in range(2):
            ddp(torch.ones(4, 3, 2)).sum().backward()

    group = short_lived_group()
    with mistake_of_ranks("1: uneven batches"):
        ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        for _ in range(3 - rank):
            ddp(torch.ones(1, 2)).sum().backward()

    group = short_lived_group()
    with mistake_of_ranks("1: early stopping"):
        ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        for epoch in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
            if epoch == rank:  # its own loss no longer falls
                break
    with mistake_of_ranks("remedy: early stopping"):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        losses = [3.0, 4.0, 4.0], [9.0, 6.0, 3.0]  # rank 0 alone would stop, the sum falls
        best = float("inf")
        for epoch in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
            total = torch.tensor([losses[rank][epoch], 1.0])
            dist.all_reduce(total)
            loss = (total[0] / total[1]).item()
            if loss >= best:
                break
            best = loss
        assert epoch == 2, "all three epochs"

    with mistake_of_ranks("22: SyncBatchNorm in DDP"):
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)))

    with mistake_of_ranks("22: SyncBatchNorm"):
        nn.SyncBatchNorm(2)(torch.ones(4, 2))

    dist.barrier()
    with mistake("17: a rank dies"):
        if rank == 1:
            os._exit(0)
        time.sleep(1)
        dist.all_reduce(torch.ones(1))
    os._exit(0)  # destroying the group would wait for rank 1


# torchrun, run in this process, so that torch is imported once

SCRIPTS = {
    "fail.py": "raise OSError('disk full')\n",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "arguments.py": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "work.py": "print('work')\n",
    "one_fails.py": "import os, time\ntime.sleep(60) if os.environ['RANK'] == '0' else 1 / 0\n",
    "evaluate.py": """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))  # in its evaluation
else:
    dist.all_reduce(torch.ones(1000))  # gradients, in the next training step
""",
    "recorded.py": """\
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise OSError("disk full")

main()
""",
}


def launchers():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, name).write_text(text)

        def torchrun(name, script, *flags, main=run.main):
            with mistake(name):
                record(main)(["--nnodes=1", *flags, os.path.join(folder, script)])

        one = "--nproc-per-node=1"
        torchrun("19: failed", "fail.py", one)
        torchrun("19: failed and recorded", "recorded.py", one)
        torchrun("19: killed", "killed.py", one)
        torchrun("23: two processes", "work.py", "--nproc-per-node=2")
        torchrun("87: one of two fails", "one_fails.py", "--nproc-per-node=2")
        torchrun("2: rank 0 alone sums", "evaluate.py", "--nproc-per-node=2")
        torchrun("40: no GPU to count", "work.py", "--nproc-per-node=gpu")
        torchrun("5: torch.distributed.launch", "arguments.py", one, main=launch.main)

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rdzv = [
            one,
            "--rdzv-backend=c10d",
            "--rdzv-id=RUN42",
            f"--rdzv-endpoint=127.0.0.1:{store.port}",
        ]
        settings = "--rdzv-conf=is_host=0,last_call_timeout=1"
        torchrun("silent: a job that ends", "work.py", *rdzv, settings)
        torchrun("87: the same job again", "work.py", *rdzv, settings)

        no_store = [one, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1"]
        torchrun(
            "8: nobody keeps the store",
            "work.py",
            *no_store,
            "--rdzv-conf=is_host=0,read_timeout=1",
        )

    lose_the_store()
    few_open_files()
    one_process()

    with contextlib.suppress(RuntimeError, AssertionError):
        torch.cuda.init()
    with mistake("30: CUDA in a forked process"):
        torch.multiprocessing.start_processes(init_cuda, nprocs=1, start_method="fork")


def lose_the_store():
    """Read from a store whose process ends."""
    ends = "import sys, time, torch.distributed as dist\n"
    ends += "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
    ends += "print(store.port, flush=True)\nstore.wait(['joined'])\n"
    keeper = subprocess.Popen([sys.executable, "-c", ends], stdout=subprocess.PIPE, text=True)
    port = int(keeper.stdout.readline())
    with mistake("87: the store ends"):
        store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=20))
        store.set("joined", "yes")
        store.get("never")


def one_process():
    mistakes = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: DataLoader(Numbers(), batch_size=32 // 64),
        lambda: torch.cuda.amp.autocast(enabled=False),
        lambda: torch.cuda.amp.GradScaler(enabled=False),
        lambda: torch.multiprocessing.start_processes(end_one, nprocs=2, start_method="fork"),
    ]
    print_errors("87: one process", mistakes)


def end_one(rank):
    if rank == 1:
        os._exit(1)
    time.sleep(60)


class Numbers(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        return torch.zeros(2)


def put(queue):
    for number in Numbers():
        queue.put(number)
    queue.get()


def few_open_files():
    """Keep more tensors of other processes than this process may have open files."""
    few, many = 64, resource.getrlimit(resource.RLIMIT_NOFILE)
    context = torch.multiprocessing.get_context("fork")
    numbers = context.Queue()
    child = context.Process(target=put, args=(numbers,), daemon=True)
    child.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, many[1]))
    with mistake("82: many tensors of a loader"):
        kept = list(DataLoader(Numbers(), batch_size=1, num_workers=1))
    with mistake("82: many tensors of a queue"):
        kept = [numbers.get(timeout=30) for _ in Numbers()]
    with mistake("remedy: copies"):
        kept = [batch.clone() for batch in DataLoader(Numbers(), batch_size=1, num_workers=1)]
        assert len(kept) == 128
    resource.setrlimit(resource.RLIMIT_NOFILE, many)
    child.kill()


def init_cuda(_):
    torch.cuda.init()


# Two hosts


def join(host, rank):
    with mistake("7: joining"):
        url = f"tcp://{host}:29500"
        dist.init_process_group(
            "gloo", init_method=url, rank=int(rank), world_size=2, timeout=SHORT
        )


# A small /dev/shm


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3, 224, 224)


class MappedImages(Images):
    def __getitem__(self, index):
        # creating it succeeds, writing fails
        memory = shared_memory.SharedMemory("provoked", create=True, size=2**24)
        memory.buf[:] = bytes(2**24)
        return 1


def small_shared_memory():
    with mistake("25: memory that is there on paper"):
        list(DataLoader(MappedImages(), batch_size=4, num_workers=1))
    # Python's resource tracker may have deleted it already
    Path("/dev/shm/provoked").unlink(missing_ok=True)
    with mistake("25: memory that is not there"):
        list(DataLoader(Images(), batch_size=4, num_workers=1))


if __name__ == "__main__":
    modes = {"launchers": launchers, "shared-memory": small_shared_memory, "join": join}
    modes[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else two_ranks()
