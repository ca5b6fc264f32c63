"""Check machines, network and launch before the real job. Start it exactly as you will start that job:

    torchrun --nproc-per-node=2 launch/preflight.py
    srun --nodes=2 --ntasks-per-node=2 python launch/preflight.py
    mpirun -n 2 python launch/preflight.py
    python launch/preflight.py --json                # one JSON object, for programs

Rank 0 prints one line per rank, one verdict per check with the line to change, and the time of an
all_reduce. The exit code is 0 if no check failed, 1 if one did, 2 if the launch itself was refused.
A rank that does not answer is named after 10 s, or after 60 s with GPUs, whose first use takes
long. Of the environment, only VARIABLES are printed.
"""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import itertools
import json
import os
import platform
import shutil
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.distributed import (
    LaunchError,
    check_processes,
    find_address,
    find_launcher,
    open_store,
    original_environment,
    setup_device,
)
from common.errors import lost_peer, one_line_errors

ARRIVAL = 20  # seconds to connect to rank 0
# seconds without an answer, until a rank counts as missing
SILENCE = 60 if torch.cuda.is_available() else 10
PULSE = 0.5  # seconds between two signs of life
SIZES = (2**12, 2**16, 2**20, 2**24, 2**26)  # bytes of an all_reduce
LARGE = 2**29  # bytes, on GPUs: NVLink reaches its bandwidth only with large messages
RESNET50 = 25_557_032 * 4  # bytes of its float32 gradients; number of weights: torchvision
CLOCKS = 5  # seconds that clocks may differ; torchrun's rendezvous drops a machine after 15
SHARED_MEMORY = 2**30  # bytes; a few loader workers with batches of photographs need as much
# the driver lists its GPUs here, even if torch cannot use them
NVIDIA = Path("/proc/driver/nvidia/gpus")
VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_DEBUG",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


class Check(NamedTuple):
    """The verdict ("ok", "warn" or "FAIL") of a check, what was found, and the line that mends it."""

    name: str
    verdict: str
    found: str
    change: str = ""


# Facts: what each rank reports about itself


def facts(rank, world_size, local_rank, local_world_size, launcher):
    """Return the facts about this process and its machine, as a dict for JSON."""
    device, problem = torch.device("cpu"), None
    try:
        device = setup_device(local_rank, local_world_size or local_rank + 1)
    except LaunchError as error:
        problem = str(error)
    is_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_gpu else None
    backends = ("nccl", "gloo") if is_gpu else ("gloo",)  # 06 uses gloo beside NCCL
    return {
        "rank": rank, "world_size": world_size, "local_rank": local_rank, "launcher": launcher,
        "host": socket.gethostname(), "pid": os.getpid(), "problem": problem or (None if is_gpu else unusable_gpus()),
        "device": str(device), "device_name": properties.name if is_gpu else "cpu",
        "device_id": str(properties.uuid) if is_gpu else None, "gpus": torch.cuda.device_count(),
        "backend": backends[0], "addresses": {name: own_address(name) for name in backends},
        "interfaces": interfaces(), "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None, "code": code_hash(),
        "shared_memory": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "threads": torch.get_num_threads(), "cores": cores(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }  # fmt: skip


def unusable_gpus():
    """Return why torch cannot use the NVIDIA GPUs of this machine, or None if there are none or they are hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not NVIDIA.is_dir() or not any(NVIDIA.iterdir()):
        return None
    try:
        torch.cuda.init()
        reason = "it finds none"
    # a driver too old for this build of torch, a build for CPUs, ...
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].strip()
    return (
        f"torch cannot use the GPUs here: {reason}; see nvidia-smi, or export "
        "CUDA_VISIBLE_DEVICES= to use CPUs"
    )


def interfaces():
    """Return the network interfaces of this machine that have an IPv4 address, as {name: address}."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])
    return addresses


def own_address(backend):
    """Return the (interface, address) at which this backend lets other ranks connect to this process.

    gloo: GLOO_SOCKET_IFNAME, else the address to which this machine's name resolves, else loopback
    (torch's ProcessGroupGloo::createDefaultDevice). NCCL: NCCL_SOCKET_IFNAME, which lists prefixes
    of names, with = whole names, with ^ the names to leave out. Else its own order of prefixes: ib;
    anything but docker, lo and virbr; docker; lo; virbr (NCCL's ncclFindInterfaces). The address is
    None if there is no such interface.
    """
    wanted = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    addresses = interfaces()
    if backend == "nccl":
        for names in [wanted] if wanted else ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
            prefixes = tuple(names.lstrip("^=").split(","))
            for name, address in addresses.items():
                is_listed = name in prefixes if names.startswith("=") else name.startswith(prefixes)
                if is_listed != names.startswith("^"):
                    return name, address
        return wanted, None
    if wanted:
        return wanted, addresses.get(wanted.split(",")[0])
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, 0))
                return next(
                    (name for name, other in addresses.items() if other == address), "lo"
                ), address
    return "lo", "127.0.0.1"


def cores():
    """Return the numbers of the cores on which this process may run."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count()))
    )


def code_hash():
    """Return eight digits that differ if the Python files of a job differ."""
    digest = hashlib.sha256()
    folders = (ROOT, ROOT / "common", ROOT / "imagenet", ROOT / "launch")
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


# Checks: each takes the facts of all ranks and returns a Check


def check_ranks(all_facts, world_size):
    present = group(all_facts, "rank")
    if missing := [rank for rank in range(world_size) if rank not in present]:
        hosts = "; ".join(
            f"{host} has {span(ranks)}" for host, ranks in group(all_facts, "host").items()
        )
        found = f"{span(missing)} of {world_size} did not answer within {SILENCE} s ({hosts})"
        change = "on the machine that is not listed, check the command, MASTER_ADDR and MASTER_PORT"
        return Check("ranks", "FAIL", found, change)
    for rank, claims in present.items():
        if len(claims) > 1:
            who = " and ".join(
                f"process {fact['pid']} on {fact['host']}"
                for fact in all_facts
                if fact["rank"] == rank
            )
            change = (
                "give each machine its own node rank; around torchrun, srun and mpirun start one "
                "task per machine"
            )
            return Check("ranks", "FAIL", f"rank {rank} is claimed twice: {who}", change)
    return Check("ranks", "ok", f"{len(present)} of {world_size} answered")


def check_launch(all_facts):
    for key in ("world_size", "launcher"):
        if len(values := group(all_facts, key)) > 1:
            found = "; ".join(f"{key} {value} on {span(ranks)}" for value, ranks in values.items())
            return Check(
                "launch",
                "FAIL",
                found,
                "the same command and the same number of machines everywhere",
            )
    first = all_facts[0]
    return Check(
        "launch", "ok", f"started by {first['launcher']}, world size {first['world_size']}"
    )


def check_devices(all_facts):
    for fact in all_facts:
        if fact["problem"]:
            return Check(
                "devices", "FAIL", f"rank {fact['rank']} on {fact['host']}: {fact['problem']}"
            )
    for device, ranks in group(all_facts, "device_id").items():
        if device and len(ranks) > 1:
            hosts = ", ".join(
                sorted({fact["host"] for fact in all_facts if fact["device_id"] == device})
            )
            found = f"{span(ranks)} on {hosts} share one GPU ({device})"
            return Check("devices", "FAIL", found, "one process per GPU: torch.cuda.set_device(local_rank); "
                         "with srun, --gpus-per-node=N instead of --gpus-per-task=1")  # fmt: skip
    if len(backends := group(all_facts, "backend")) > 1:
        found = "; ".join(f"{backend} on {span(ranks)}" for backend, ranks in backends.items())
        return Check("devices", "FAIL", found, "GPUs for all ranks or for none: python -c 'import torch; "
                     "print(torch.cuda.is_available())' on each machine")  # fmt: skip
    for host, ranks in group(all_facts, "host").items():
        gpus = max(fact["gpus"] for fact in all_facts if fact["host"] == host)
        if gpus > len(ranks) and gpus > 1:
            found = f"{host} has {gpus} GPUs and {len(ranks)} rank(s)"
            return Check(
                "devices", "warn", found, f"--nproc-per-node={gpus}, or --ntasks-per-node={gpus}"
            )
    return Check(
        "devices", "ok", f"a {'GPU' if all_facts[0]['backend'] == 'nccl' else 'CPU'} for each rank"
    )


def check_addresses(all_facts, attempts):
    """A loopback address is wrong if other machines fail to connect to it. On one machine it is fine."""
    unreached = {(attempt.backend, attempt.target) for attempt in attempts if attempt.error}
    for fact in all_facts:
        usable = {
            name: address
            for name, address in fact["interfaces"].items()
            if not address.startswith("127.")
        }
        listed = ", ".join(f"{name} ({address})" for name, address in fact["interfaces"].items())
        for backend, (interface, address) in fact["addresses"].items():
            change = (
                f"export {backend.upper()}_SOCKET_IFNAME={next(iter(usable), '...')}  # on "
                f"{fact['host']}"
            )
            who = f"rank {fact['rank']} on {fact['host']}"
            if address is None:
                found = f"{who} has no interface {interface} with an address; it has {listed}"
                return Check("addresses", "FAIL", found, change)
            if (backend, fact["host"]) in unreached and address.startswith(("127.", "::1")):
                found = (
                    f"{who} listens at {address} ({interface}), which no other machine reaches; it "
                    f"has {listed}"
                )
                return Check("addresses", "FAIL", found, change)
    pairs = (
        f"{fact['host']} {address}"
        for fact in all_facts
        for _, address in fact["addresses"].values()
    )
    return Check("addresses", "ok", ", ".join(dict.fromkeys(pairs)))


def check_network(all_facts, attempts):
    """Check the connections between machines that the ranks attempted."""
    if failed := [attempt for attempt in attempts if attempt.error]:
        source, target, backend, address, error = failed[0]
        fact = next(fact for fact in all_facts if fact["host"] == target)
        interface = fact["addresses"][backend][0]
        others = [name for name in fact["interfaces"] if name not in ("lo", interface)]
        more = (
            f" (and {len(failed) - 1} more of {len(attempts)} connections)"
            if len(failed) > 1
            else ""
        )
        found = f"{source} cannot reach {target} at {address} ({interface}): {error}{more}"
        variable = f"{backend.upper()}_SOCKET_IFNAME={others[0] if others else '...'}"
        change = (
            f"export {variable}  # on {target}, or open the firewall between them for all ports"
        )
        return Check("network", "FAIL", found, change)
    hosts = group(all_facts, "host")
    if len({(attempt.source, attempt.target) for attempt in attempts}) < len(hosts) * (
        len(hosts) - 1
    ):
        return Check(
            "network", "warn", "not checked between all machines, because another check failed"
        )
    return Check(
        "network",
        "ok",
        f"each of {len(hosts)} machines reaches every other" if attempts else "one machine",
    )


def check_port(all_facts):
    port = int(all_facts[0]["variables"].get("MASTER_PORT", 0))
    with contextlib.suppress(OSError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        # torchrun picks a free one of these
        if first <= port <= last and all_facts[0]["launcher"] != "torchrun":
            found = (
                f"Linux may give MASTER_PORT={port} to another connection, as any port from "
                f"{first} to {last}"
            )
            return Check("port", "warn", found, "export MASTER_PORT=29500 on all machines")
    return Check("port", "ok", f"MASTER_PORT={port}" if port else "chosen by the launcher")


def check_versions(all_facts):
    for key in ("torch", "cuda", "nccl", "python"):
        if len(values := group(all_facts, key)) > 1:
            found = "; ".join(f"{key} {value} on {span(ranks)}" for value, ranks in values.items())
            machines = ", ".join(
                sorted({fact["host"] for fact in all_facts if fact[key] != all_facts[0][key]})
            )
            wanted = f"torch=={all_facts[0]['torch'].partition('+')[0]}"
            what = (
                f"Python {all_facts[0]['python']}" if key == "python" else f"pip install {wanted}"
            )
            return Check(
                "versions", "FAIL", found, f"the same on all machines: {what} on {machines}"
            )
    first = all_facts[0]
    return Check("versions", "ok", f"torch {first['torch']}, Python {first['python']} everywhere")


def check_code(all_facts):
    if len(values := group(all_facts, "code")) > 1:
        found = "; ".join(f"{value} on {span(ranks)}" for value, ranks in values.items())
        return Check(
            "code",
            "FAIL",
            f"the scripts differ: {found}",
            "git status; git rev-parse HEAD on each machine",
        )
    return Check("code", "ok", f"the same everywhere ({all_facts[0]['code']})")


def check_clocks(all_facts, clocks):
    """`clocks`: {rank: seconds ahead of rank 0}, as exact as a message is quick."""
    rank, ahead = max(clocks.items(), key=lambda item: abs(item[1]))
    if abs(ahead) > CLOCKS:
        host = next(fact["host"] for fact in all_facts if fact["rank"] == rank)
        found = (
            f"rank {rank} on {host} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
            "rank 0"
        )
        return Check("clocks", "FAIL", found, f"timedatectl set-ntp true  # on {host}")
    return Check("clocks", "ok", f"within {max(0.1, abs(ahead)):.1f} s")


def check_shared_memory(all_facts):
    for fact in all_facts:
        if fact["shared_memory"] is not None and fact["shared_memory"] < SHARED_MEMORY:
            free = fact["shared_memory"] // 2**20
            found = (
                f"{fact['host']} has {free} MiB free in /dev/shm, where loader workers put their "
                "batches"
            )
            change = (
                "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm; "
                "or --workers 0"
            )
            return Check("shared memory", "warn", found, change)
    least = min((fact["shared_memory"] or 0) for fact in all_facts)
    return Check(
        "shared memory",
        "ok",
        f"{least / 2**30:.1f} GiB or more" if least else "not used on this system",
    )


def check_threads(all_facts):
    for host, ranks in group(all_facts, "host").items():
        local = [fact for fact in all_facts if fact["host"] == host]
        # each rank may be bound to its own cores
        usable = len(set().union(*(fact["cores"] for fact in local)))
        threads, share = local[0]["threads"], max(1, usable // len(ranks))
        # beside a GPU, a CPU has little to do
        is_too_few = threads < share and local[0]["backend"] == "gloo"
        if threads > share or is_too_few:
            found = (
                f"{host}: {len(ranks)} rank(s) with {threads} thread(s) each on {usable} core(s)"
            )
            return Check("threads", "warn", found, f"export OMP_NUM_THREADS={share}")
    return Check("threads", "ok", f"{all_facts[0]['threads']} per rank")


def check_all_reduce(outcome, all_facts):
    hosts = {fact["rank"]: fact["host"] for fact in all_facts}

    def where(ranks):
        return "; ".join(
            f"rank {rank} on {hosts[rank]}, last at {outcome.stages[rank]}" for rank in ranks
        )

    if outcome.times:
        if len(hosts) == 1:
            return Check("all_reduce", "ok", "one rank, nothing to send")
        size, seconds = outcome.times[-1]
        milliseconds = 1000 * seconds * RESNET50 / size
        return Check(
            "all_reduce", "ok", f"the gradients of ResNet-50 (102 MB) take {milliseconds:.1f} ms"
        )
    if outcome.silent:
        change = (
            "read its own message, or dmesg there; py-spy dump --pid PID if the process still runs"
        )
        return Check("all_reduce", "FAIL", f"no sign of life: {where(outcome.silent)}", change)
    if outcome.error:
        found = lost_peer(outcome.error) or " ".join(str(outcome.error).split())[:300]
        change = "set NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, and start again"
        return Check("all_reduce", "FAIL", found, change)
    late = [rank for rank, stage in outcome.stages.items() if stage != "done"]
    found = f"no progress for {SILENCE} s: {where(late)}"
    return Check(
        "all_reduce", "FAIL", found, "NCCL_DEBUG=INFO; on one machine try NCCL_P2P_DISABLE=1"
    )


def group(all_facts, key):
    """Return {value of this key: ranks}."""
    groups = {}
    for fact in all_facts:
        groups.setdefault(fact[key], []).append(fact["rank"])
    return groups


def span(ranks):
    """Return "rank 3" for [3] and "ranks 0-2, 5" for [0, 1, 2, 5]."""
    parts = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"ranks {text}" if len(set(ranks)) > 1 else f"rank {text}"


# Messages between ranks go through the store, which works even if the network between two ranks
# does not


class Pulse(threading.Thread):
    """Write twice per second that this process lives, and what it is doing."""

    def __init__(self, store, rank):
        super().__init__(daemon=True)
        self.store, self.rank, self.stage, self.beats = store, rank, "start", itertools.count()
        self.start()

    def run(self):
        with contextlib.suppress(RuntimeError):  # rank 0 has exited, and the store with it
            while True:
                self.at(self.stage)
                time.sleep(PULSE)

    def at(self, stage):
        self.stage = stage
        self.store.set(f"pulse {self.rank}", f"{next(self.beats)} {stage}")


class Listener:
    """Listen where a backend will, and send this machine's name to every process that connects."""

    def __init__(self, host, address):
        self.name = f"{host} {os.getpid()}"
        self.socket = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self.socket.accept()
                with connection:
                    connection.sendall(self.name.encode())


class Attempt(NamedTuple):
    """A connection from one machine to another. `error` is None if it worked."""

    source: str
    target: str
    backend: str
    address: str
    error: str | None


def connect_to_all(listeners, source):
    """Connect from this machine to every other, all at once. `listeners`: {host: {backend: (address, port, name)}}."""
    attempts = []

    def attempt(target, backend, address, port, name):
        attempts.append(
            Attempt(source, target, backend, address, connection_error(address, port, name))
        )

    targets = [
        (host, *pair)
        for host, backends in listeners.items()
        if host != source
        for pair in backends.items()
    ]
    threads = [
        threading.Thread(target=attempt, args=(host, backend, *where))
        for host, backend, where in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(attempts)


def connection_error(address, port, name, seconds=4):
    """Connect to a Listener. Return what went wrong, or None."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            answer = connection.recv(300).decode(errors="replace")
    except OSError as error:
        return str(error)
    return None if answer == name else f"{answer or 'nobody'} answers there"


def collect(store, what, ranks, silence=SILENCE):
    """Return {rank: what it wrote} when all ranks have, or when none has for `silence` seconds."""
    answers, last = {}, time.monotonic()
    while len(answers) < len(ranks) and time.monotonic() - last < silence:
        for rank in ranks:
            if rank not in answers and store.check([f"{what} {rank}"]):
                answers[rank] = json.loads(store.get(f"{what} {rank}"))
                last = time.monotonic()
        time.sleep(0.05)
    return answers


def wait_for(store, key):
    """Return what rank 0 wrote, as soon as it has. LaunchError: rank 0 shows no sign of life."""
    pulse, last = None, time.monotonic()
    while not store.check([key]):
        if pulse != (pulse := store.get("pulse 0") if store.check(["pulse 0"]) else None):
            last = time.monotonic()
        if time.monotonic() - last > SILENCE:
            found = f"rank 0 has shown no sign of life for {SILENCE} s"
            raise LaunchError(found, "one", "see on its machine whether it runs")
        time.sleep(0.05)
    return json.loads(store.get(key))


# all_reduce


def measure(pulse, store, rank, world_size, device):
    """Join the process group and time all_reduce. Return [(bytes, seconds)], on every rank the same."""
    pulse.at("connecting")
    options = {
        "rank": rank,
        "world_size": world_size,
        "timeout": datetime.timedelta(seconds=3 * SILENCE),
    }
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own current device
        options["device_id"] = device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, **options)
    if device.type == "cuda":  # 06 uses gloo beside NCCL
        pulse.at("all_reduce by gloo")
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    times = []
    for size in SIZES + ((LARGE,) if device.type == "cuda" else ()):
        pulse.at(f"all_reduce of {text_of(size)}")
        tensor = torch.full([size // 4], rank + 1.0, device=device)
        seconds = time_all_reduce(tensor, 1)
        if not (tensor == world_size * (world_size + 1) / 2).all():
            raise RuntimeError(f"all_reduce of {text_of(size)} gave {tensor.unique().tolist()[:4]}")
        # half a second in all
        repeats = torch.tensor([min(20, max(1, int(0.5 / seconds)))], device=device)
        dist.broadcast(repeats, src=0)  # or the ranks would differ
        times.append((size, time_all_reduce(tensor, int(repeats))))
    pulse.at("done")
    return times


def time_all_reduce(tensor, repeats):
    """Return the seconds of one of `repeats` all_reduce calls, until all are done on this device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return (time.perf_counter() - start) / repeats


class Outcome(NamedTuple):
    """The outcome of measure(): its times or its error, and what each rank was doing."""

    times: list | None
    error: Exception | None
    stages: dict  # {rank: its last stage}
    silent: list  # ranks without a sign of life


def watch(store, world_size, work):
    """Run work() of rank 0 in a thread, and watch meanwhile that every rank lives and makes progress."""
    times, errors = [], []

    def run():
        try:
            times.append(work())
        except Exception as error:  # any error belongs in the report
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    pulses, heard, progress = {}, {}, time.monotonic()

    def look():
        nonlocal progress
        time.sleep(PULSE)
        for rank in range(world_size):
            before, pulses[rank] = (
                pulses.get(rank),
                store.get(f"pulse {rank}").decode().split(" ", 1),
            )
            if before != pulses[rank]:
                heard[rank] = time.monotonic()
            if before is None or before[1] != pulses[rank][1]:
                progress = time.monotonic()

    while thread.is_alive() and time.monotonic() - progress < SILENCE:
        look()
    end = time.monotonic()
    # listen a while longer, to learn which ranks are silent
    while not times and time.monotonic() - end < 8 * PULSE:
        look()
    stages = {rank: stage for rank, (_, stage) in pulses.items()}
    silent = [] if times else [rank for rank, when in heard.items() if when < end]
    return Outcome(times[0] if times else None, errors[0] if errors else None, stages, silent)


def text_of(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def bandwidth(size, seconds, world_size):
    """Return the bus bandwidth in bytes per second: that of the slowest link, comparable for any number of ranks.

    In an all_reduce of n ranks, each sends 2 (n - 1) / n bytes per byte (nccl-tests,
    PERFORMANCE.md).
    """
    return size / seconds * 2 * (world_size - 1) / world_size


# The report


def show(all_facts, clocks, checks, times):
    """Return the report as text."""
    rows = [
        ("rank", "host", "pid", "device", "listens at", "torch", "NCCL", "code", "clock", "threads")
    ]
    for fact in sorted(all_facts, key=lambda fact: fact["rank"]):
        clock = f"{clocks[fact['rank']]:+.1f} s" if fact["rank"] in clocks else ""
        device = fact["device"] + (f" ({fact['device_name']})" if fact["device"] != "cpu" else "")
        addresses = (
            f"{address or 'nothing'} ({name})" for name, address in fact["addresses"].values()
        )
        listens = ", ".join(dict.fromkeys(addresses))
        rows.append((fact["rank"], fact["host"], fact["pid"], device, listens,
                     fact["torch"], fact["nccl"] or "", fact["code"], clock, fact["threads"]))  # fmt: skip
    lines = [*columns(rows), ""]
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name:13}  {check.found}")
        if check.change:
            lines.append(f"{'':6}change this:   {check.change}")
    if times:
        n = len(all_facts)
        speeds = [
            (text_of(b), f"{1000 * s:.2f} ms", f"{bandwidth(b, s, n) / 1e9:.2f} GB/s")
            for b, s in times
        ]
        lines += ["", *columns([("all_reduce", "time", "bus bandwidth"), *speeds])]
    failed, warned = (
        sum(check.verdict == verdict for check in checks) for verdict in ("FAIL", "warn")
    )
    lines += ["", f"preflight: {failed} of {len(checks)} checks failed, {warned} with a warning"]
    return "\n".join(lines)


def columns(rows):
    """Return rows of cells as lines; each column is as wide as its widest cell."""
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def as_json(all_facts, clocks, checks, times):
    """Return the report as JSON."""
    speeds = [{"bytes": size, "seconds": seconds, "bus_bandwidth": bandwidth(size, seconds, len(all_facts))}
              for size, seconds in times or []]  # fmt: skip
    return json.dumps(
        {
            "ranks": all_facts,
            "clocks": clocks,
            "checks": [check._asdict() for check in checks],
            "all_reduce": speeds,
        }
    )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    # from torch.distributed.launch
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.json:  # standard output is for the report alone: gloo of torch 2.9 writes there too
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    environment = original_environment()
    launcher, ranks = find_launcher(environment)
    check_processes(launcher, environment)
    rank, world_size, local_rank, local_world_size = ranks
    address = find_address(launcher, ranks, environment)
    store, connect = open_stores(address, rank, world_size)
    pulse = Pulse(connect(), rank)

    me = facts(rank, world_size, local_rank, local_world_size, launcher)
    me["listeners"], listeners = {}, []
    for backend, (_, own) in me["addresses"].items():
        if local_rank == 0 and own:
            listeners.append(Listener(me["host"], own))
            me["listeners"][backend] = [own, listeners[-1].port, listeners[-1].name]
    is_second = store.add(f"claims to rank {rank}", 1) > 1
    store.set(f"second {rank}" if is_second else f"facts {rank}", json.dumps(me))

    def work():
        return measure(pulse, connect(), rank, world_size, torch.device(me["device"]))

    if rank == 0 and not is_second:
        code = lead(store, me, world_size, work, args)
    else:
        follow(store, me, is_second, work, pulse)
        code = 0  # only rank 0 fails, or the launcher could end it before it has reported
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads, nor for a collective that may never end


def open_stores(address, rank, world_size):
    """Return the store, and a function that opens another connection to it: each thread needs its own."""
    if world_size == 1:
        store = dist.HashStore()
        return store, lambda: store
    if address:
        host, port = address.host, address.port
        store = open_store(address, rank, world_size, datetime.timedelta(seconds=ARRIVAL))
    else:  # torchrun's store, which outlives restarts
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"preflight {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def connect():
        return dist.PrefixStore(
            prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        )

    return (dist.PrefixStore(prefix, store) if address else connect()), connect


def lead(store, me, world_size, work, args):
    """Collect the facts as rank 0, check them, measure if nothing failed, and report. Return the exit code."""
    answers = collect(store, "facts", range(world_size))
    twice = [rank for rank in answers if store.add(f"claims to rank {rank}", 0) > 1]
    all_facts = [*answers.values(), *collect(store, "second", twice).values()]
    listeners = {fact["host"]: fact["listeners"] for fact in answers.values() if fact["listeners"]}
    store.set("listeners", json.dumps(listeners))
    try_network(store, me, listeners)
    tried = collect(store, "tried", list(answers))
    clocks = {rank: tried[rank]["clock"] - tried[0]["clock"] for rank in tried}
    attempts = [Attempt(*attempt) for rank in tried for attempt in tried[rank]["attempts"]]

    checks = [check_ranks(all_facts, world_size), check_launch(all_facts), check_devices(all_facts)]
    checks += [check_addresses(all_facts, attempts), check_network(all_facts, attempts)]
    can_measure = all(check.verdict != "FAIL" for check in checks) and len(tried) == world_size
    checks += [
        check_port(all_facts),
        check_versions(all_facts),
        check_code(all_facts),
        check_clocks(all_facts, clocks),
    ]
    checks += [check_shared_memory(all_facts), check_threads(all_facts)]
    store.set("plan", json.dumps("measure" if can_measure else "stop"))
    times = None
    if can_measure:
        outcome = watch(store, world_size, work)
        times = outcome.times if world_size > 1 else None
        checks.append(check_all_reduce(outcome, all_facts))
    else:
        checks.append(Check("all_reduce", "warn", "not measured, because a check above failed"))
    print((as_json if args.json else show)(all_facts, clocks, checks, times), flush=True)
    store.set("end", json.dumps(True))
    # The store ends with this process: the others read "end" first.
    collect(store, "end", [rank for rank in answers if rank > 0], silence=2)
    return int(any(check.verdict == "FAIL" for check in checks))


def follow(store, me, is_second, work, pulse):
    """Do, as any other rank, what rank 0 says."""
    if not is_second:
        try_network(store, me, wait_for(store, "listeners"))
        if wait_for(store, "plan") == "measure":
            try:
                work()
            except Exception as error:  # rank 0 reads it in the last stage
                pulse.at(f"{pulse.stage}: {lost_peer(error) or ' '.join(str(error).split())[:200]}")
    wait_for(store, "end")
    store.set(f"end {me['rank']}", json.dumps(True))


def try_network(store, me, listeners):
    """Report the time, on all ranks at the same moment, and the connections from this machine to the others."""
    now = clock()
    attempts = connect_to_all(listeners, me["host"]) if me["listeners"] else []
    store.set(f"tried {me['rank']}", json.dumps({"clock": now, "attempts": attempts}))


def clock():
    return time.time()


if __name__ == "__main__":
    with one_line_errors():
        main()
