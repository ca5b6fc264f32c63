"""From a process, however it was started, to a process group. Copy this one file: it needs torch alone.

    from distributed import cleaned_up, setup_distributed

    @cleaned_up()
    def main():
        d = setup_distributed()
        net = torch.nn.parallel.DistributedDataParallel(Net().to(d.device))
        ...  # train; d.rank and d.world_size say which part of the data is this process's

    main()

The same script then runs under every launcher, and as `python train.py` as a world of one process. Who
started it is read from the environment; the first of these that matches wins:

    launcher   rank                  world size            local rank                  rank 0 listens at
    torchrun   RANK                  WORLD_SIZE            LOCAL_RANK                  MASTER_ADDR:MASTER_PORT
    mpirun     OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  MASTER_ADDR:MASTER_PORT,
               or PMI_RANK           PMI_SIZE              MPI_LOCALRANKID             not needed on one machine
    srun       SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID               first of SLURM_STEP_NODELIST:
                                                                                       port from SLURM_JOB_ID
    nodes      RANK                  WORLD_SIZE            0                           MASTER_ADDR:MASTER_PORT
    python     0                     1                     0                           nowhere

torchrun and mpirun come first because all that they start inside a Slurm job inherits one SLURM_PROCID; a
PMI_RANK without MPI_LOCALRANKID may be srun's own. srun counts only where a Slurm *step* started the process: the
shell of an sbatch file has the job's variables too, but runs once; and a step may be smaller than its job, which
is why SLURM_NTASKS is not read. "nodes" are Kubernetes' PyTorchJob and SenseCore, whose RANK counts machines, and
WORLD_SIZE too (PyTorchJob multiplies it by its nprocPerNode): accepted where a machine has one device and is to run one
process. MASTER_ADDR and MASTER_PORT win over what Slurm says.

Checked before any process waits for another: that the variables are all there, are numbers and fit together;
that no launcher runs inside another; that every local process has a device. Then, while the ranks meet (which
torchrun sees to itself): that the address resolves, that the port is free and the store behind it this job's, that
no rank and no GPU is there twice, that all ranks come. What is wrong raises LaunchError, a ValueError, within
seconds; only ranks that never come take `timeout`, so let the launcher end them all when one has failed: torchrun
and mpirun do, srun with --kill-on-bad-exit=1. The message says what was found, what was expected and the command
that works.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import itertools
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
import urllib.parse
import zlib

import torch
import torch.distributed as dist
import torch.distributed.nn  # now and not later, see cleanup

TIMEOUT = datetime.timedelta(minutes=5)  # for a rank that does not come, to the start or to a collective
QUICK = 10  # seconds: for an address that does not resolve, a store that does not answer
PATIENCE = 15  # seconds: who waits longer for other ranks says so
PORTS = range(12000, 32000)  # for jobs that name none; Linux gives those above 32768 to outgoing connections

log = logging.getLogger(__name__)


class LaunchError(ValueError):
    """The processes were started in a way that cannot work; the message says which way does."""


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Which process this is, of which world.

    rank: 0 to world_size - 1; rank 0 is the one that prints and saves.
    local_rank: 0 to local_world_size - 1, among the processes of this machine.
    device: what this process computes on.
    backend: of the process group, "nccl" or "gloo".
    launcher: "torchrun", "srun", "mpirun", "nodes" or "python".
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str

    @property
    def is_main(self):
        return self.rank == 0


def setup_distributed(backend=None, port=None, timeout=TIMEOUT):
    """Choose this process's device and number of threads, and join the process group of its job.

    Args:
        backend: "nccl" or "gloo"; without it nccl where there are GPUs, else gloo.
        port: where rank 0 listens, unless MASTER_PORT says so.
        timeout: datetime.timedelta to wait for other ranks, at the start and in each collective.

    Returns:
        Distributed.

    Raises:
        LaunchError: see the top of this file.
    """
    if dist.is_initialized():
        raise LaunchError("setup_distributed() was called twice: call it once, or cleanup() in between")
    launcher, rank, world_size, local_rank, local_world_size, url = find_launcher(port)
    device = setup_device(local_rank, local_world_size or local_rank + 1)
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("backend='nccl' needs GPUs and this process sees none: leave it out, or say backend='gloo'")
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    options = {"backend": backend, "timeout": timeout}
    if backend == "nccl":
        options["device_id"] = device  # connects the GPUs now: errors are harder to read in the first collective
    if world_size == 1:
        dist.init_process_group(**options, store=dist.HashStore(), rank=0, world_size=1)
    elif url is None:
        dist.init_process_group(**options)  # torchrun keeps the store, and makes each rank once
    else:
        store = rendezvous(url, rank, world_size, timeout)
        dist.init_process_group(**options, store=store, rank=rank, world_size=world_size)
    if local_world_size is None:
        hosts = [None] * world_size
        dist.all_gather_object(hosts, socket.gethostname())
        local_world_size = hosts.count(socket.gethostname())
        setup_device(local_rank, local_world_size)  # again, now that the number of those who share it is known
    return Distributed(rank, local_rank, world_size, local_world_size, device, backend, launcher)


def cleanup():
    """Leave the process group, if there is one; the last thing to do, when no variable holds the network any more.

    gloo's threads end with the last reference to the group. One that outlives the interpreter aborts the process
    ("terminate called without an active exception", exit code 134), after all the work was done. References are
    held by DistributedDataParallel, whose cycles only the garbage collector frees, and by torch.distributed.nn: its
    functions have the group of the moment as a default argument if they are first imported, by
    DistributedDataParallel, while there is one. Hence the import at the top of this file.
    """
    gc.collect()
    if dist.is_initialized():
        # gloo's thread may still hold the last tensor, and needs Python's lock to let it go. In torch 2.6 leaving keeps
        # that lock and waits for the thread: for ever.
        time.sleep(0.1)
        dist.destroy_process_group()


@contextlib.contextmanager
def cleaned_up():
    """Leave the process group at the end of the block, after an error too; a debugger then finds no variables there."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the network
        # The peers may be in a collective that waits for this rank, and leaving may wait for them: not for long.
        watchdog = threading.Timer(QUICK, _give_up, [error])
        watchdog.daemon = True
        watchdog.start()
        faulthandler.dump_traceback_later(QUICK + 2, exit=True, file=sys.__stderr__)  # if Python itself stands still
        cleanup()
        faulthandler.cancel_dump_traceback_later()
        watchdog.cancel()
        raise
    cleanup()


def _give_up(error):
    if not isinstance(error, SystemExit):  # whose reason has been printed
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def sum_over_ranks(tensor):
    """The sum of a tensor over all ranks, a new tensor on each. Every rank must call it."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@contextlib.contextmanager
def local_main_first(local_rank):
    """Run the block on one process of each machine, then on the others: to download, to unpack.

    Every rank must enter it. The block may take long, so the group in which the others wait has no short timeout.

    Raises:
        RuntimeError: on the others, if the first one of some machine failed.
    """
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    failed = torch.zeros(1)
    if local_rank > 0:
        dist.all_reduce(failed, group=group)
        if failed:
            raise RuntimeError("the first process of a machine failed, and its message says why")
        yield
    else:
        try:
            yield
        except BaseException:
            failed += 1
            raise
        finally:
            dist.all_reduce(failed, group=group)
    dist.destroy_process_group(group)


def lost_peer(error):
    """What to tell a user if this error means that another rank has gone, else None."""
    text = " ".join(str(error).split())
    from_gloo = isinstance(error, RuntimeError) and ("/gloo/" in text or "pair closure" in text)
    from_a_collective = from_gloo or isinstance(error, dist.DistError)
    if not from_a_collective or not re.search("connect|clos|reset by peer|broken pipe|timed out|remote", text, re.I):
        return None
    reason = re.sub(r"\[\S*/gloo/\S*\] ?", "", text.rpartition("Last error:")[2]).strip()[:200]  # NCCL's cause is last
    fix = "its own message or its launcher's, which may stand above, says why"
    if ("127.0." in text and "refused" in text) or "no route" in text.lower():
        name = "NCCL_SOCKET_IFNAME" if "NCCL" in text else "GLOO_SOCKET_IFNAME"
        fix = f"ranks on several machines need export {name}=... on each, the interface that the others reach"
    return f"lost another rank ({reason}): {fix}"


# Who started this process?

# The names of rank, world size, local rank and local world size.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def find_launcher(port=None):
    """Who started this process, and as which of which world.

    Returns:
        (launcher, rank, world_size, local_rank, local_world_size, url): the local world size is None if unknown, the
        url where ranks meet is None for a world of one and if torchrun keeps the store.

    Raises:
        LaunchError: variables are missing, wrong or meant for another process.
    """
    env = os.environ
    given = [name for name in TORCHRUN[:3] if name in env]
    in_step = "SLURM_STEP_NUM_TASKS" in env
    mpich = MPICH[0] in env and (MPICH[2] in env or not in_step)  # PMI_RANK alone, in a step, is srun's own
    mpi = OPEN_MPI if OPEN_MPI[0] in env else MPICH if mpich else None
    url = None
    if len(given) == 3:
        # Somebody else who speaks torchrun's words may not know the last one.
        launcher, ranks = "torchrun", read_ranks(*(TORCHRUN if TORCHRUN[3] in env else TORCHRUN[:3]))
        if not _torchrun_keeps_the_store():
            url = _env_url(port, ranks)
    elif mpi:
        launcher, ranks = "mpirun", read_ranks(*mpi)
        url = _env_url(port, ranks)
    elif in_step:
        launcher, ranks = "srun", read_ranks(*SLURM)
        url = slurm_url(port)
    elif given == ["RANK", "WORLD_SIZE"]:
        world_size = read_number("WORLD_SIZE", 1)
        launcher, ranks = "nodes", (read_number("RANK", 0, world_size - 1), world_size, 0, 1)
        _refuse_more_a_machine(world_size)
        url = _env_url(port, ranks)
    elif given:
        missing = [name for name in TORCHRUN[:3] if name not in env]
        found = f"{' and '.join(given)} set without {' and '.join(missing)}"
        raise LaunchError(f"{found}: expected all three, or none; {_command('RANK')}")
    else:
        launcher, ranks = "python", (0, 1, 0, 1)
        if multiprocessing.parent_process():
            log.warning("a world of one process: the one that spawned this one has not set RANK and its like for it")
        if env.get("SLURM_NTASKS", "1") != "1":
            log.warning(
                "running as one process: srun has not started it, though this Slurm job has SLURM_NTASKS=%s; "
                "to use them all: srun python %s",
                env["SLURM_NTASKS"], _script(),
            )  # fmt: skip
    if launcher != "python":
        _refuse_nesting(launcher)
    if ranks[1] == 1:
        return launcher, 0, 1, 0, 1, None
    return launcher, *ranks, url


def read_ranks(rank, world_size, local_rank, local_world_size=None):
    """Rank, world size, local rank and local world size from the environment variables of these names.

    The last is None if no name is given for it.

    Raises:
        LaunchError: one is missing, no number, or outside of what the others allow.
    """
    n = read_number(world_size, 1)
    here = None
    if local_world_size == "SLURM_STEP_TASKS_PER_NODE":
        here = _slurm_tasks_here()
    elif local_world_size is not None:
        here = read_number(local_world_size, 1, n)
    return read_number(rank, 0, n - 1), n, read_number(local_rank, 0, (here or n) - 1), here


def read_number(name, least=0, most=None):
    """A whole number from an environment variable.

    Raises:
        LaunchError: it is not set, no whole number, below `least` or above `most`.
    """
    text = os.environ.get(name)
    if text is None:
        raise LaunchError(f"{name} is not set: expected {_launcher_of(name)} to set it; {_command(name)}")
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if number < least or (most is not None and number > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise LaunchError(f"{name}={text}: expected a whole number {limits}; {_command(name)}")
    return number


def _slurm_tasks_here():
    """How many tasks of this Slurm step run on this machine: its entry in, say, SLURM_STEP_TASKS_PER_NODE=5,1(x2)."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    parts = [re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([0-9]{1,5})\))?", part) for part in text.split(",")]
    if not all(parts):
        found = f"SLURM_STEP_TASKS_PER_NODE={text}"
        raise LaunchError(f"{found}: expected tasks per machine, as in 4(x2),1; {_command('SLURM_PROCID')}")
    counts = [int(part[1]) for part in parts for _ in range(int(part[2] or 1))]
    return counts[read_number("SLURM_NODEID", 0, len(counts) - 1)]


def slurm_url(port=None):
    """tcp://HOST:PORT for the ranks of a Slurm step to meet at.

    The first host of the step and a port made from the ids of job and step, so that jobs that share a machine
    do not meet; unless MASTER_ADDR and MASTER_PORT say otherwise, or `port`.
    """
    host = os.environ.get("MASTER_ADDR") or expand_hosts(os.environ.get("SLURM_STEP_NODELIST", ""))[0]
    if os.environ.get("SLURM_PROCID") == "0" != os.environ.get("SLURM_NODEID") and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"SLURM_NODEID={os.environ.get('SLURM_NODEID')} of rank 0: expected it on the first machine, {host}; leave "
            f"--distribution=arbitrary out, or export MASTER_ADDR with the machine of rank 0"
        )
    if "MASTER_PORT" in os.environ:
        port = read_number("MASTER_PORT", 1, 65535)
    elif port is None:
        job, step = read_number("SLURM_JOB_ID"), read_number("SLURM_STEP_ID")
        return _url(host, PORTS[(16 * job + step) % len(PORTS)]) + f"?job={job}.{step}"
    return _url(host, port)


def expand_hosts(nodelist):
    """The host names of a Slurm node list, as in n[1-3,07-09],login,gpu-a[01-02]-ib, in its order.

    Written out here rather than by `scontrol show hostnames`, so that no shell reads it and no command is needed.

    Raises:
        LaunchError: it is no such list.
    """
    hosts = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,])+", nodelist):  # commas within brackets do not part
        pieces = re.findall(r"\[([^\]]*)\]|([^\[]+|\[)", item)
        hosts += map("".join, itertools.product(*([text] if text else _expand_ranges(r) for r, text in pieces)))
    if not hosts or not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host) for host in hosts):
        found = f"SLURM_STEP_NODELIST={nodelist}"
        raise LaunchError(f"{found}: expected host names, as in n[01-04,07],login; {_command('SLURM_PROCID')}")
    return hosts


def _expand_ranges(ranges):
    """01-03,7 -> 01 02 03 7; what is no range comes back as it is, and is no part of a host name."""
    for part in ranges.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if not match or int(match[2] or match[1]) - int(match[1]) not in range(100_000):
            yield f"[{part}]"
            continue
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}}"


def _env_url(port, ranks):
    """tcp://MASTER_ADDR:MASTER_PORT, which need not be set if all ranks are on one machine."""
    _, world_size, _, local_world_size = ranks
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if world_size == local_world_size else None)
    if host is None:
        raise LaunchError(
            "MASTER_ADDR is not set: expected the host name of rank 0; export MASTER_ADDR on all machines"
        )
    if "MASTER_PORT" in os.environ:
        port = read_number("MASTER_PORT", 1, 65535)
    elif port is None:  # Open MPI names its jobs; what has no name meets where torch's own default is
        job = zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode())
        return _url(host, PORTS[job % len(PORTS)]) + f"?job={job}" if job else _url(host, 29500)
    return _url(host, port)


def _url(host, port):
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"  # IPv6 has colons of its own


def _refuse_nesting(launcher):
    """Raise if the variables are meant for this process's parent: a launcher within a launcher."""
    env = os.environ
    if multiprocessing.parent_process() and launcher in ("srun", "mpirun"):  # each child would claim its parent's rank
        name = (SLURM if launcher == "srun" else OPEN_MPI if OPEN_MPI[0] in env else MPICH)[0]
        raise LaunchError(
            f"{name}={env.get(name)} is the rank of the process that spawned this one: {launcher} has started a script "
            f"that starts processes itself; expected one of the two: {_command(name)} without spawning"
        )
    if launcher == "torchrun" and _torchrun_keeps_the_store() and "SLURM_STEP_NUM_TASKS" in env:
        tasks, nodes = read_number("SLURM_STEP_NUM_TASKS", 1), read_number("SLURM_STEP_NUM_NODES", 1)
        if tasks > nodes:
            raise LaunchError(
                f"SLURM_STEP_NUM_TASKS={tasks}: srun has started {tasks} tasks with a torchrun on {nodes} "
                f"machine(s), expected one on each; srun --ntasks={nodes} --ntasks-per-node=1 torchrun ... "
                f"(in that shell, or to keep them apart: env -u SLURM_STEP_NUM_TASKS torchrun ...)"
            )
        if nodes > 1 and env.get("GROUP_WORLD_SIZE") == "1" and env["LOCAL_RANK"] == "0":
            log.warning("each of %d machines trains alone: for one run of all, torchrun --nnodes=%d", nodes, nodes)


def spawn_url(url, nodes=1, node_rank=0):
    """tcp://HOST:PORT for the ranks of a script that spawns its processes itself, once on each machine, to meet at.

    Args:
        url: where they should; for one machine it may be None.

    Raises:
        LaunchError: it is no such address, or torchrun, srun or mpirun have started more of the script.
    """
    if node_rank >= nodes:
        raise LaunchError(f"--node-rank {node_rank} of --nodes {nodes}: expected a node rank from 0 to {nodes - 1}")
    if url is None and nodes > 1:
        raise LaunchError(f"--nodes {nodes} without --dist-url: expected tcp://HOST:PORT, the machine of --node-rank 0")
    if all(name in os.environ for name in TORCHRUN[:3]):
        found = f"RANK={os.environ['RANK']}: torchrun has started a script that starts processes itself"
        raise LaunchError(f"{found}; python {_script()}")
    for name in (SLURM[1], OPEN_MPI[1], MPICH[1]):
        if name in os.environ and read_number(name) > nodes:
            found = (
                f"{name}={os.environ[name]}: {_launcher_of(name)} has started so many of a script that starts processes"
            )
            fix = f"srun --ntasks={nodes} --ntasks-per-node=1 python {_script()}"
            raise LaunchError(f"{found} itself, expected one on each of {nodes} machine(s); {fix}")

    url = url or f"tcp://127.0.0.1:{free_port()}"
    split_url(url)
    return url


def _refuse_more_a_machine(world_size):
    """Raise if RANK counts machines, and a machine is to run several processes, or has GPUs for them."""
    found = f"RANK={os.environ['RANK']} and WORLD_SIZE={world_size} without LOCAL_RANK"
    torchrun = "torchrun --nnodes={} --node-rank=$RANK --nproc-per-node={} --master-addr=$MASTER_ADDR "
    torchrun += f"--master-port=$MASTER_PORT {_script()}"
    each, gpus = os.environ.get("PET_NPROC_PER_NODE", ""), torch.cuda.device_count()
    if each.isdigit() and int(each) > 1:  # PyTorchJob's nprocPerNode
        raise LaunchError(
            f"{found} and with PET_NPROC_PER_NODE={each}: expected torchrun to start {each} processes on this machine; "
            f"{torchrun.format('$PET_NNODES', each)}"
        )
    if gpus > 1:
        raise LaunchError(
            f"{found} count machines, and this one has {gpus} GPUs: expected a process for each; "
            f"{torchrun.format('$WORLD_SIZE', gpus)}"
        )


def _torchrun_keeps_the_store():
    """Whether torchrun itself has started this process, and not somebody else who speaks its words."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _script():
    return os.path.basename(sys.argv[0]) or "train.py"


def _launcher_of(name):
    return {"SLURM": "srun", "OMPI": "mpirun", "PMI": "mpirun", "MPI": "mpirun"}.get(name.split("_")[0], "torchrun")


def _command(name):
    """The command that sets a variable as it should be."""
    if name == "MASTER_PORT":
        return "export MASTER_PORT=29500 on all machines, or unset it"
    launch = {"srun": "srun --ntasks=2 python", "mpirun": "mpirun -n 2 python"}
    return f"{launch.get(_launcher_of(name), 'torchrun --nproc-per-node=2')} {_script()}"


# The device and the cores of this process


def setup_device(local_rank, local_world_size):
    """The device of this process: a GPU of its own, made the current one, or its share of the CPU's cores.

    A process that sees a single GPU takes that one whatever its local rank: Slurm, for one, may bind one to each
    task. Should it be the same for all, rendezvous notices. Under torchrun, which has its own, only
    CUDA_VISIBLE_DEVICES can tell a GPU for each from one GPU for all. Threads are set to the share of cores unless
    OMP_NUM_THREADS says how many, which torchrun sets to 1.

    Raises:
        LaunchError: there are more processes on this machine than GPUs.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_process(local_world_size))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    bound = gpus == 1 and ("CUDA_VISIBLE_DEVICES" in os.environ or not _torchrun_keeps_the_store())
    if local_world_size > gpus and not bound:
        raise LaunchError(
            f"{local_world_size} processes on this machine, {gpus} GPU(s) with "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}: expected a GPU for each; "
            f"torchrun --nproc-per-node={gpus}, srun --ntasks-per-node={gpus}, or mpirun -n {gpus}"
        )
    device = torch.device("cuda", 0 if bound else local_rank)
    torch.cuda.set_device(device)  # before all else, or every process would also take memory on GPU 0
    return device


def cores_per_process(local_world_size):
    """The cores of this machine that each of its local processes may use."""
    cores = cpu_count()
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_CPUS_ON_NODE"} <= os.environ.keys():
        tasks, granted = _slurm_tasks_here(), read_number("SLURM_CPUS_ON_NODE", 1)
        if cores * tasks > granted:  # the tasks are not bound to cores of their own
            cores = min(cores, max(1, granted // tasks))
        local_world_size //= tasks  # what is left are processes within a task
    return max(1, cores // max(1, local_world_size))


def cpu_count():
    """The cores this process may run on: a Slurm task often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# Where ranks meet


def rendezvous(url, rank, world_size, timeout=TIMEOUT):
    """Meet the other ranks at a store that rank 0 keeps, and check that each is there, and there once.

    Args:
        url: tcp://HOST:PORT, the machine of rank 0 and a free port of it; or tcp://HOST:PORT?job=NAME, if the port
            is one that another job might have made too.
        timeout: datetime.timedelta, for ranks that do not come.

    Returns:
        The store, for dist.init_process_group.

    Raises:
        LaunchError: the address does not resolve, the port is taken, a rank or a GPU is there twice, a rank is not.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store = open_store(url, rank, world_size, timeout)

    # Who finds something wrong tells everybody, else the last to come does that all is well.
    store.add("came", 1)
    me, verdict = f"process {os.getpid()} on {socket.gethostname()}", None
    claims = [f"rank {rank}"]
    if torch.cuda.is_available():
        claims.append(f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
    for claim in claims:
        if store.add(f"claims to {claim}", 1) > 1:
            verdict = (
                f"{claim} is there twice, as {store.get(claim).decode()} and as {me}: expected each once; give every "
                f"machine a node rank of its own, every process a GPU, and start what spawns processes once a machine"
            )
        else:
            store.set(claim, me)
    if verdict or store.add("ranks", 1) == world_size:
        store.compare_set("verdict", "", verdict or "all here")
    verdict = verdict or _await_verdict(store, url, rank, world_size, deadline)
    if verdict != "all here":
        if rank == 0:  # its end is the store's, and others have yet to come and read the verdict there
            late = min(time.monotonic() + QUICK, deadline)
            while store.add("came", 0) < world_size and time.monotonic() < late:
                time.sleep(0.1)
            time.sleep(1)
        raise LaunchError(verdict)
    return store


def open_store(url, rank, world_size, timeout=TIMEOUT):
    """Keep the store of a job, as rank 0, or connect to it.

    Raises:
        LaunchError: the address does not resolve, the port is taken, another job's store is there, rank 0 is not.
    """
    host, port = split_url(url)
    deadline = time.monotonic() + timeout.total_seconds()
    if not 0 <= rank < world_size:
        raise LaunchError(f"rank {rank} of a world of {world_size}: expected a rank from 0 to {world_size - 1}")
    _resolve(host, port)
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
    job = f"{world_size} ranks" + "".join(f" of job {name}" for name in query.get("job", []))
    store = _listen(port, job) if rank == 0 else _connect(host, port, rank, job, deadline)
    store.set_timeout(timeout)
    return store


def split_url(url):
    """Host and port of tcp://HOST:PORT.

    Raises:
        LaunchError: it has another form.
    """
    with contextlib.suppress(ValueError):  # a port that is no number, or above 65535
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path:
            return parts.hostname, parts.port
    raise LaunchError(f"{url!r}: expected tcp://HOST:PORT, the machine of rank 0, as in tcp://10.0.0.1:29500")


def free_port():
    """A port of this machine that nobody listens on now."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            port = random.choice(PORTS)
            listener.bind(("", port))
            return port


def _resolve(host, port):
    """Look the address up, for a while: a name may become known a little later than this process starts."""
    deadline = time.monotonic() + QUICK

    def look():
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return socket.getaddrinfo(host, port)
            time.sleep(0.5)

    if not _within(QUICK, look):
        raise LaunchError(
            f"{host!r} does not resolve: expected the name or address of the machine of rank 0, "
            f"by export MASTER_ADDR=... or --dist-url"
        )


def _listen(port, job):
    """Keep the store: rank 0."""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"port {port} of this machine is taken, by another job, a left-over process (ss -ltnp) or a second rank 0: "
            f"expected a free one for rank 0; give all ranks another, by export MASTER_PORT={free_port()} or --dist-url"
        ) from None
    store.set("job", job)
    return store


def _connect(host, port, rank, job, deadline):
    """Reach rank 0's store, which may not be there yet."""
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=QUICK).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {rank} could not reach rank 0 at {host}:{port} ({error}): expected rank 0 on that machine, "
                    f"and no firewall; see whether it runs, and what MASTER_ADDR, MASTER_PORT or --dist-url say there"
                ) from None
            if time.monotonic() > patience:
                log.warning("rank %d waits for rank 0 at %s:%d (%s)", rank, host, port, error)
                patience = deadline
            time.sleep(0.2)

    def open_store():
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            return store, f"the store of {store.get('job').decode()}"
        except RuntimeError as error:
            return None, f"something that is no store ({' '.join(str(error).split())[:100]})"

    store, found = _within(QUICK, open_store) or (None, f"something that says nothing for {QUICK} s")
    if found != f"the store of {job}":
        raise LaunchError(
            f"{found} answers at {host}:{port}: expected the store of {job}; give all ranks another port, by export "
            f"MASTER_PORT=... or --dist-url, or end what has that one (ss -ltnp)"
        )
    return store


def _within(seconds, function):
    """What a function returns, or None if that takes longer: for calls that know no time limit of their own."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _await_verdict(store, url, rank, world_size, deadline):
    """What the store says once all ranks are there, or what rank 0 says when it has waited long enough."""
    patience = min(time.monotonic() + PATIENCE, deadline) if rank == 0 else deadline + QUICK
    shell = " (in a shell of srun --pty: srun --overlap starts them all)" if "SLURM_PTY_PORT" in os.environ else ""
    while True:
        try:
            store.wait(["verdict"], datetime.timedelta(seconds=max(0.1, patience - time.monotonic())))
            return store.get("verdict").decode()
        except RuntimeError:
            if rank > 0:
                return f"rank 0, which kept the store at {url}, has ended or is out of reach: its own message says why"
        missing = [str(other) for other in range(world_size) if not store.check([f"rank {other}"])]
        missing = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        if time.monotonic() < deadline:
            log.warning("rank 0 at %s waits for ranks %s of %d%s", url, missing, world_size, shell)
            patience = deadline
        else:
            found = f"ranks {missing} of {world_size} did not come to {url}: see on their machines whether they run"
            store.compare_set("verdict", "", found)
