"""Whether NCCL can use the InfiniBand or RoCE adapters of a machine."""

import contextlib
import ctypes
import resource
from pathlib import Path

from launch.checks.verdicts import Check, worst

ADAPTERS = Path("/sys/class/infiniband")  # the kernel lists them here; RoCE adapters too
DEVICES = Path("/dev/infiniband")  # what a program opens; a container may lack it
STATUS = Path("/proc/self/status")
LIBRARY = "libibverbs.so.1"  # NCCL loads it when it starts, and uses TCP without it
MEMLOCK = 2**30  # bytes; NCCL's buffers are locked, and NVIDIA recommends no limit at all
CAP_IPC_LOCK = 14  # the number of a capability, in linux/capability.h: no limit applies to it


def infiniband_facts():
    """Return the facts about the adapters of this machine, as a dict for JSON."""
    ports = sorted(ADAPTERS.glob("*/ports/*"))
    return {
        "ports": {f"{port.parts[-3]}:{port.name}": describe_port(port) for port in ports},
        "has_devices": any(DEVICES.glob("uverbs*")),
        "has_library": has_library(),
        "memlock": memlock(),
    }


def describe_port(port):
    """Return such as "ACTIVE, 200 Gb/sec (4X HDR)"."""
    texts = []
    for name in ("state", "rate"):
        with contextlib.suppress(OSError):
            texts.append((port / name).read_text().split(": ")[-1].strip())
    return ", ".join(texts)


def has_library():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def memlock():
    """Return how many bytes this process may lock in memory, or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    may_lock = False
    with contextlib.suppress(OSError, ValueError, IndexError):
        capabilities = int(STATUS.read_text().split("CapEff:")[1].split()[0], 16)
        may_lock = bool(capabilities >> CAP_IPC_LOCK & 1)
    return None if may_lock or limit == resource.RLIM_INFINITY else limit


def check_infiniband(all_facts):
    """NCCL finds a working adapter on all machines, or on none.

    No fault is a failure: without an adapter NCCL uses TCP, which is slow, and if NCCL fails, the
    check of all_reduce fails too.
    """
    name = "InfiniBand"
    first = {}  # the facts of the first rank of each machine
    for fact in all_facts:
        first.setdefault(fact["host"], fact)
    ports = {host: fact["infiniband"]["ports"] for host, fact in first.items()}
    if not any(ports.values()):
        return Check(name, "ok", "no InfiniBand or RoCE adapter")
    if all(fact["variables"].get("NCCL_IB_DISABLE") == "1" for fact in all_facts):
        return Check(name, "ok", "not used, because NCCL_IB_DISABLE=1")
    faults = []
    for host, fact in first.items():
        for verdict, found, change in machine_faults(fact["infiniband"]):
            faults.append((verdict, f"{host}: {found}", change))
    faults += differences(ports)
    if faults:
        return worst(name, faults)
    active = sorted({text for texts in ports.values() for text in texts.values()})
    return Check(name, "ok", "; ".join(active))


def machine_faults(infiniband):
    """Yield (verdict, what was found, what to do) for all that is wrong on one machine."""
    ports = infiniband["ports"]
    if not ports:
        yield (
            "warn",
            "no adapter, while another machine has one",
            "export NCCL_IB_DISABLE=1 on all machines to use TCP, or leave this machine out",
        )
    elif not any(text.startswith("ACTIVE") for text in ports.values()):
        listed = "; ".join(f"{port} {text}" for port, text in ports.items())
        change = "tell the administrator: ibstat. Until then NCCL uses TCP"
        yield "warn", f"no port is ACTIVE ({listed})", change
    elif not infiniband["has_devices"]:
        yield (
            "warn",
            f"no {DEVICES}/uverbs*, so NCCL uses TCP",
            "docker run --device=/dev/infiniband --ulimit memlock=-1",
        )
    elif not infiniband["has_library"]:
        yield (
            "warn",
            f"{LIBRARY} cannot be loaded, so NCCL uses TCP",
            "apt-get install libibverbs1 ibverbs-providers, in the container if you use one",
        )
    elif infiniband["memlock"] is not None and infiniband["memlock"] < MEMLOCK:
        yield (
            "warn",
            f"only {infiniband['memlock'] // 2**10} KiB may be locked in memory (ulimit -l), "
            "so NCCL may fail in ibv_reg_mr",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; for Slurm, "
            "LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        )


def differences(ports):
    """Yield which ports differ between machines, or are missing on one that has others.

    A port without a cable is DOWN everywhere. One that is DOWN or slow on one machine is broken.
    """
    for port in dict.fromkeys(port for machine in ports.values() for port in machine):
        by_text = {}  # {text: hosts}
        for host, machine in ports.items():
            if machine:  # machine_faults() names a machine without any
                by_text.setdefault(machine.get(port, "missing"), []).append(host)
        if len(by_text) > 1:
            found = "; ".join(f"{text} on {', '.join(hosts)}" for text, hosts in by_text.items())
            yield (
                "warn",
                f"{port} is {found}",
                "ibstat on these machines: an adapter, cable, switch port or setting differs",
            )
