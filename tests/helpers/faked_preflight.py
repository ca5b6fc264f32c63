"""Run launch/preflight.py with the faults of rank 1, or FAKE_RANK, that FAKE names.

FAKE_SILENCE is how many seconds all ranks wait for an answer.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("launch", ".")]

import preflight
import torch

from common.setup_distributed import find_launcher
from ddp.errors import one_line_errors
from launch.checks import all_reduce, messages
from launch.checks import facts as facts_module


def end(signal_number):
    """Return a replacement for a function: it sends a signal, such as SIGKILL or SIGSTOP, to its
    own process.
    """
    return lambda *_: os.kill(os.getpid(), signal_number)


def fail(*_):
    """Fail as the first use of a GPU with broken memory."""
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might")


FAKES = {
    "torch": lambda: setattr(torch, "__version__", "2.6.0+cu124"),
    "code": lambda: setattr(facts_module, "code_hash", lambda: "0badc0de"),
    "clock": lambda: setattr(preflight, "time", SimpleNamespace(time=lambda: time.time() + 20)),
    "broken GPU": lambda: setattr(facts_module, "setup_device", fail),
    "killed": lambda: setattr(preflight, "facts", end(signal.SIGKILL)),
    "stopped in all_reduce": lambda: setattr(all_reduce, "time_all_reduce", end(signal.SIGSTOP)),
}

if __name__ == "__main__":
    with one_line_errors():
        _, rank, *_ = find_launcher()
        messages.SILENCE = int(os.environ.get("FAKE_SILENCE", messages.SILENCE))
        if rank == int(os.environ.get("FAKE_RANK", 1)):
            for fake in filter(None, os.environ.get("FAKE", "").split(",")):
                FAKES[fake]()
        preflight.main()
