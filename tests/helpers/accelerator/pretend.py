"""A pretend accelerator for PyTorch: the device "pretend", for tests of GPU code without a GPU.

PyTorch loads it in every process whose PYTHONPATH names the folder that build.py makes. Scripts
need no change: torch.accelerator finds it, as it finds CUDA. PRETEND_DEVICES sets the number of
devices (1 if not set). What a GPU would punish is an error here:

- an operation on tensors of the device and of the CPU, or of two devices
- memory that is read before the copy that fills it: fresh memory holds NaN, and copies from pinned
  memory on a side stream are made when something waits for them
- memory that is freed while another stream uses it (record_stream was forgotten): exit code 70
- a collective with a tensor of the CPU, or of a device that is not the current one

PRETEND_REPORT=FILE appends a JSON line at the end of each process: how often the CPU waited for the
device, and the bytes that it allocated on each device.

Not pretended: random numbers are drawn by the CPU's generator; autocast does nothing, so there is
no half precision; there is no NCCL, no torch.compile, and no DataParallel on several devices.
"""

import contextlib
import functools
import json
import os
from multiprocessing import util

import torch

NAME = "pretend"
BACKEND = "pretend_ccl"  # the process group of its tensors


class Module:
    """torch.pretend: what PyTorch and programs ask of a device by name."""

    @staticmethod
    def is_available():
        return device_module().device_count() > 0

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def device_count():
        return device_module().device_count()

    @staticmethod
    def current_device():
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device):
        torch.accelerator.set_device_index(device)

    @staticmethod
    def get_device_properties(device=None):
        return Properties(torch.device(device or NAME).index or 0)

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16, torch.float16]

    # The streams of fully_shard, which has no code for torch.accelerator.

    current_stream = staticmethod(torch.accelerator.current_stream)
    Event = staticmethod(functools.partial(torch.Event, NAME))

    @staticmethod
    def Stream(priority=0):
        return torch.Stream(NAME, priority=priority)

    @staticmethod
    def stream(stream):
        return stream or contextlib.nullcontext()

    # The device draws from the generator of the CPU, which PyTorch seeds and saves itself.

    @staticmethod
    def manual_seed_all(seed):
        pass

    @staticmethod
    def get_rng_state(device=None):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, device=None):
        torch.set_rng_state(state)


class Properties:
    """What get_device_properties() returns."""

    def __init__(self, index):
        self.name = "pretend accelerator"
        self.uuid = f"PRETEND-{os.uname().nodename}-{index}"


def device_module():
    import pretend_device  # what build.py has made from pretend.cpp

    return pretend_device


def make_group(store, rank, size, timeout):
    """Return a process group for tensors of the device."""
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    return device_module().wrap_group(gloo)


def report(path):
    device = device_module()
    line = {
        "pid": os.getpid(),
        "rank": os.environ.get("RANK"),
        "waits": device.host_waits(),
        "allocated": [device.allocated(index) for index in range(device.device_count())],
    }
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def load():
    """Tell PyTorch of the device: the entry point "torch.backends", called by `import torch`."""
    device_module()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend(BACKEND, make_group, devices=[NAME])
    if "PRETEND_REPORT" in os.environ:
        util.Finalize(None, report, [os.environ["PRETEND_REPORT"]], exitpriority=0)
