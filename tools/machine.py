"""The device on which a tool measures, and the name of this machine for its records."""

import re

import torch

from common.machine import cores_per_process
from common.records import device_name


def pick_device():
    """Return the device that this machine computes on."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def machine_name():
    """Return a name for this machine, of its device and the number of devices."""
    device = pick_device()
    count = f"{cores_per_process(1)} cores"
    if device.type != "cpu":
        devices = torch.accelerator.device_count()
        count = f"x {devices}" if devices > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{device_name(device)} {count}".lower()).strip("-")
