"""Which launches cannot work or waste GPUs, and what keeps a rank from the store of rank 0.

setup_distributed() checks only what it needs. This says the rest, before the training.
"""

import concurrent.futures
import contextlib
import datetime
import os
import socket
import threading
import time

import torch
import torch.distributed as dist

from common.machine import free_port, slurm_tasks_here
from common.setup_distributed import LaunchError, first_host

DAY = datetime.timedelta(days=1)


def check_start(launcher):
    """Return warnings of processes that train alone, though others were started.

    Raises:
        LaunchError: launchers are nested wrongly, processes are missing, or rank 0 is elsewhere.
    """
    given = os.environ
    warnings = []
    is_torchrun = "TORCHELASTIC_RUN_ID" in given
    if launcher == "python" and given.get("SLURM_NTASKS", "1") != "1":
        found = f"running as one process, though SLURM_NTASKS={given['SLURM_NTASKS']}"
        warnings.append(f"{found}: srun python ...")
    is_alone = given.get("GROUP_WORLD_SIZE", "1") == "1"  # the torchrun, without --nnodes
    under_mpirun = int(given.get("OMPI_COMM_WORLD_SIZE", given.get("PMI_SIZE", 1))) > 1
    if is_torchrun and is_alone and under_mpirun:
        found = "mpirun has started several torchruns, and each trains alone"
        raise LaunchError(f"{found}: expected one of the two; mpirun -n 2 python ...")
    if is_torchrun and "SLURM_STEP_NUM_TASKS" in given:
        tasks = int(given["SLURM_STEP_NUM_TASKS"])
        nodes = int(given["SLURM_STEP_NUM_NODES"])
        if tasks > nodes:
            found = f"srun has started {tasks} tasks with a torchrun on {nodes} machine(s)"
            remedy = f"srun --ntasks={nodes} --ntasks-per-node=1 torchrun ..."
            raise LaunchError(f"{found}: expected one on each; {remedy}")
        if nodes > 1 and is_alone and given.get("LOCAL_RANK") == "0":
            warnings.append(f"each of {nodes} machines trains alone: torchrun --nnodes={nodes}")
    if launcher == "nodes":
        check_pod()
    if launcher == "srun":
        check_task()
    return warnings


def check_pod():
    """Raise LaunchError if a machine that has one process should have several."""
    # If PyTorchJob sets this, its WORLD_SIZE counts processes, and PET_NNODES the machines.
    per_pod = os.environ.get("PET_NPROC_PER_NODE", "")
    n = max(torch.accelerator.device_count(), int(per_pod) if per_pod.isdigit() else 1)
    machines = "$PET_NNODES" if per_pod else "$WORLD_SIZE"
    if n > 1:
        found = f"RANK counts machines, and this one should run {n} processes"
        remedy = f"torchrun --nnodes={machines} --node-rank=$RANK --nproc-per-node={n}"
        remedy += " --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT ..."
        raise LaunchError(f"{found}: expected torchrun; {remedy}")


def check_task():
    """Raise LaunchError if a Slurm task leaves GPUs idle, or rank 0 is not where others look."""
    gpus = torch.accelerator.device_count()
    if slurm_tasks_here() == 1 < gpus:
        found = f"one Slurm task with {gpus} GPUs, of which this process would use one"
        remedy = f"srun --ntasks-per-node={gpus}, or srun torchrun --nproc-per-node={gpus}"
        remedy += "; for one GPU alone, export CUDA_VISIBLE_DEVICES=0"
        raise LaunchError(f"{found}: expected one task per GPU; {remedy}")
    is_elsewhere = os.environ["SLURM_PROCID"] == "0" != os.environ["SLURM_NODEID"]
    if is_elsewhere and not os.environ.get("MASTER_ADDR"):
        first = first_host(os.environ["SLURM_STEP_NODELIST"])
        found = f"rank 0 is not on the first machine, {first}"
        raise LaunchError(f"{found}: leave out --distribution=arbitrary, or export MASTER_ADDR")


def processes_here(launcher, local_rank):
    """Return how many processes run on this machine, as far as the launcher tells it."""
    if launcher == "srun":
        return slurm_tasks_here()
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    given = [os.environ[name] for name in names if name in os.environ]
    return int(given[0]) if given else local_rank + 1


def open_store(host, port, rank, world_size, timeout):
    """Return the store that rank 0 keeps. `timeout` is a datetime.timedelta.

    In a thread: a stranger at that port that never answers would hold a TCPStore for ever, deaf to
    Ctrl-C. torch's own time limit is a day here, so that ours comes first: torch's prints C++
    stacks.

    Raises:
        LaunchError: what keeps this rank from the store.
    """
    connection = concurrent.futures.Future()
    job = f"{world_size} ranks"
    options = {"wait_for_workers": False, "timeout": DAY, "use_libuv": os.name != "nt"}

    def connect():
        try:
            while not resolves(host) and rank > 0:
                time.sleep(0.5)
            at = "127.0.0.1" if rank == 0 else host
            store = dist.TCPStore(at, port, is_master=rank == 0, **options)
            if rank == 0:
                store.set("job", job)
            connection.set_result((store, store.get("job").decode()))
        except RuntimeError as error:
            connection.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    concurrent.futures.wait([connection], timeout.total_seconds())
    if not connection.done():
        found = f"rank {rank} could not reach rank 0 at {host}:{port} ({find_obstacle(host, port)})"
        remedy = "see whether it runs, and what MASTER_ADDR and MASTER_PORT say there"
        raise LaunchError(f"{found}: expected rank 0 there, and no firewall; {remedy}")
    try:
        store, found_job = connection.result()
    except RuntimeError as error:
        if rank > 0:
            raise
        raise LaunchError(unusable_port(port, error)) from None
    if found_job != job:
        found = f"the store of {found_job} answers at {host}:{port}: expected that of {job}"
        raise LaunchError(f"{found}; end what has that port (ss -ltnp), or export MASTER_PORT")
    store.set_timeout(timeout)
    return store


def resolves(host):
    """Return whether a host name has an address now. That of a Kubernetes pod has one later."""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def find_obstacle(host, port):
    """Return what keeps a rank from rank 0: no such name, refused, no route, or a stranger."""
    try:
        socket.create_connection((host, port), 5).close()
    except OSError as error:
        return error
    return "something listens there, and has not answered"


def unusable_port(port, error):
    """Return why rank 0 cannot listen at this port, with a free one."""
    reason = f"cannot be used ({' '.join(str(error).split())})"
    if "EADDRINUSE" in str(error):
        reason = "is taken, by another job, a left-over process (ss -ltnp) or a second rank 0"
    remedy = f"on all machines export MASTER_PORT={free_port()}"
    return f"port {port} of this machine {reason}: expected a free port; {remedy}"
