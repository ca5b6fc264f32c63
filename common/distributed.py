"""Set up torch.distributed under any launcher. Copy this file into your project; it needs only PyTorch (2.9 or newer).

    from distributed import cleaned_up, setup_distributed

    @cleaned_up()
    def main():
        d = setup_distributed()
        model = torch.nn.parallel.DistributedDataParallel(Net().to(d.device))
        ...  # train on this process's share of the data: d.rank of d.world_size

    main()

The same script then runs under every launcher, and as `python train.py` with a world size of 1. The environment
variables tell which launcher started it. The first match in this order wins:

    torchrun   RANK, WORLD_SIZE and LOCAL_RANK
    mpirun     OMPI_COMM_WORLD_* (Open MPI), or PMI_* with MPI_LOCALRANKID (MPICH, Intel MPI)
    srun       SLURM_STEP_*; the shell of an sbatch script is no step: there, SLURM_NTASKS is that of the whole job
    nodes      RANK and WORLD_SIZE without LOCAL_RANK: Kubernetes PyTorchJob and SenseCore, which count machines
    python     none of these

torchrun and mpirun come before srun because processes they start in a Slurm step inherit its variables. Rank 0 listens
at MASTER_ADDR:MASTER_PORT; under srun these default to the first host of the step and a port made from the job id.
Afterwards the variables of torchrun, RANK to MASTER_PORT, are set under every launcher. A launch that cannot work
raises LaunchError: what was found, what was expected, and the command that works. Let the launcher stop the other ranks
when one fails: torchrun and mpirun do, srun with --kill-on-bad-exit=1.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import gc
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

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too; imported while a process group is open, it would keep the group alive

TIMEOUT = datetime.timedelta(minutes=5)  # how long to wait for a missing rank, at startup and in every collective
NETWORK_TIMEOUT = 10  # seconds until a host name that nobody knows is an error
WARN_AFTER = 15  # seconds of waiting for other ranks
PORTS = range(12000, 32000)  # for jobs that choose none; Linux gives ports above 32768 to outgoing connections
ADDED = "SETUP_DISTRIBUTED_SET"  # this variable lists the others that setup_distributed() has added

# Each launcher's names for rank, world size, local rank and local world size, and commands that set such names.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
SCRIPT = os.path.basename(sys.argv[0]) or "train.py"
COMMANDS = {"MASTER": "export MASTER_PORT=29500 on all machines, or unset it"}
COMMANDS |= dict.fromkeys(["SLURM", "srun"], f"srun --ntasks=2 python {SCRIPT}")
COMMANDS |= dict.fromkeys(["OMPI", "PMI", "MPI", "mpirun"], f"mpirun -n 2 python {SCRIPT}")
COMMANDS |= dict.fromkeys(["RANK", "WORLD", "LOCAL"], f"torchrun --nproc-per-node=2 {SCRIPT}")

log = logging.getLogger(__name__)


class LaunchError(ValueError):
    """The processes were started in a way that cannot work. The message is one line and names a command that works."""

    one_line = True


@dataclasses.dataclass(frozen=True)
class Distributed:
    """This process's place among the processes of its job."""

    rank: int  # 0 to world_size - 1; rank 0 prints and saves
    local_rank: int  # 0 to local_world_size - 1, on this machine
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str  # of the process group: "nccl", "gloo", ...
    launcher: str  # "torchrun", "mpirun", "srun", "nodes" or "python"
    is_main = property(lambda self: self.rank == 0)


def setup_distributed(backend=None, port=None, timeout=TIMEOUT):
    """Choose this process's device and number of threads, join its job's process group, and return a Distributed.

    The backend is nccl for CUDA and gloo for CPUs unless one is given. Rank 0 listens at `port` unless MASTER_PORT is
    set. `timeout`, a datetime.timedelta, is for missing ranks at startup and in every collective. LaunchError: the
    processes were started in a way that cannot work.
    """
    if dist.is_initialized():
        raise LaunchError("setup_distributed() was called twice: expected one call; pass its result on")
    launcher, rank, world_size, local_rank, local_world_size, address = find_launcher(port)
    device = setup_device(local_rank, local_world_size or local_rank + 1)
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("backend='nccl' needs GPUs and this process sees none: leave it out, or say backend='gloo'")
    backend = backend or dist.get_default_backend_for_device(device)
    # Connect NCCL now: its errors are harder to read in the first collective.
    device_id = device if device.type != "cpu" and backend != "gloo" else None
    store = dist.HashStore() if world_size == 1 else None  # None: the store of torchrun
    if address:
        store = rendezvous(address, rank, world_size, timeout, device)
        if local_world_size is None:
            local_world_size = store.add(f"ranks on {socket.gethostname()}", 0)
            setup_device(local_rank, local_world_size)  # again, now that the number of processes here is known
    _set_variables((rank, world_size, local_rank, local_world_size), address)
    group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout, "device_id": device_id}
    dist.init_process_group(backend=backend, **group)
    return Distributed(rank, local_rank, world_size, local_world_size, device, backend, launcher)


@contextlib.contextmanager
def cleaned_up():
    """Destroy the process group when the block, or the decorated function, ends.

    After an error in a world of several processes, print it and exit at once: destroying the group could wait for ranks
    that wait for this one. Code that handles errors in another way belongs inside the block.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            code = (error.code or 0) if isinstance(error, SystemExit) else None
            if not isinstance(code, int):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        traceback.clear_frames(error.__traceback__)  # they hold the model, which holds the group
        raise
    finally:
        gc.collect()  # a model in a reference cycle holds the group, whose threads would outlive it
        if dist.is_initialized():
            dist.destroy_process_group()


def sum_over_ranks(tensor):
    """Return the sum of a tensor over all ranks as a new tensor. Every rank must call it."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def find_launcher(port=None):
    """Return (launcher, rank, world_size, local_rank, local_world_size, address).

    `port` is where rank 0 listens, unless MASTER_PORT is set. The local world size is None if unknown, and the address
    is None if no rendezvous is needed: one rank, or torchrun's store. LaunchError: variables are missing or wrong, or
    were set for the parent process.
    """
    env = _environment()
    given = [name for name in TORCHRUN[:3] if name in env]
    is_mpich = MPICH[0] in env and (MPICH[2] in env or SLURM[1] not in env)  # srun may set PMI_RANK alone
    if len(given) == 3:
        launcher, ranks = "torchrun", _read_ranks(TORCHRUN)
    elif OPEN_MPI[0] in env or is_mpich:
        launcher, ranks = "mpirun", _read_ranks(OPEN_MPI if OPEN_MPI[0] in env else MPICH)
    elif SLURM[1] in env:
        launcher, ranks = "srun", _read_ranks(SLURM)
    elif given == ["RANK", "WORLD_SIZE"]:
        n = _read_number("WORLD_SIZE", 1)
        launcher, ranks = "nodes", (_read_number("RANK", 0, n - 1), n, 0, 1)
    elif given:
        missing = " and ".join(name for name in TORCHRUN[:3] if name not in env)
        found = f"{' and '.join(given)} set without {missing}"
        raise LaunchError(f"{found}: expected all three, or none; {COMMANDS['RANK']}")
    else:
        launcher, ranks = "python", (0, 1, 0, 1)
        if multiprocessing.parent_process():
            log.warning("running as one process: the process that spawned this one has not set RANK and the like")
        if env.get("SLURM_NTASKS", "1") != "1":
            log.warning("running as one process, though SLURM_NTASKS=%s: srun python %s", env["SLURM_NTASKS"], SCRIPT)
    _check_processes(launcher)
    needs_none = ranks[1] == 1 or (launcher == "torchrun" and dist.is_torchelastic_launched())
    return launcher, *ranks, None if needs_none else _address(launcher, ranks, port)


def _environment():
    """Return os.environ without what setup_distributed() has added, here or in a process that started this one."""
    added = dict(item.split("=", 1) for item in os.environ.get(ADDED, "").split())
    if any(os.environ.get(name) != added[name] for name in TORCHRUN[:3] if name in added):  # somebody set new ranks
        added = {name: value for name, value in added.items() if name == TORCHRUN[3]}
    return {name: value for name, value in os.environ.items() if added.get(name) != value}


def _set_variables(ranks, address):
    """Set the variables that torchrun would set, and remember which of them are new."""
    env = _environment()
    host, port = address[:2] if address else (env.get("MASTER_ADDR", "127.0.0.1"), env.get("MASTER_PORT", free_port()))
    values = dict(zip((*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), map(str, (*ranks, host, port)), strict=True))
    new = [f"{name}={value}" for name, value in values.items() if env.get(name) != value]
    os.environ.update(values | {ADDED: " ".join(new)})


def _read_ranks(names):
    """Return (rank, world size, local rank, local world size) from these variables. The last is None if unknown."""
    n = _read_number(names[1], 1)
    here = 1 if n == 1 else None
    if names == SLURM:
        here = slurm_tasks_here()
    elif names != TORCHRUN or names[3] in _environment():  # people who set torchrun's variables by hand forget this one
        here = _read_number(names[3], 1, n)
    return _read_number(names[0], 0, n - 1), n, _read_number(names[2], 0, (here or n) - 1), here


def _read_number(name, least=0, most=None):
    """Return a whole number from an environment variable, or raise LaunchError."""
    text = _environment().get(name, "(not set)")
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least or (most is not None and number > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise LaunchError(f"{name}={text}: expected a whole number {limits}; {COMMANDS[name.split('_')[0]]}")
    return number


def _check_processes(launcher):
    """Raise LaunchError if several processes would claim one rank, or processes are missing."""
    if multiprocessing.parent_process() and launcher in ("srun", "mpirun"):
        found = f"{launcher} has started a script that starts processes itself, and all would claim one rank"
        raise LaunchError(f"{found}: expected one of the two; {COMMANDS[launcher]}, without spawning")
    if launcher == "torchrun" and dist.is_torchelastic_launched() and SLURM[1] in os.environ:
        tasks, nodes = _read_number(SLURM[1], 1), _read_number("SLURM_STEP_NUM_NODES", 1)
        if tasks > nodes:
            found = f"{SLURM[1]}={tasks}: srun has started {tasks} tasks with a torchrun on {nodes} machine(s)"
            raise LaunchError(f"{found}, expected one on each; srun --ntasks={nodes} --ntasks-per-node=1 torchrun ...")
        if nodes > 1 and os.environ.get("GROUP_WORLD_SIZE") == "1" and os.environ["LOCAL_RANK"] == "0":
            log.warning("each of %d machines trains alone: for one run of all, torchrun --nnodes=%d", nodes, nodes)
    if launcher == "nodes":
        per_pod = os.environ.get("PET_NPROC_PER_NODE", "")  # of PyTorchJob, whose WORLD_SIZE counts processes
        each = max(torch.accelerator.device_count(), int(per_pod) if per_pod.isdigit() else 1)
        if each > 1:
            found = f"RANK without LOCAL_RANK counts machines, and this one should run {each} processes"
            fix = f"torchrun --nnodes={'$PET_NNODES' if per_pod else '$WORLD_SIZE'} --node-rank=$RANK --nproc-per-node="
            fix += f"{each} --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {SCRIPT}"
            raise LaunchError(f"{found}: expected torchrun; {fix}")


def setup_device(local_rank, local_world_size):
    """Set the number of threads, and return this process's GPU, made the current one, or else the CPU.

    A process that sees one GPU takes it whatever its local rank: Slurm, for one, can bind a GPU to each task. Other
    accelerators with a backend of their own are treated like GPUs; that has not been tried. Apple's mps has no backend,
    so the CPU is used. Threads share the cores, unless OMP_NUM_THREADS is set. LaunchError: more processes than GPUs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_process(local_world_size))
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if dist.Backend.default_device_backend_map.get(kind, "gloo") == "gloo":
        return torch.device("cpu")
    count, visible = torch.accelerator.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # torchrun assigns no GPUs: what its environment says as well is for all of its workers.
    has_own_gpu = count == 1 and not (dist.is_torchelastic_launched() and visible == _parents_gpus())
    names = _environment().keys()
    is_task = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= names and not {"LOCAL_RANK", OPEN_MPI[0]} & names
    if is_task and count > local_world_size == slurm_tasks_here() == 1:
        found = f"one Slurm task with {count} GPUs, of which this process would use one"
        commands = f"srun --ntasks-per-node={count} python {SCRIPT}, or srun torchrun --nproc-per-node={count} {SCRIPT}"
        commands += "; for one GPU alone, export CUDA_VISIBLE_DEVICES=0"
        raise LaunchError(f"{found}: expected one task per GPU, or torchrun in the task; {commands}")
    if local_world_size > count and not has_own_gpu:
        visible = "" if visible is None else f" in CUDA_VISIBLE_DEVICES={visible}"
        found = f"{local_world_size} processes on this machine, {count} GPU(s){visible}"
        commands = f"torchrun --nproc-per-node={count}, srun --ntasks-per-node={count}, or mpirun -n {count}"
        raise LaunchError(f"{found}: expected a GPU for each; {commands}")
    device = torch.device(kind, 0 if has_own_gpu else local_rank)
    torch.accelerator.set_device_index(device.index)  # first, or every process would also take memory on GPU 0
    return device


def _parents_gpus():
    """Return CUDA_VISIBLE_DEVICES of the process that started this one. Linux only; None elsewhere."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ") as variables:
        return dict(item.split("=", 1) for item in variables.read().split("\0") if "=" in item).get(
            "CUDA_VISIBLE_DEVICES"
        )


def cores_per_process(local_world_size):
    """Return how many cores each of the `local_world_size` processes on this machine may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_CPUS_ON_NODE"} <= os.environ.keys():
        tasks, granted = slurm_tasks_here(), _read_number("SLURM_CPUS_ON_NODE", 1)
        if cores * tasks > granted:  # the tasks are not bound to cores of their own
            cores = min(cores, max(1, granted // tasks))
        local_world_size //= tasks  # processes within one task
    return max(1, cores // max(1, local_world_size))


def _address(launcher, ranks, port):
    """Return (host, port, job) of rank 0. `job` is the name of the job, if its launcher gives it one, else ""."""
    env = _environment()
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if ranks[1] == ranks[3] and launcher != "srun" else None)
    if not host and launcher == "srun":
        host = first_host(env.get("SLURM_STEP_NODELIST", ""))
        if ranks[0] == 0 and env.get("SLURM_NODEID") != "0":
            found = f"rank 0 is not on the first machine, {host}: expected --distribution=block or cyclic"
            raise LaunchError(f"{found}; leave out --distribution=arbitrary, or export MASTER_ADDR")
    if not host:
        fix = "export MASTER_ADDR=... on all machines" if launcher != "mpirun" else "mpirun -x MASTER_ADDR=..."
        raise LaunchError(f"MASTER_ADDR is not set: expected rank 0's host name; {fix}")
    job = env.get("PMIX_NAMESPACE", "")  # of Open MPI
    if launcher == "srun":
        job = f"{_read_number('SLURM_JOB_ID')}.{_read_number('SLURM_STEP_ID')}"
    default = port or (PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 29500)
    return host, _read_number("MASTER_PORT", 1, 65535) if "MASTER_PORT" in env else default, job


def first_host(nodelist):
    """Return the first host of a Slurm node list: gpu-a[01-04,07]-ib,login -> gpu-a01-ib. LaunchError if it is none."""
    host = re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", nodelist).partition(",")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        raise LaunchError(f"SLURM_STEP_NODELIST={nodelist}: expected host names, as n[01-04,07]; {COMMANDS['SLURM']}")
    return host


def slurm_tasks_here():
    """Return the tasks of this Slurm step on this machine: its entry in, say, SLURM_STEP_TASKS_PER_NODE=5,1(x2)."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    parts = [re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([0-9]{1,5})\))?", part) for part in text.split(",")]
    if not all(parts):
        raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text}: expected tasks per node, as 4(x2),1; {COMMANDS['SLURM']}")
    counts = [int(part[1]) for part in parts for _ in range(int(part[2] or 1))]
    return counts[_read_number("SLURM_NODEID", 0, len(counts) - 1)]


def free_port():
    """Return a port of this machine on which nobody listens now. LaunchError: none of 100 ports can be used."""
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    raise LaunchError(
        f"none of 100 ports from {PORTS[0]} to {PORTS[-1]} can be used: is a firewall or sandbox in the way?"
    )


def rendezvous(address, rank, world_size, timeout=TIMEOUT, device=None):
    """Wait until every rank has joined, exactly once, at a store that rank 0 keeps, and return the store.

    The address is (host, port, job) of rank 0. A rank refuses the store of another job. If `device` is a GPU, no two
    ranks may share it. LaunchError: the host is unknown, the port taken, a rank missing after `timeout`, or a rank or a
    GPU claimed twice. (torch's own rendezvous does not name missing or duplicate ranks.)
    """
    store, me = open_store(address, rank, world_size, timeout), f"process {os.getpid()} on {socket.gethostname()}"
    where, deadline = f"{address[0]}:{address[1]}", time.monotonic() + timeout.total_seconds()
    warn_at, claims = min(time.monotonic() + WARN_AFTER, deadline), [f"rank {rank}"]
    if device and device.type != "cpu":
        claims.append(f"GPU {torch.get_device_module(device).get_device_properties(device).uuid}")
    try:
        # The first rank to find a problem publishes it as the verdict; if there is none, the last to arrive says so.
        store.add(f"ranks on {socket.gethostname()}", 1)
        verdict = None
        for claim in claims:
            if store.add(f"claims to {claim}", 1) == 1:
                store.set(claim, me)
            else:
                verdict = (
                    f"{claim} is claimed twice, by {store.get(claim).decode()} and {me}: expected one process; give "
                )
                verdict += "each process its own rank and GPU, each machine its own node rank, and launch once"
        if verdict or store.add("ranks", 1) == world_size:
            store.compare_set("verdict", "", verdict or "all here")
        while rank == 0 and not store.check(["verdict"]):
            time.sleep(0.02)
            if time.monotonic() > warn_at:
                missing = [str(other) for other in range(world_size) if not store.check([f"rank {other}"])]
                names = ", ".join(missing[:8] + ["..."] * (len(missing) > 8))
                log.warning("rank 0 at %s is waiting for ranks %s of %d", where, names, world_size)
                if time.monotonic() > deadline:
                    found = f"ranks {names} of {world_size} did not join rank 0 on {socket.gethostname()} at {where}"
                    store.compare_set("verdict", "", f"{found}: expected all within {timeout}; see whether they run")
                warn_at = deadline
        verdict = verdict or store.get("verdict").decode()
    except RuntimeError as error:
        raise LaunchError(f"lost rank 0, which kept the store at {where}: its own message says why") from error
    if verdict != "all here":
        time.sleep(2 if rank == 0 else 0)  # the store ends with rank 0: let the others read the verdict first
        raise LaunchError(verdict)
    store.set_timeout(timeout)
    return store


def open_store(address, rank, world_size, timeout=TIMEOUT):
    """Keep the store of a job, as rank 0, or connect to it. Arguments, result and errors are those of rendezvous()."""
    (host, port, job), end, result = address, time.monotonic() + timeout.total_seconds(), concurrent.futures.Future()
    where, job = f"{host}:{port}", f"{world_size} ranks" + (f" of job {job}" if job else "")

    def connect():
        try:
            is_pod = "KUBERNETES_SERVICE_HOST" in os.environ  # where the name of a pod becomes known when it starts
            known_by = end if is_pod else time.monotonic() + NETWORK_TIMEOUT
            while True:
                try:
                    socket.getaddrinfo(host, None)
                    break
                except socket.gaierror as error:
                    if error.errno != socket.EAI_AGAIN and time.monotonic() > known_by:
                        found = f"{host!r} does not resolve: expected the name or address of the machine of rank 0"
                        raise LaunchError(f"{found}; export MASTER_ADDR=... on all machines") from None
                time.sleep(0.5)
            # Each rank opens one connection, as in torch itself: the store may do a slow name look-up for each.
            # No time limit of torch: it does not cover every wait, and prints C++ stacks at its end.
            options = {"is_master": rank == 0, "wait_for_workers": False, "timeout": datetime.timedelta(days=1)}
            store = dist.TCPStore("127.0.0.1" if rank == 0 else host, port, **options)
            if rank == 0:
                store.set("job", job)
            result.set_result((store, store.get("job").decode()))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()  # for a time limit, and so that Ctrl-C works
    if concurrent.futures.wait([result], min(end - time.monotonic(), WARN_AFTER)).not_done:
        log.warning("rank %d is waiting for the store of rank 0 at %s", rank, where)
    try:
        store, found = result.result(end - time.monotonic())
    except concurrent.futures.TimeoutError:
        reason = f"something answers there, but not as the store of {job}"
        try:
            socket.create_connection((host, port), NETWORK_TIMEOUT).close()
        except OSError as error:
            reason = error
        found = f"rank {rank} could not reach rank 0 at {where} ({reason}): expected rank 0 there, and no firewall"
        raise LaunchError(f"{found}; see whether it runs, and what MASTER_ADDR and MASTER_PORT say there") from None
    except RuntimeError as error:
        if rank > 0:
            raise
        reason = f"cannot be used ({' '.join(str(error).split())})"
        if "EADDRINUSE" in str(error):
            reason = "is taken, by another job, a left-over process (ss -ltnp) or a second rank 0"
        found = f"port {port} of this machine {reason}: expected a free port"
        raise LaunchError(f"{found}; on all machines export MASTER_PORT={free_port()}") from None
    if found != job:
        found = f"the store of {found} answers at {where}: expected the store of {job}"
        raise LaunchError(f"{found}; end what has that port (ss -ltnp), or export another MASTER_PORT on all machines")
    store.set_timeout(timeout + datetime.timedelta(seconds=NETWORK_TIMEOUT))  # longer than rank 0 waits for the ranks
    return store
