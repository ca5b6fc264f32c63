"""Set up torch.distributed under any of LAUNCHERS. Copy this file: it needs PyTorch 2.9 or newer.

    from setup_distributed import cleaned_up, setup_distributed

    @cleaned_up()
    def main():
        d = setup_distributed()
        ...  # train on d.device, on this process's share of the data: d.rank of d.world_size

`python train.py` then trains with a world size of 1. With more processes, rank 0 listens at
MASTER_ADDR:MASTER_PORT, under srun by default on the first host of the step.
"""

import contextlib
import dataclasses
import datetime
import gc
import itertools
import logging
import os
import re
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it; imported while a group exists, it keeps that alive
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

TIMEOUT = datetime.timedelta(minutes=5)  # for a missing rank, at startup and in every collective
WARN_AFTER = 15  # seconds of waiting for missing ranks at startup
SETUPS = itertools.count()  # of this process, which may leave its group and join again
LAUNCHERS = (  # what each calls rank, world size and local rank; the first that has set these wins
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # of MPICH and Intel MPI
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("nodes", "RANK", "WORLD_SIZE"),  # one process on each machine: PyTorchJob, SenseCore
    ("python",),  # alone; also under an unknown launcher, and in the shell of an sbatch file
)


class LaunchError(ValueError):
    """The processes were started in a way that cannot work. The text says what to change."""


@dataclasses.dataclass(frozen=True)
class Distributed:
    """What setup_distributed() returns: the place of this process in its job, and its device."""

    rank: int  # 0 to world_size - 1; rank 0 prints and saves
    world_size: int
    local_rank: int  # 0 to local_world_size - 1, on this machine
    local_world_size: int
    device: torch.device
    backend: str  # of the process group: "nccl", "gloo", ...
    launcher: str  # "torchrun", "mpirun", "srun", "nodes" or "python"
    is_main = property(lambda self: self.rank == 0)


def setup_distributed(backend=None, port=None, timeout=TIMEOUT):
    """Choose this process's device, join its job's process group, and return a Distributed.

    The backend is nccl for CUDA, else gloo. Rank 0 listens at `port` unless MASTER_PORT is set.
    `timeout`, in seconds or a timedelta, is for missing ranks, now and in every collective.
    """
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    launcher, rank, world_size, local_rank = find_launcher()
    host, port = find_address(launcher, world_size, port)
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # machines, as torchrun counts them
        store = meet(host, port, rank, world_size, timeout)
        local_size = store.add(f"ranks on {socket.gethostname()}", 0)  # all have counted themselves
    else:  # which may have restarted a different number of times: torch finds the store
        store, local_size = None, int(os.environ["LOCAL_WORLD_SIZE"])
    device = setup_device(local_rank, local_size)
    backend = backend or dist.get_default_backend_for_device(device)
    # With a device_id, NCCL connects now, not in the first collective, where errors are obscure.
    device_id = device if backend == "nccl" else None
    group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group(backend, device_id=device_id, **group)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, world_size, local_rank, local_size, host, port)
    os.environ |= dict(zip(names, map(str, values), strict=True))  # other libraries read them
    return Distributed(rank, world_size, local_rank, local_size, device, backend, launcher)


@contextlib.contextmanager
def cleaned_up():
    """Destroy the process group when the block, or the decorated function, ends.

    One of several processes that fails exits at once: the destruction could wait for the others.
    """
    try:
        yield
    except BaseException as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        code = (error.code or 0) if isinstance(error, SystemExit) else 1
        with contextlib.suppress(OSError, KeyboardInterrupt):  # nobody reads it, or waits for it
            if isinstance(error, RuntimeError) and re.search("by peer|remote process", str(error)):
                time.sleep(5)  # torchrun shows the error of the rank that failed, and ends this one
                error.__traceback__ = None  # MPICH's mpirun does not end it: a line says enough
            if not isinstance(error, SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
                get_error_handler().record_exception(error)  # torchrun shows it last
            elif not isinstance(code, int):  # sys.exit("a message")
                print(code, file=sys.stderr)
            print(end="", flush=True)
        os._exit(code if isinstance(code, int) else 1)
    finally:
        gc.collect()  # or a model in a reference cycle keeps the group and its threads until exit
        if dist.is_initialized():
            dist.destroy_process_group()


def find_launcher():
    """Return the launcher of this process, and its rank, world size and local rank."""
    given = os.environ.keys()
    launcher, *names = next(row for row in LAUNCHERS if given >= set(row[1:]))
    alone = given & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK"}
    if launcher == "python" and alone:
        raise LaunchError(f"only {sorted(alone)} set: expected RANK, WORLD_SIZE and LOCAL_RANK")
    place = [int(os.environ[name]) for name in names] + [0, 1, 0][len(names) :]
    if not 0 <= place[0] < place[1]:
        raise LaunchError(f"{launcher}: rank {place[0]} of {place[1]}: expected 0 to one less")
    return launcher, *place


def find_address(launcher, world_size, port=None):
    """Return the host and port of rank 0: MASTER_ADDR and MASTER_PORT, if these are set."""
    host = os.environ.get("MASTER_ADDR")
    if launcher == "srun":  # steps that share a machine get ports of their own
        host = host or first_host(os.environ["SLURM_STEP_NODELIST"])
        step = int(os.environ["SLURM_JOB_ID"]) + 1009 * int(os.environ["SLURM_STEP_ID"])
        port = port or 12000 + step % 20000
    sizes = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")]
    if not host and world_size > 1 and str(world_size) not in sizes:
        raise LaunchError("MASTER_ADDR is not set: expected rank 0's host; export it, or mpirun -x")
    return host or "127.0.0.1", int(os.environ.get("MASTER_PORT") or port or 29500)


def first_host(nodelist):
    """Return the first host of a Slurm node list: gpu-a[01-04,07]-ib,login -> gpu-a01-ib."""
    return re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", nodelist).partition(",")[0]


def meet(host, port, rank, world_size, timeout):
    """Return a store that all ranks share, once each of them has joined it.

    torch's own rendezvous does not say which ranks are missing, and is deaf to Ctrl-C.
    """
    # Without a prefix, processes that torchrun restarts read the addresses of those before them.
    start = f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT')}, setup {next(SETUPS)}"
    store = connect(host, port, rank, timeout) if world_size > 1 else dist.HashStore()
    store = dist.PrefixStore(start, store)
    if store.add(f"rank {rank}", 1) > 1:
        raise LaunchError(f"rank {rank} is there twice, now as process {os.getpid()}: launch once")
    store.add(f"ranks on {socket.gethostname()}", 1)
    store.add("ranks", 1)

    def describe():
        missing = [r for r in range(world_size) if not store.check([f"rank {r}"])]
        return f"rank 0 at {host}:{port} is waiting for ranks {missing[:8]} of {world_size}"

    last = datetime.timedelta(seconds=2 * (rank == 0))  # the store ends with rank 0
    wait_until(lambda: store.add("ranks", 0) == world_size, describe, timeout + last, rank == 0)
    return store


def connect(host, port, rank, timeout):
    """Return the store that rank 0 or torchrun keeps, once it answers."""
    options = {"wait_for_workers": False, "timeout": timeout, "use_libuv": os.name != "nt"}
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.TCPStore("127.0.0.1", port, is_master=True, **options)  # on all addresses
    found = f"rank {rank} is waiting for rank 0 at {host}:{port}"
    wait_until(lambda: socket.create_connection((host, port), 5), lambda: found, timeout)
    return dist.TCPStore(host, port, **options)


def wait_until(ready, describe, timeout, warns=True):
    """Wait until ready() is true. Warn after a while, and raise a LaunchError after `timeout`."""
    start = time.monotonic()
    warn_after = WARN_AFTER
    reason = ""
    while True:
        try:
            if ready():
                return
        except OSError as error:  # no such name, no route, refused: it may start later
            reason = f" ({error})"
        waited = time.monotonic() - start
        if waited > timeout.total_seconds():
            raise LaunchError(f"{describe()}{reason}, for {timeout}: see whether it runs")
        if warns and waited > warn_after:
            logging.getLogger(__name__).warning("%s%s", describe(), reason)
            warn_after = 2 * waited
        time.sleep(min(1, 0.01 + waited / 10))


def setup_device(local_rank, local_world_size):
    """Return this process's GPU, made the current one, or the CPU. Share the cores as threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        step = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # Slurm may bind a task to a part
        torch.set_num_threads(max(1, min(cores, step // local_world_size)))
    is_gpu = torch.accelerator.is_available()
    kind = torch.accelerator.current_accelerator().type if is_gpu else "cpu"
    if dist.Backend.default_device_backend_map.get(kind, "gloo") == "gloo":  # also Apple's mps
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_world_size == 1 < count and find_launcher()[0] in ("srun", "nodes"):
        raise LaunchError(f"one process for {count} GPUs: torchrun --nproc-per-node={count}")
    # A process that sees one GPU has it for itself, as Slurm can bind one; not under torchrun.
    is_own = count == 1 and (local_rank == 0 or "TORCHELASTIC_RUN_ID" not in os.environ)
    device = torch.device(kind, 0 if is_own else local_rank)
    if device.index >= count:
        raise LaunchError(f"local rank {local_rank}, {count} GPU(s): --nproc-per-node={count}")
    torch.accelerator.set_device_index(device.index)  # or each would take memory on GPU 0 as well
    return device
