"""What each rank tells about itself and its machine."""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

from common.records import driver_version
from common.setup_distributed import LaunchError, setup_device

ROOT = Path(__file__).resolve().parents[2]
SIOCGIFADDR = 0x8915  # the request for an interface's address; in linux/sockios.h
IPV6 = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name of an interface
# The driver lists its GPUs here, even if torch cannot use them.
NVIDIA = Path("/proc/driver/nvidia/gpus")
VARIABLES = [  # of the environment, only these are told
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_DEBUG",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_DISTRIBUTED_DEBUG",
]


def facts(launcher, rank, world_size, local_rank, local_world_size):
    """Return the facts about this process and its machine, as a dict for JSON."""
    problem = None
    try:
        device = setup_device(local_rank, local_world_size)
        about_device = device_facts(device)
        if device.type == "cpu":
            problem = unusable_gpus()
    except (LaunchError, RuntimeError, AssertionError) as error:
        problem = str(error).partition("\n")[0]  # torch adds advice for programmers
        if not isinstance(error, LaunchError):
            expected = "one that works and is free; nvidia-smi shows its state and processes"
            problem = f"its GPU fails: {problem}: expected {expected}"
        about_device = device_facts(torch.device("cpu"))
    return {
        "launcher": launcher,
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "problem": problem,
        **about_device,
        "interfaces": interfaces(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code": code_hash(),
        "shared_memory": shared_memory(),
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "driver": driver_version(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def device_facts(device):
    """Return the facts about the device of this process."""
    is_cuda = device.type == "cuda"
    is_gpu = device.type != "cpu"
    listening = ["nccl", "gloo"] if is_cuda else ["gloo"]  # 06 uses gloo beside NCCL
    told = {
        "device": str(device),
        "device_name": "cpu",
        "device_id": None,
        "gpus": torch.accelerator.device_count() if is_gpu else 0,
        "backend": dist.get_default_backend_for_device(device),
        "addresses": {name: own_address(name) for name in listening},
        "cuda": None,
        "nccl": None,
    }
    if is_gpu:
        properties = torch.get_device_module(device).get_device_properties(device)
        told["device_name"] = properties.name
        told["device_id"] = str(properties.uuid)
    if is_cuda:
        told["cuda"] = torch.version.cuda
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return told


def has_nvidia_gpus():
    """Return whether this machine has NVIDIA GPUs that are not hidden from this process."""
    # NoDevFiles: by older Slurm, for a job without GPUs
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return not hidden and NVIDIA.is_dir() and any(NVIDIA.iterdir())


def unusable_gpus():
    """Return why torch cannot use the NVIDIA GPUs of this machine.

    None: there are none, or they are hidden.
    """
    if not has_nvidia_gpus():
        return None
    try:
        torch.cuda.init()
        reason = "it finds none"
    except (RuntimeError, AssertionError) as error:  # an old driver, a build of torch for CPUs, ...
        reason = str(error).split(". ")[0].strip()
    return (
        f"torch cannot use the GPUs here: {reason}; see nvidia-smi, "
        "or export CUDA_VISIBLE_DEVICES= to use CPUs"
    )


def interfaces():
    """Return {name: address} of the network interfaces here: the IPv4 address, or else IPv6."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    for line in IPV6.read_text().splitlines() if IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # of an address that is valid on one link alone
            addresses.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return addresses


def own_address(backend):
    """Return the (interface, address) at which a backend lets other ranks connect to this process.

    The address is None if there is no such interface.
    """
    wanted = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    if backend == "nccl":
        return nccl_address(wanted, interfaces())
    return gloo_address(wanted, interfaces())


def nccl_address(wanted, addresses):
    """Return NCCL's (interface, address), as NCCL's ncclFindInterfaces chooses it.

    Args:
        wanted: NCCL_SOCKET_IFNAME, which lists prefixes of names, with = whole names, with ^ or
            ^= those to leave out. None: ib; anything but docker, lo and virbr; docker; lo; virbr.
        addresses: {name: address}.
    """
    for names in [wanted] if wanted else ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]:
        listed = names.removeprefix("^")
        prefixes = tuple(listed.removeprefix("=").split(","))
        for name, address in addresses.items():
            is_listed = name in prefixes if listed.startswith("=") else name.startswith(prefixes)
            if is_listed != names.startswith("^"):
                return name, address
    return wanted, None


def gloo_address(wanted, addresses):
    """Return gloo's (interface, address).

    Without GLOO_SOCKET_IFNAME it is the address to which this machine's name resolves, or loopback
    (torch's ProcessGroupGloo::createDefaultDevice).
    """
    if wanted:
        return wanted, addresses.get(wanted.split(",")[0])
    names = {address: name for name, address in reversed(addresses.items())}
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, _, _, _, (address, *_) in found:
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, 0))
                return names.get(address, "lo"), address
    return "lo", "127.0.0.1"


def shared_memory():
    """Return the free bytes of shared memory, or None on systems that have no /dev/shm."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def cores():
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def code_hash():
    """Return eight digits that differ if the Python files of a job differ."""
    digest = hashlib.sha256()
    names = ["", "common", "ddp", "fsdp", "gpt", "imagenet", "launch", "launch/checks"]
    for path in sorted(path for name in names for path in (ROOT / name).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
