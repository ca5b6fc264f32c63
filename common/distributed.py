"""Set up torch.distributed under any launcher. Copy this file: it needs only PyTorch 2.9 or newer.

    from distributed import cleaned_up, setup_distributed

    @cleaned_up()
    def main():
        d = setup_distributed()
        model = torch.nn.parallel.DistributedDataParallel(Net().to(d.device))
        ...  # train on this process's share of the data: d.rank of d.world_size

    main()

The same script then runs under every launcher, and as `python train.py` with a world size of 1. The
environment variables tell which launcher started it. The first match in this order wins:

    torchrun   RANK, WORLD_SIZE and LOCAL_RANK
    mpirun     OMPI_COMM_WORLD_* (Open MPI), or PMI_* with MPI_LOCALRANKID (MPICH, Intel MPI)
    srun       SLURM_STEP_*; a bare sbatch script has only SLURM_NTASKS, and so runs as python
    nodes      RANK and WORLD_SIZE alone: one process per machine (PyTorchJob, SenseCore)
    python     none of these

torchrun and mpirun come before srun because processes they start in a Slurm step inherit its
variables. Rank 0 listens at MASTER_ADDR:MASTER_PORT; under srun these default to the first host of
the step and a port made from the ids of job and step. Afterwards RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. A launch that cannot work raises LaunchError.
If a rank fails, torchrun, mpirun and srun --kill-on-bad-exit=1 stop the others; plain srun waits.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import socket
import sys
import threading
import time
import traceback
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it; imported while a group exists, it keeps that alive

TIMEOUT = datetime.timedelta(minutes=5)  # for a missing rank, at startup and in every collective

log = logging.getLogger(__name__)


class LaunchError(ValueError):
    """The processes were started in a way that cannot work.

    Its one line says what was found, what was expected, and the command that works.
    """

    def __init__(self, found, expected, command):
        super().__init__(found, expected, command)

    def __str__(self):
        found, expected, command = self.args
        return f"{found}: expected {expected}; {command}"


class Ranks(NamedTuple):
    """The place of this process among the processes of its job, as its launcher says."""

    rank: int  # 0 to world_size - 1
    world_size: int
    local_rank: int  # 0 to local_world_size - 1, on this machine
    local_world_size: int | None  # None: unknown until all have joined


class Address(NamedTuple):
    """Where rank 0 listens, and for which job, so that a rank refuses the store of another one."""

    host: str
    port: int
    job: str  # "" if the launcher names none

    def __str__(self):
        return f"{self.host}:{self.port}"


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

    The backend is nccl for CUDA and gloo for CPUs unless one is given. Rank 0 listens at `port`
    unless MASTER_PORT is set. `timeout`, a datetime.timedelta, is for missing ranks at startup and
    in every collective. LaunchError: the processes were started in a way that cannot work.
    """
    if dist.is_initialized():
        found, expected = "a process group exists already", "none before setup_distributed()"
        command = "remove your init_process_group(), or pass on the result of the first call"
        raise LaunchError(found, expected, command)
    launcher, ranks = find_launcher()
    check_launch(launcher)
    address = find_address(launcher, ranks, port)

    at_least = ranks.local_rank + 1  # processes on this machine, until all have joined
    device = setup_device(ranks.local_rank, ranks.local_world_size or at_least)
    if backend == "nccl" and device.type != "cuda":
        found = "backend='nccl', and this process sees no GPU"
        raise LaunchError(found, "a GPU, or gloo", "leave it out, or say backend='gloo'")
    backend = backend or dist.get_default_backend_for_device(device)

    if ranks.world_size == 1:
        store = dist.HashStore()
    elif address is None:
        store = store_of_torchrun(timeout)
    else:
        store = rendezvous(address, ranks.rank, ranks.world_size, timeout)
        if ranks.local_world_size is None:  # all have joined, so they can be counted
            ranks = ranks._replace(local_world_size=store.add(ranks_here(), 0))
            setup_device(ranks.local_rank, ranks.local_world_size)  # fewer threads; enough GPUs?
    set_variables(ranks, address)

    # With a device_id, NCCL connects now, not in the first collective, where errors are obscure.
    device_id = device if backend == "nccl" else None
    group = {"rank": ranks.rank, "world_size": ranks.world_size, "store": store}
    dist.init_process_group(backend=backend, timeout=timeout, device_id=device_id, **group)
    return Distributed(*ranks, device, backend, launcher)


@contextlib.contextmanager
def cleaned_up():
    """Destroy the process group when the block, or the decorated function, ends.

    After an error in a world of several processes, print it and exit at once: destroying the group
    could wait for ranks that wait for this one. Code that handles errors in another way belongs
    inside the block.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            end_process(error)
        traceback.clear_frames(error.__traceback__)  # they hold the model, which holds the group
        raise
    finally:
        gc.collect()  # or a model in a reference cycle keeps the group and its threads until exit
        if dist.is_initialized():
            dist.destroy_process_group()


def sum_over_ranks(tensor):
    """Return the sum of a tensor over all ranks as a new tensor. Every rank must call it."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


# Who started this process

SCRIPT = os.path.basename(sys.argv[0]) or "train.py"
TORCHRUN = f"torchrun --nproc-per-node=2 {SCRIPT}"  # commands that work, for messages
MPIRUN = f"mpirun -n 2 python {SCRIPT}"
SRUN = f"srun --ntasks=2 python {SCRIPT}"


def find_launcher():
    """Return the name of the launcher that started this process, and the Ranks that it set."""
    for name, read in LAUNCHERS.items():
        if ranks := read():
            return name, ranks
    return "python", Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)


def read_torchrun():
    """Return the Ranks of torchrun, or of somebody who sets its variables by hand, or None."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return None
    number = functools.partial(read_number, TORCHRUN)
    n = number("WORLD_SIZE", 1)
    local_n = 1 if n == 1 else None
    if "LOCAL_WORLD_SIZE" in os.environ:  # people who set the others by hand forget this one
        local_n = number("LOCAL_WORLD_SIZE", 1, n)
    return Ranks(number("RANK", 0, n - 1), n, number("LOCAL_RANK", 0, (local_n or n) - 1), local_n)


def read_mpirun():
    """Return the Ranks of Open MPI, MPICH or Intel MPI, or None."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif "PMI_RANK" in os.environ:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        if "MPI_LOCALRANKID" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
            return None  # srun may set PMI_RANK alone
    else:
        return None
    number = functools.partial(read_number, MPIRUN)
    n = number(names[1], 1)
    local_n = number(names[3], 1, n)
    return Ranks(number(names[0], 0, n - 1), n, number(names[2], 0, local_n - 1), local_n)


def read_srun():
    """Return the Ranks of a task of a Slurm step, or None."""
    if "SLURM_STEP_NUM_TASKS" not in os.environ:
        return None
    number = functools.partial(read_number, SRUN)
    n = number("SLURM_STEP_NUM_TASKS", 1)
    local_n = slurm_tasks_here()
    local_rank = number("SLURM_LOCALID", 0, local_n - 1)
    return Ranks(number("SLURM_PROCID", 0, n - 1), n, local_rank, local_n)


def read_nodes():
    """Return the Ranks of variables that count machines, with one process on each, or None."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    given = [name for name in names if name in os.environ]
    if not given:
        return None
    if given != ["RANK", "WORLD_SIZE"]:
        missing = [name for name in names if name not in os.environ]
        found = f"{' and '.join(given)} set without {' and '.join(missing)}"
        raise LaunchError(found, "all three, or none", TORCHRUN)
    n = read_number(TORCHRUN, "WORLD_SIZE", 1)
    return Ranks(read_number(TORCHRUN, "RANK", 0, n - 1), n, 0, 1)


# The table at the top of this file, in its order. Another launcher also has to be looked at in
# check_launch(), check_gpus(), cores_per_process(), find_address() and find_host().
LAUNCHERS = {
    "torchrun": read_torchrun,
    "mpirun": read_mpirun,
    "srun": read_srun,
    "nodes": read_nodes,
}


def read_number(command, name, least=0, most=None):
    """Return a variable as a whole number. LaunchError: it is none from `least` to `most`.

    `command` is the launch that sets it.
    """
    text = os.environ.get(name, "(not set)")
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least or (most is not None and number > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise LaunchError(f"{name}={text}", f"a whole number {limits}", command)
    return number


def set_variables(ranks, address):
    """Set the variables that torchrun would set, which other libraries read."""
    if address:
        host, port = address.host, address.port
    else:  # torchrun has set both; one process alone needs neither, but a library may read them
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = os.environ.get("MASTER_PORT") or free_port()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (*ranks, host, port)), strict=True))


# Which launches cannot work


def check_launch(launcher):
    """Raise LaunchError if several processes would claim one rank, or processes are missing.

    Warn of a process that runs alone, though its launcher has started others.
    """
    is_spawned = multiprocessing.parent_process() is not None
    if launcher in ("srun", "mpirun") and is_spawned:
        found = f"{launcher} has started a script that starts processes itself"
        command = SRUN if launcher == "srun" else MPIRUN
        found += ", and all would claim one rank"
        raise LaunchError(found, "one of the two", f"{command}, without spawning")
    if launcher == "python" and is_spawned:
        parent = "the process that spawned this one has not set RANK and the like"
        log.warning("running as one process: %s", parent)
    in_job = os.environ.get("SLURM_NTASKS", "1")
    if launcher == "python" and in_job != "1":
        log.warning(
            "running as one process, though SLURM_NTASKS=%s: srun python %s", in_job, SCRIPT
        )
    if {"TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"} <= os.environ.keys():  # a torchrun in a task
        tasks = read_number(SRUN, "SLURM_STEP_NUM_TASKS", 1)
        nodes = read_number(SRUN, "SLURM_STEP_NUM_NODES", 1)
        if tasks > nodes:
            found = f"srun has started {tasks} tasks with a torchrun on {nodes} machine(s)"
            command = f"srun --ntasks={nodes} --ntasks-per-node=1 torchrun ..."
            raise LaunchError(f"SLURM_STEP_NUM_TASKS={tasks}: {found}", "one on each", command)
        is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
        if nodes > 1 and is_alone and os.environ.get("LOCAL_RANK") == "0":
            command = f"torchrun --nnodes={nodes}"
            log.warning("each of %d machines trains alone: for one run of all, %s", nodes, command)
    if launcher == "nodes":
        # If PyTorchJob sets this, its WORLD_SIZE counts processes, and PET_NNODES the machines.
        per_pod = os.environ.get("PET_NPROC_PER_NODE", "")
        n = max(torch.accelerator.device_count(), int(per_pod) if per_pod.isdigit() else 1)
        found = f"RANK without LOCAL_RANK counts machines, and this one should run {n} processes"
        machines = "$PET_NNODES" if per_pod else "$WORLD_SIZE"
        command = f"torchrun --nnodes={machines} --node-rank=$RANK --nproc-per-node={n}"
        command += f" --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {SCRIPT}"
        if n > 1:
            raise LaunchError(found, "torchrun", command)


# Which device


def setup_device(local_rank, local_world_size):
    """Set the number of threads, and return this process's GPU, made the current one, or the CPU.

    A process that sees one GPU takes it whatever its local rank: Slurm, for one, can bind a GPU to
    each task. Outside of torchrun nobody notices here that several share it; NCCL does. Other
    accelerators with a backend of their own are treated like GPUs; only a pretend one has been
    tried. Apple's mps has no backend, so the CPU is used. Threads share the cores, unless
    OMP_NUM_THREADS is set. LaunchError: more processes than GPUs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_process(local_world_size))
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator().type
    if dist.Backend.default_device_backend_map.get(kind, "gloo") == "gloo":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    # The workers of torchrun all see the same GPUs, or with --virtual-local-rank are all number 0.
    is_own = count == 1 and (local_rank == 0 or "TORCHELASTIC_RUN_ID" not in os.environ)
    check_gpus(count, is_own, local_world_size)
    device = torch.device(kind, 0 if is_own else local_rank)
    # Before anything else: or every process would also take memory on GPU 0.
    torch.accelerator.set_device_index(device.index)
    return device


def check_gpus(count, is_own, local_world_size):
    """Raise LaunchError if GPUs would stay idle in a Slurm task, or there are too few."""
    is_task = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= os.environ.keys()
    if {"LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"} & os.environ.keys():
        is_task = False  # a torchrun or mpirun in the task started this process
    is_alone = is_task and local_world_size == 1
    if is_alone and count > 1 and slurm_tasks_here() == 1:
        found = f"one Slurm task with {count} GPUs, of which this process would use one"
        command = f"srun --ntasks-per-node={count} python {SCRIPT}"
        command += f", or srun torchrun --nproc-per-node={count} {SCRIPT}"
        command += "; for one GPU alone, export CUDA_VISIBLE_DEVICES=0"
        raise LaunchError(found, "one task per GPU, or torchrun in the task", command)
    if local_world_size > count and not is_own:
        found = f"{local_world_size} processes on this machine, {count} GPU(s)"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            found += f" in CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
        command = f"torchrun --nproc-per-node={count}, srun --ntasks-per-node={count}"
        raise LaunchError(found, "a GPU for each", f"{command}, or mpirun -n {count}")


def cores_per_process(local_world_size):
    """Return how many cores each of the `local_world_size` processes on this machine may use."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Linux: the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_CPUS_ON_NODE"} <= os.environ.keys():
        tasks = slurm_tasks_here()
        granted = read_number(SRUN, "SLURM_CPUS_ON_NODE", 1)
        if cores * tasks > granted:  # the tasks are not bound to cores of their own
            cores = min(cores, max(1, granted // tasks))
        local_world_size //= tasks  # processes within one task
    return max(1, cores // max(1, local_world_size))


# Where rank 0 listens

PORTS = range(12000, 32000)  # Linux gives ports above 32768 to outgoing connections


def find_address(launcher, ranks, port=None):
    """Return the Address of rank 0. None: there is one rank, or torchrun keeps a store."""
    if ranks.world_size == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    host = find_host(launcher, ranks)
    job = os.environ.get("PMIX_NAMESPACE", "")  # of Open MPI
    if launcher == "srun":
        job_id = read_number(SRUN, "SLURM_JOB_ID")
        job = f"{job_id}.{read_number(SRUN, 'SLURM_STEP_ID')}"
    if os.environ.get("MASTER_PORT"):
        command = "export MASTER_PORT=29500 on all machines, or unset it"
        port = read_number(command, "MASTER_PORT", 1, 65535)
    elif not port:  # jobs that share a machine get ports of their own
        port = PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 29500
    return Address(host, port, job)


def find_host(launcher, ranks):
    """Return the host of rank 0: MASTER_ADDR, or else as far as the launcher tells it."""
    if os.environ.get("MASTER_ADDR"):
        return os.environ["MASTER_ADDR"]
    if launcher == "srun":
        host = first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        if ranks.rank == 0 and os.environ.get("SLURM_NODEID") != "0":
            found = f"rank 0 is not on the first machine, {host}"
            command = "leave out --distribution=arbitrary, or export MASTER_ADDR"
            raise LaunchError(found, "--distribution=block or cyclic", command)
        return host
    if ranks.world_size == ranks.local_world_size:  # all on this machine
        return "127.0.0.1"
    command = "export MASTER_ADDR=... on all machines"
    if launcher == "mpirun":
        command = "mpirun -x MASTER_ADDR=..."
    raise LaunchError("MASTER_ADDR is not set", "rank 0's host name", command)


def first_host(nodelist):
    """Return the first host of a Slurm node list: gpu-a[01-04,07]-ib,login -> gpu-a01-ib."""
    host = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", nodelist).partition(",")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        found = f"SLURM_STEP_NODELIST={nodelist}"
        raise LaunchError(found, "host names, as n[01-04,07]", SRUN)
    return host


def slurm_tasks_here():
    """Return how many tasks of this Slurm step run on this machine.

    SLURM_STEP_TASKS_PER_NODE lists them: 5,1(x2) is 5 on the first machine, 1 on the next two.
    """
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([0-9]{1,5})\))?", part)
        if not match:
            found = f"SLURM_STEP_TASKS_PER_NODE={text}"
            raise LaunchError(found, "tasks per node, as 4(x2),1", SRUN)
        tasks, machines = match.groups()
        counts += [int(tasks)] * int(machines or 1)
    return counts[read_number(SRUN, "SLURM_NODEID", 0, len(counts) - 1)]


def free_port():
    """Return a port of this machine on which nobody listens now."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    found = f"none of 100 ports from {PORTS[0]} to {PORTS[-1]} can be used"
    raise LaunchError(found, "a free port", "see whether a firewall or a sandbox is in the way")


# Where ranks meet: a store, which rank 0 keeps and all read and write. Its get() waits for a key.

WARN_AFTER = 15  # seconds of waiting for other ranks


def rendezvous(address, rank, world_size, timeout=TIMEOUT):
    """Wait until every rank has joined exactly once, and return the store that rank 0 keeps.

    All ranks read one verdict: the first problem that one has found, or null, which the last rank
    to join writes. LaunchError: rank 0 is out of reach, its port taken, a rank missing after
    `timeout` or claimed twice. (torch's own rendezvous does not name missing or duplicate ranks.)
    """
    try:
        store = open_store(address, rank, world_size, timeout)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        problem = None
        if store.add(f"claims to rank {rank}", 1) > 1:
            other = store.get(f"rank {rank}").decode()
            found = f"rank {rank} is claimed twice, by {other} and {process}"
            command = "give each process its own rank, each machine its own node rank"
            problem = LaunchError(found, "one process", f"{command}, and launch once")
            publish(store, problem)
        else:
            store.set(f"rank {rank}", process)
            store.add(ranks_here(), 1)
            if store.add("ranks", 1) == world_size:  # this was the last one
                publish(store, None)
        if rank == 0:
            wait_for_verdict(store, world_size, address, timeout)
        else:
            give_up_at = time.monotonic() + 2 * timeout.total_seconds()
            while not store.check(["verdict"]):
                if time.monotonic() > give_up_at:
                    raise RuntimeError("rank 0 fell silent")
                time.sleep(0.1)  # store.get() would wait too, but deaf to Ctrl-C
        verdict = json.loads(store.get("verdict"))
        if problem and not verdict:  # all had joined before this process came
            verdict = problem.args
    except RuntimeError as error:
        found = f"lost rank 0, which kept the store at {address}"
        raise LaunchError(found, "it to wait for all ranks", "read its own message") from error
    if verdict:
        time.sleep(2 if rank == 0 else 0)  # the store ends with rank 0: let the others read first
        raise LaunchError(*verdict)
    return store


def store_of_torchrun(timeout=TIMEOUT):
    """Return torchrun's own store, or None to let torch find it.

    torchrun on one machine keeps its store over all restarts. Without a prefix for each, restarted
    processes would read the addresses of those before them, and wait for these (tried with torch
    2.11 and 2.14). On several machines there is no prefix: the counts of restarts may differ.
    """
    variables = ("TORCHELASTIC_USE_AGENT_STORE", "GROUP_WORLD_SIZE")
    if [os.environ.get(name) for name in variables] != ["True", "1"]:
        return None
    host, port = os.environ["MASTER_ADDR"], read_number(TORCHRUN, "MASTER_PORT", 1, 65535)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)


def ranks_here():
    """Return the key under which a store counts the ranks of this machine that have joined."""
    return f"ranks on {socket.gethostname()}"


def publish(store, problem):
    """Set the verdict that all ranks read, unless there is one: a LaunchError, or None."""
    store.compare_set("verdict", "", json.dumps(problem.args if problem else None))


def wait_for_verdict(store, world_size, address, timeout):
    """Wait as rank 0 for the verdict. Warn of missing ranks, and publish them after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    warn_at = min(time.monotonic() + WARN_AFTER, deadline)
    while not store.check(["verdict"]):
        time.sleep(0.02)
        if time.monotonic() < warn_at:
            continue
        missing = [str(rank) for rank in range(world_size) if not store.check([f"rank {rank}"])]
        if len(missing) > 8:
            missing[8:] = ["..."]
        names = "a rank that fell silent while it joined"
        if missing:
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {world_size}"
        if time.monotonic() < deadline:
            log.warning("rank 0 at %s is waiting for %s", address, names)
        else:
            found = f"{names} did not join rank 0 on {socket.gethostname()} at {address}"
            publish(store, LaunchError(found, f"all within {timeout}", "see whether they run"))
        warn_at = deadline


def open_store(address, rank, world_size, timeout=TIMEOUT):
    """Return the store of a job: rank 0 keeps it, the others connect. LaunchError: see rendezvous.

    A rank refuses the store of another job.
    """
    job = f"{world_size} ranks" + (f" of job {address.job}" if address.job else "")
    connection = concurrent.futures.Future()
    # In a thread: a stranger at that port that never answers would hold a TCPStore for ever, deaf
    # to Ctrl-C.
    thread = threading.Thread(target=connect, args=(address, rank, job, connection), daemon=True)
    thread.start()
    seconds = timeout.total_seconds()
    concurrent.futures.wait([connection], min(seconds, WARN_AFTER))
    if not connection.done() and seconds > WARN_AFTER:
        reason = find_obstacle(address, job)
        log.warning("rank %d is waiting for the store of rank 0 at %s (%s)", rank, address, reason)
        concurrent.futures.wait([connection], seconds - WARN_AFTER)
    if not connection.done():
        found = f"rank {rank} could not reach rank 0 at {address} ({find_obstacle(address, job)})"
        command = "see whether it runs, and what MASTER_ADDR and MASTER_PORT say there"
        raise LaunchError(found, "rank 0 there, and no firewall", command)
    try:
        store, found_job = connection.result()
    except RuntimeError as error:
        if rank > 0:
            raise
        raise unusable_port(address.port, error) from None
    if found_job != job:
        found = f"the store of {found_job} answers at {address}"
        command = "end what has that port (ss -ltnp), or export another MASTER_PORT on all machines"
        raise LaunchError(found, f"the store of {job}", command)
    store.set_timeout(timeout)
    return store


def connect(address, rank, job, connection):
    """Set the Future `connection` to a store and the job that it says it is for, or to an error.

    Each rank opens one connection, as in torch itself: the store may do a slow name look-up for
    each. torch's own time limit is a day here, so that the one in open_store() comes first: torch's
    does not cover every wait, and prints C++ stacks.
    """
    host = "127.0.0.1" if rank == 0 else address.host
    try:
        while not resolves(host):
            time.sleep(0.5)
        options = {"wait_for_workers": False, "timeout": datetime.timedelta(days=1)}
        options["use_libuv"] = sys.platform != "win32"  # PyTorch for Windows lacks it
        store = dist.TCPStore(host, address.port, is_master=rank == 0, **options)
        if rank == 0:
            store.set("job", job)
        connection.set_result((store, store.get("job").decode()))
    except Exception as error:
        connection.set_exception(error)


def resolves(host):
    """Return whether a host name has an address now. That of a Kubernetes pod has one later."""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def find_obstacle(address, job):
    """Return what keeps a rank from rank 0: no such name, refused, no route, or a stranger."""
    try:
        socket.create_connection((address.host, address.port), 5).close()
    except OSError as error:
        return error
    return f"something listens there, and has not answered as the store of {job}"


def unusable_port(port, error):
    """Return the LaunchError of a rank 0 that cannot listen at this port."""
    reason = f"cannot be used ({' '.join(str(error).split())})"
    if "EADDRINUSE" in str(error):
        reason = "is taken, by another job, a left-over process (ss -ltnp) or a second rank 0"
    command = f"on all machines export MASTER_PORT={free_port()}"
    return LaunchError(f"port {port} of this machine {reason}", "a free port", command)


# How a rank ends that does not wait for the others


def end_process(error):
    """Exit at once, with the code of sys.exit(), or with 1 after printing any other error.

    What atexit would do is not done.
    """
    code = (error.code or 0) if isinstance(error, SystemExit) else None
    if code is None:
        traceback.print_exc()
    elif not isinstance(code, int):  # sys.exit("a message")
        print(code, file=sys.stderr)
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
