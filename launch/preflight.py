"""Check machines, network and launch before the real job. Start it just as that will be started:

    torchrun --nproc-per-node=2 launch/preflight.py
    srun --nodes=2 --ntasks-per-node=2 python launch/preflight.py
    mpirun -n 2 python launch/preflight.py
    python launch/preflight.py --json                # one object for programs to read

Rank 0 prints a line for each rank, a verdict for each check with the line to change, and how long all_reduce takes.
The exit code is 0 if nothing failed, 1 if something did, 2 if the launch itself was refused. A rank that is silent for
QUIET seconds is named; nothing is waited for longer. Of the environment, only VARIABLES are shown.
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

from common.distributed import LaunchError, find_launcher, open_store, setup_device
from common.errors import lost_peer, one_line_errors

ARRIVAL = 20  # seconds for rank 0 to be there, since it may have more to load
QUIET = 10  # seconds without a word from a rank: then it counts as dead
PULSE = 0.5  # seconds between two signs of life
SIZES = (2**12, 2**16, 2**20, 2**24, 2**26)  # bytes, for all_reduce
RESNET50 = 25_557_032 * 4  # bytes of its gradients in float32, by torchvision's count of its weights
CLOCKS = 5  # seconds that clocks may differ: torchrun's rendezvous gives up a machine at 15
SHARED_MEMORY = 2**30  # bytes: what a few loader workers with batches of photographs take
VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_DEBUG",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


class Check(NamedTuple):
    """name: of what; verdict: "ok", "warn" or "FAIL"; found: a sentence; change: the line that mends it."""

    name: str
    verdict: str
    found: str
    change: str = ""


# What a rank says of itself


def facts(rank, world_size, local_rank, local_world_size, launcher):
    """This process and its machine, as a dict that JSON can hold."""
    device, problem = torch.device("cpu"), None
    try:
        device = setup_device(local_rank, local_world_size or local_rank + 1)
    except LaunchError as error:
        problem = str(error)
    backend = "nccl" if device.type == "cuda" else "gloo"
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    interface, address = own_address(backend)
    return {
        "rank": rank, "world_size": world_size, "local_rank": local_rank, "launcher": launcher,
        "host": socket.gethostname(), "pid": os.getpid(), "problem": problem,
        "device": str(device), "device_name": properties.name if properties else "cpu",
        "device_id": str(properties.uuid) if properties else None, "gpus": torch.cuda.device_count(),
        "backend": backend, "interface": interface, "address": address, "interfaces": interfaces(),
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda if properties else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if properties else None, "code": code_hash(),
        "shared_memory": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "threads": torch.get_num_threads(), "cores": cores(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }  # fmt: skip


def interfaces():
    """The network interfaces of this machine with an IPv4 address: {name: address}."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])  # SIOCGIFADDR
    return found


def own_address(backend):
    """Where the backend will let other ranks connect to this one: (interface, address), None for what is not there.

    gloo takes GLOO_SOCKET_IFNAME, else the address that this machine's own name resolves to, else loopback
    (torch's ProcessGroupGloo::createDefaultDevice). NCCL takes NCCL_SOCKET_IFNAME, a list of prefixes, else what is
    neither loopback nor Docker's (NCCL's documentation of that variable).
    """
    here = interfaces()
    wanted = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    if backend == "nccl":
        exclude, exact = (wanted or "").startswith("^"), (wanted or "").startswith("=")
        names = (wanted or "^lo,docker").lstrip("^=").split(",")
        for name, address in here.items():
            matches = name in names if exact else name.startswith(tuple(names))
            if matches != (exclude or not wanted):
                return name, address
        return (wanted, None) if wanted else ("lo", "127.0.0.1")
    if wanted:
        return wanted, here.get(wanted.split(",")[0])
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, 0))
                return next((name for name, other in here.items() if other == address), "lo"), address
    return "lo", "127.0.0.1"


def cores():
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))


def code_hash():
    """Eight digits for the Python files that a job is made of: other code, other digits."""
    digest = hashlib.sha256()
    folders = (ROOT, ROOT / "common", ROOT / "imagenet", ROOT / "launch")
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


# Verdicts. Each check takes what all ranks have said and returns a Check.


def check_devices(all_facts):
    for fact in all_facts:
        if fact["problem"]:
            return Check("devices", "FAIL", f"rank {fact['rank']} on {fact['host']}: {fact['problem']}")
    for device, ranks in group(all_facts, "device_id").items():
        if device and len(ranks) > 1:
            hosts = ", ".join(sorted({fact["host"] for fact in all_facts if fact["device_id"] == device}))
            found = f"{span(ranks)} on {hosts} share one GPU ({device})"
            return Check("devices", "FAIL", found, "one process a GPU: torch.cuda.set_device(local_rank); "
                         "with srun --gpus-per-node=N instead of --gpus-per-task=1")  # fmt: skip
    if len(kinds := group(all_facts, "backend")) > 1:
        found = "; ".join(f"{span(ranks)} use {backend}" for backend, ranks in kinds.items())
        return Check("devices", "FAIL", found, "GPUs for all ranks or for none: python -c 'import torch; "
                     "print(torch.cuda.is_available())' on each machine")  # fmt: skip
    for host, ranks in group(all_facts, "host").items():
        gpus = max(fact["gpus"] for fact in all_facts if fact["host"] == host)
        if gpus > len(ranks) and gpus > 1:
            found = f"{host} has {gpus} GPUs and {len(ranks)} rank(s)"
            return Check("devices", "warn", found, f"--nproc-per-node={gpus}, or --ntasks-per-node={gpus}")
    return Check("devices", "ok", "a CPU for all" if all_facts[0]["backend"] == "gloo" else "a GPU for each rank")


def check_launch(all_facts):
    for key in ("world_size", "launcher"):
        if len(values := group(all_facts, key)) > 1:
            found = "; ".join(f"{key} {value} on {span(ranks)}" for value, ranks in values.items())
            return Check("launch", "FAIL", found, "the same command and the same number of machines everywhere")
    first = all_facts[0]
    return Check("launch", "ok", f"started by {first['launcher']}, a world of {first['world_size']}")


def check_versions(all_facts):
    for key in ("torch", "cuda", "nccl", "python"):
        if len(values := group(all_facts, key)) > 1:
            found = "; ".join(f"{key} {value} on {span(ranks)}" for value, ranks in values.items())
            machines = ", ".join(sorted({fact["host"] for fact in all_facts if fact[key] != all_facts[0][key]}))
            what = f"pip install torch=={all_facts[0]['torch'].partition('+')[0]}" if key != "python" else "one Python"
            return Check("versions", "FAIL", found, f"the same on all machines: {what} on {machines}")
    first = all_facts[0]
    return Check("versions", "ok", f"torch {first['torch']}, Python {first['python']}, the same everywhere")


def check_code(all_facts):
    if len(values := group(all_facts, "code")) > 1:
        found = "; ".join(f"{value} on {span(ranks)}" for value, ranks in values.items())
        return Check("code", "FAIL", f"the scripts differ: {found}", "git status; git rev-parse HEAD on each machine")
    return Check("code", "ok", f"the same everywhere ({all_facts[0]['code']})")


def check_addresses(all_facts, tried):
    """A loopback address is wrong if it has not led to its machine; machines that share a network may well use it."""
    unreached = {there for _, there, _, error in tried if error}
    for fact in all_facts:
        variable = f"{fact['backend'].upper()}_SOCKET_IFNAME"
        usable = {name: address for name, address in fact["interfaces"].items() if not address.startswith("127.")}
        there = ", ".join(f"{name} ({address})" for name, address in fact["interfaces"].items())
        change = f"export {variable}={next(iter(usable), '...')}  # on {fact['host']}"
        who = f"rank {fact['rank']} on {fact['host']}"
        if fact["address"] is None:
            found = f"{who} has no interface {fact['interface']} with an address, but {there}"
            return Check("addresses", "FAIL", found, change)
        if fact["host"] in unreached and fact["address"].startswith(("127.", "::1")):
            found = f"{who} would be reached at {fact['address']} ({fact['interface']}), which is every machine's own; "
            return Check("addresses", "FAIL", f"{found}it has {there}", change)
    return Check("addresses", "ok", ", ".join(dict.fromkeys(f"{f['host']} {f['address']}" for f in all_facts)))


def check_network(all_facts, tried):
    """tried: for each connection between two machines (from, to, address, error or None)."""
    if failed := [attempt for attempt in tried if attempt[3]]:
        here, there, address, error = failed[0]
        fact = next(fact for fact in all_facts if fact["host"] == there)
        others = [name for name in fact["interfaces"] if name not in ("lo", fact["interface"])]
        more = f" (and {len(failed) - 1} more of {len(tried)} connections)" if len(failed) > 1 else ""
        found = f"{here} cannot reach {there} at {address} ({fact['interface']}): {error}{more}"
        variable = f"{fact['backend'].upper()}_SOCKET_IFNAME={others[0] if others else '...'}"
        change = f"export {variable}  # on {there}, or open the firewall between them for all ports"
        return Check("network", "FAIL", found, change)
    hosts = group(all_facts, "host")
    if len(tried) < len(hosts) * (len(hosts) - 1):
        return Check("network", "warn", "not tried from and to every machine, because of what else failed")
    return Check("network", "ok", f"each of {len(hosts)} machines reaches every other" if tried else "one machine")


def check_port(all_facts):
    port = int(all_facts[0]["variables"].get("MASTER_PORT", 0))
    with contextlib.suppress(OSError):
        least, most = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        if least <= port <= most and all_facts[0]["launcher"] != "torchrun":  # which picks a free one of these itself
            found = f"MASTER_PORT={port} may be taken any time: Linux hands out {least} to {most} to other connections"
            return Check("port", "warn", found, "export MASTER_PORT=29500 on all machines")
    return Check("port", "ok", f"MASTER_PORT={port}" if port else "found by the launcher's job")


def check_clocks(all_facts, clocks):
    """clocks: {rank: seconds ahead of rank 0}, each as exact as a message is quick."""
    rank, ahead = max(clocks.items(), key=lambda item: abs(item[1]))
    if abs(ahead) > CLOCKS:
        host = next(fact["host"] for fact in all_facts if fact["rank"] == rank)
        found = f"rank {rank} on {host} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} rank 0"
        return Check("clocks", "FAIL", found, f"timedatectl set-ntp true  # on {host}; then see timedatectl")
    return Check("clocks", "ok", f"within {max(0.1, abs(ahead)):.1f} s")


def check_shared_memory(all_facts):
    for fact in all_facts:
        if fact["shared_memory"] is not None and fact["shared_memory"] < SHARED_MEMORY:
            free = fact["shared_memory"] // 2**20
            found = f"{fact['host']} has {free} MiB free in /dev/shm, where loader workers put their batches"
            change = "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm; or --workers 0"
            return Check("shared memory", "warn", found, change)
    least = min((fact["shared_memory"] or 0) for fact in all_facts)
    return Check("shared memory", "ok", f"{least / 2**30:.1f} GiB or more" if least else "not used on this system")


def check_threads(all_facts):
    for host, ranks in group(all_facts, "host").items():
        here = [fact for fact in all_facts if fact["host"] == host]
        free = len(set().union(*(fact["cores"] for fact in here)))  # ranks may be bound to cores of their own
        each, fair = here[0]["threads"], max(1, free // len(ranks))
        if each > fair or (each < fair and here[0]["backend"] == "gloo"):  # with a GPU the CPU has little to do
            found = f"{host}: {len(ranks)} rank(s) with {each} thread(s) each on {free} core(s)"
            return Check("threads", "warn", found, f"export OMP_NUM_THREADS={fair}")
    return Check("threads", "ok", f"{all_facts[0]['threads']} a rank")


def check_ranks(all_facts, world_size):
    """Whether each rank is there, and once."""
    present = group(all_facts, "rank")
    if missing := [rank for rank in range(world_size) if rank not in present]:
        hosts = "; ".join(f"{host} has {span(ranks)}" for host, ranks in group(all_facts, "host").items())
        found = f"{span(missing)} of {world_size} did not answer within {QUIET} s ({hosts})"
        change = "on the machine that is not listed see whether the command runs, and MASTER_ADDR and MASTER_PORT"
        return Check("ranks", "FAIL", found, change)
    for rank, same in present.items():
        if len(same) > 1:
            who = " and ".join(f"process {fact['pid']} on {fact['host']}" for fact in all_facts if fact["rank"] == rank)
            change = "a node rank of its own for each machine; srun or mpirun around torchrun: one task a machine"
            return Check("ranks", "FAIL", f"rank {rank} is claimed twice: {who}", change)
    return Check("ranks", "ok", f"{len(present)} of {world_size} have answered")


def group(all_facts, key):
    """{value of this key: ranks}"""
    groups = {}
    for fact in all_facts:
        groups.setdefault(fact[key], []).append(fact["rank"])
    return groups


def span(ranks):
    """rank 3 for [3], ranks 0-2, 5 for [0, 1, 2, 5]."""
    parts = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"ranks {text}" if len(set(ranks)) > 1 else f"rank {text}"


# Talking to each other. All of it goes through the store, which answers whatever the network between ranks is like.


class Pulse(threading.Thread):
    """Says twice a second that this process lives, and at once where it is in its work."""

    def __init__(self, store, rank):
        super().__init__(daemon=True)
        self.store, self.rank, self.stage, self.beats = store, rank, "start", itertools.count()
        self.start()

    def run(self):
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and its store with it
            while True:
                self.at(self.stage)
                time.sleep(PULSE)

    def at(self, stage):
        self.stage = stage
        self.store.set(f"pulse {self.rank}", f"{next(self.beats)} {stage}")


class Listener:
    """Each machine's first rank listens where its backend will, and says who it is to those that connect."""

    def __init__(self, host, address):
        self.name = f"{host} {os.getpid()}"
        self.socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self.socket.accept()
                with connection:
                    connection.sendall(self.name.encode())


def reach(address, port, name, seconds=4):
    """Connect to another machine's listener; returns what went wrong, or None."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            answer = connection.recv(300).decode(errors="replace")
    except OSError as error:
        return str(error)
    return None if answer == name else f"{answer or 'nobody'} answers there"


def reach_all(listeners, own):
    """Connect from this machine to every other, all at a time; listeners: {host: (address, port, name)}."""
    tried = []

    def attempt(host, address, port, name):
        tried.append((own, host, address, reach(address, port, name)))

    threads = [threading.Thread(target=attempt, args=(h, *where)) for h, where in listeners.items() if h != own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(tried)


def collect(store, what, ranks, quiet=QUIET):
    """What ranks have written under f"{what} RANK", until all have or none has for so long: {rank: value}."""
    found, last = {}, time.monotonic()
    while len(found) < len(ranks) and time.monotonic() - last < quiet:
        for rank in ranks:
            if rank not in found and store.check([f"{what} {rank}"]):
                found[rank] = json.loads(store.get(f"{what} {rank}"))
                last = time.monotonic()
        time.sleep(0.05)
    return found


def wait_for(store, key):
    """The value of a key that rank 0 will write, as long as rank 0 lives."""
    pulse, last = None, time.monotonic()
    while not store.check([key]):
        if pulse != (pulse := store.get("pulse 0") if store.check(["pulse 0"]) else None):
            last = time.monotonic()
        if time.monotonic() - last > QUIET:
            raise LaunchError(f"rank 0 has said nothing for {QUIET} s: see on its machine whether it runs")
        time.sleep(0.05)
    return json.loads(store.get(key))


# all_reduce


def measure(pulse, store, rank, world_size, backend, device):
    """Join the process group and time all_reduce by size: [(bytes, seconds)], on every rank alike."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread has its own
    pulse.at("connecting")
    options = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=3 * QUIET), **options
    )
    times = []
    for size in SIZES:
        pulse.at(f"all_reduce of {text_of(size)}")
        tensor = torch.full([size // 4], rank + 1.0, device=device)
        seconds = time_all_reduce(tensor)
        if not (tensor == world_size * (world_size + 1) / 2).all():
            raise RuntimeError(f"all_reduce of {text_of(size)} gave {tensor.unique().tolist()[:4]}")
        # As many as fit into half a second, and as many on each rank.
        repeats = torch.tensor([min(20, max(1, int(0.5 / seconds)))], device=device)
        dist.broadcast(repeats, src=0)
        total = sum(time_all_reduce(tensor.fill_(1.0)) for _ in range(int(repeats)))
        times.append((size, total / int(repeats)))
    pulse.at("done")
    return times


def time_all_reduce(tensor):
    """Seconds of one all_reduce, to its end on this device."""
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


class Outcome(NamedTuple):
    """What became of the measurement: its times, or the error that ended it, and where each rank was by then."""

    times: list | None
    error: Exception | None
    stages: dict  # {rank: what it was doing}
    silent: list  # ranks that show no sign of life


def watch(store, world_size, work):
    """Do the work of rank 0 in a thread and see meanwhile that every rank lives and moves on."""
    times, errors = [], []

    def run():
        try:
            times.append(work())
        except Exception as error:  # whatever it is, the report says so
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    pulses, heard, moved = {}, {}, time.monotonic()

    def look():
        nonlocal moved
        time.sleep(PULSE)
        for rank in range(world_size):
            before, pulses[rank] = pulses.get(rank), store.get(f"pulse {rank}").decode().split(" ", 1)
            if before != pulses[rank]:
                heard[rank] = time.monotonic()
            if before is None or before[1] != pulses[rank][1]:
                moved = time.monotonic()

    while thread.is_alive() and time.monotonic() - moved < QUIET:
        look()
    end = time.monotonic()
    while not times and time.monotonic() - end < 8 * PULSE:  # who is silent shows after a while
        look()
    stages = {rank: stage for rank, (_, stage) in pulses.items()}
    silent = [] if times else [rank for rank, when in heard.items() if when < end]
    return Outcome(times[0] if times else None, errors[0] if errors else None, stages, silent)


def text_of(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def check_all_reduce(outcome, all_facts):
    hosts = {fact["rank"]: fact["host"] for fact in all_facts}

    def where(ranks):
        return "; ".join(f"rank {rank} on {hosts[rank]}, last at {outcome.stages[rank]}" for rank in ranks)

    if len(hosts) == 1:
        return Check("all_reduce", "ok", "one rank, which has nothing to send")
    if outcome.times:
        seconds = RESNET50 / bandwidth(*outcome.times[-1], len(hosts)) * bus_share(len(hosts))
        return Check("all_reduce", "ok", f"the gradients of ResNet-50 (102 MB) would take {seconds:.3f} s a step")
    if outcome.silent:
        change = "its own message, or dmesg there; py-spy dump --pid PID if the process is still there"
        return Check("all_reduce", "FAIL", f"no sign of life: {where(outcome.silent)}", change)
    if outcome.error:
        found = lost_peer(outcome.error) or " ".join(str(outcome.error).split())[:300]
        return Check(
            "all_reduce", "FAIL", found, "once more with NCCL_DEBUG=INFO, or for gloo with TORCH_CPP_LOG_LEVEL=INFO"
        )
    late = [rank for rank, stage in outcome.stages.items() if stage != "done"]
    found = f"nothing moved for {QUIET} s: {where(late)}"
    return Check("all_reduce", "FAIL", found, "NCCL_DEBUG=INFO; on one machine NCCL_P2P_DISABLE=1 as a test")


def bus_share(world_size):
    """What each rank sends of a byte that is reduced: 2 (n - 1) / n, as in nccl-tests' doc/PERFORMANCE.md."""
    return 2 * (world_size - 1) / world_size


def bandwidth(size, seconds, world_size):
    """Bus bandwidth in bytes a second: what the slowest link carries, so comparable for any number of ranks."""
    return size / seconds * bus_share(world_size)


# The report


def show(all_facts, clocks, checks, times):
    """The report as text."""
    rows = [("rank", "host", "pid", "device", "reached at", "torch", "NCCL", "code", "clock", "threads")]
    for fact in sorted(all_facts, key=lambda fact: fact["rank"]):
        clock = f"{clocks[fact['rank']]:+.1f} s" if fact["rank"] in clocks else ""
        device = fact["device"] + (f" ({fact['device_name']})" if fact["device"] != "cpu" else "")
        reached = f"{fact['address'] or 'nothing'} ({fact['interface']})"
        rows.append((fact["rank"], fact["host"], fact["pid"], device, reached,
                     fact["torch"], fact["nccl"] or "", fact["code"], clock, fact["threads"]))  # fmt: skip
    lines = columns(rows)
    lines.append("")
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name:13}  {check.found}")
        if check.change:
            lines.append(f"{'':6}change this:   {check.change}")
    if times:
        head = ("all_reduce", "time", "bus bandwidth")
        n = len(all_facts)
        speeds = [(text_of(b), f"{1000 * s:.2f} ms", f"{bandwidth(b, s, n) / 1e9:.2f} GB/s") for b, s in times]
        lines += ["", *columns([head, *speeds])]
    failed, warned = (sum(check.verdict == verdict for check in checks) for verdict in ("FAIL", "warn"))
    lines += ["", f"preflight: {failed} of {len(checks)} checks failed, {warned} with a warning"]
    return "\n".join(lines)


def columns(rows):
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(all_facts, clocks, checks, times):
    """The report for programs."""
    speeds = [{"bytes": size, "seconds": seconds, "bus_bandwidth": bandwidth(size, seconds, len(all_facts))}
              for size, seconds in times or []]  # fmt: skip
    return json.dumps(
        {"ranks": all_facts, "clocks": clocks, "checks": [check._asdict() for check in checks], "all_reduce": speeds}
    )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args()


def main():
    args = parse_args()
    launcher, rank, world_size, local_rank, local_world_size, address = find_launcher()
    store, connect = open_stores(address, rank, world_size)
    pulse = Pulse(connect(), rank)

    me = facts(rank, world_size, local_rank, local_world_size, launcher)
    listener = Listener(me["host"], me["address"]) if local_rank == 0 and me["address"] else None
    me["listener"] = [me["address"], listener.port, listener.name] if listener else None
    again = store.add(f"claims to rank {rank}", 1) > 1
    store.set(f"again {rank}" if again else f"facts {rank}", json.dumps(me))

    def work():
        return measure(pulse, connect(), rank, world_size, me["backend"], torch.device(me["device"]))

    leads = rank == 0 and not again
    code = lead(store, me, world_size, work, args) if leads else follow(store, me, again, work, pulse)
    sys.stdout.flush()
    os._exit(code)  # threads, and perhaps a collective that will never end, are left behind


def open_stores(address, rank, world_size):
    """The store, and a function that connects to it once more: one connection serves one thread, and may wait."""
    if world_size == 1:
        store = dist.HashStore()
        return store, lambda: store
    if address:
        host, port, _ = address
        store = open_store(address, rank, world_size, datetime.timedelta(seconds=ARRIVAL))
    else:  # torchrun's, which outlives restarts
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"preflight {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def connect():
        return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))

    return (dist.PrefixStore(prefix, store) if address else connect()), connect


def lead(store, me, world_size, work, args):
    """Rank 0: hear everybody, judge, measure if that makes sense, report. Returns the exit code."""
    told = collect(store, "facts", range(world_size))
    twice = [rank for rank in told if store.add(f"claims to rank {rank}", 0) > 1]
    all_facts = [*told.values(), *collect(store, "again", twice).values()]
    listeners = {fact["host"]: fact["listener"] for fact in told.values() if fact["listener"]}
    store.set("listeners", json.dumps(listeners))
    meet(store, me, listeners)
    met = collect(store, "met", list(told))
    clocks = {rank: met[rank]["clock"] - met[0]["clock"] for rank in met}
    tried = [attempt for rank in met for attempt in met[rank]["tried"]]

    checks = [check_ranks(all_facts, world_size), check_launch(all_facts), check_devices(all_facts)]
    checks += [check_addresses(all_facts, tried), check_network(all_facts, tried)]
    sound = all(check.verdict != "FAIL" for check in checks) and len(met) == world_size
    checks += [check_port(all_facts), check_versions(all_facts), check_code(all_facts), check_clocks(all_facts, clocks)]
    checks += [check_shared_memory(all_facts), check_threads(all_facts)]
    store.set("plan", json.dumps("measure" if sound else "stop"))
    times = None
    if sound:
        outcome = watch(store, world_size, work)
        times = outcome.times if world_size > 1 else None
        checks.append(check_all_reduce(outcome, all_facts))
    else:
        checks.append(Check("all_reduce", "warn", "not measured: it would wait for what failed above"))
    print((as_json if args.json else show)(all_facts, clocks, checks, times), flush=True)
    store.set("end", json.dumps(True))
    collect(store, "left", [rank for rank in told if rank > 0], quiet=2)  # the store ends with this process
    return int(any(check.verdict == "FAIL" for check in checks))


def follow(store, me, again, work, pulse):
    """All other ranks: do as rank 0 says. Only rank 0 fails, so that no launcher ends it before it has reported."""
    if not again:
        meet(store, me, wait_for(store, "listeners"))
        if wait_for(store, "plan") == "measure":
            try:
                work()
            except Exception as error:  # rank 0 reads it there
                pulse.at(f"{pulse.stage}: {lost_peer(error) or ' '.join(str(error).split())[:200]}")
    wait_for(store, "end")
    store.set(f"left {me['rank']}", json.dumps(True))
    return 0


def meet(store, me, listeners):
    """Tell the time, all ranks at the same moment, and connect this machine to the others."""
    now = clock()
    tried = reach_all(listeners, me["host"]) if me["listener"] else []
    store.set(f"met {me['rank']}", json.dumps({"clock": now, "tried": tried}))


def clock():
    return time.time()


if __name__ == "__main__":
    with one_line_errors():
        main()
