"""Run records: one JSON line per epoch in --log-file, from which the charts are drawn."""

import datetime
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path

import torch
import torchvision

from common.errors import UserError


def started_alone():
    """Return the fields of a record that say how a run of one process was started."""
    script = os.path.basename(sys.argv[0])
    return {
        "script": script,
        "command": f"python {shlex.join([script, *sys.argv[1:]])}",
        "launcher": "python",
        "world_size": 1,
        "local_world_size": 1,
        "backend": "none",
    }


def environment(device):
    """Return the fields of a record that name hardware and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fields = {
        "device": device.type,
        "device_name": device_name(device),
        "cores": cores,
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        fields |= gpu_software(device)
    return fields


def gpu_software(device):
    """Return the fields of a record that name a GPU's software, and whether it rounds to TF32."""
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_class": None,  # of one process
        "tf32_matmul": torch.get_float32_matmul_precision() != "highest",
        "tf32_conv": torch.backends.cudnn.allow_tf32,
    }


def driver_version():
    """Return the version of NVIDIA's driver, or None."""
    return read_proc("driver/nvidia/version", r"Kernel Module.*?\s(\d[\d.]+)")


def device_name(device):
    """Return the manufacturer's name of a device."""
    if device.type not in ("cpu", "mps"):  # Apple's mps has no name of its own
        return torch.get_device_module(device).get_device_properties(device).name
    cpu = read_proc("cpuinfo", r"model name\s*: (.*)")
    return cpu or platform.processor() or platform.machine()


def peak_memory():
    """Return the peak memory of this process in bytes, or 0 if there is no /proc.

    Loader workers are processes of their own.
    """
    return int(read_proc("self/status", r"VmHWM:\s*(\d+)") or 0) * 1024


def read_proc(name, pattern):
    """Return the first group of a pattern in a file of /proc, or None."""
    path = Path("/proc", name)
    found = path.exists() and re.search(pattern, path.read_text())
    return found[1] if found else None


def count_repeats(log, command):
    """Return how many runs of this command a log holds."""
    try:
        with open(log) as file:
            records = [json.loads(line) for line in file]
        return len({record["started"] for record in records if record["command"] == command})
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"--log-file {log} holds lines that are not run records: name another file"
        ) from None


def append_record(log, record):
    """Append a record to a log, with the peak memory of this process."""
    record = record | {"peak_memory_mib": round(peak_memory() / 2**20)}
    with open(log, "a") as file:
        file.write(json.dumps(record) + "\n")
