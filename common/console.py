"""Lines and a progress bar on the console."""

import sys

import torch
from tqdm import tqdm

from common.records import peak_memory


class Console:
    """The console of one process.

    Args:
        is_main: bool. False shows nothing, since another process does.
    """

    def __init__(self, is_main=True):
        self.is_main = is_main
        self.bar = None  # tqdm's progress bar, during an epoch

    def print(self, line):
        if self.is_main:
            tqdm.write(line)  # above the progress bar, if there is one
            sys.stdout.flush()

    def with_bar(self, batches, total, description, delay=0):
        """Return an iterator over batches. A terminal counts them, after `delay` seconds."""
        is_hidden = not self.is_main or not sys.stdout.isatty()
        options = {"unit": "batch", "leave": False, "file": sys.stdout, "disable": is_hidden}
        self.bar = tqdm(batches, description, total, delay=delay, **options)
        return iter(self.bar)


def memory_used(device):
    """Return the peak memory of this process, in words."""
    peak = peak_memory()
    text = f"peak memory {peak / 2**30:.2f} GiB" if peak else "peak memory unknown"
    if device.type == "cuda":
        text += f", on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    return text
