"""Short runs of 06: its flags, and the state that it leaves behind."""

import runpy
import sys
from types import SimpleNamespace

import torch
from processes import ROOT

from imagenet.checkpoint_file import decode, read_file

script = SimpleNamespace(**runpy.run_path(str(ROOT / "06_imagenet.py"), run_name="script"))


SMALL_06 = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--workers", 0, "--print-every", 1]
SMALL_06 += ["--timeout", 30]
CLASSES = [f"{k:02}" for k in range(40)]


def parse_06(*flags):
    """The flags of 06, parsed by itself."""
    argv = sys.argv
    sys.argv = ["06_imagenet.py", *map(str, flags)]
    try:
        return script.parse_args("")
    finally:
        sys.argv = argv


def final(folder):
    """The state in the newest checkpoint."""
    return decode(read_file(max((folder / "checkpoints").glob("step-*.pt"))))


def same(a, b):
    """Whether two states are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def new_folder(root, name):
    """Make a folder and return its path."""
    (root / name).mkdir()
    return root / name
