"""Lines and a progress bar on the console of rank 0."""

import platform
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.records import peak_memory

MAX_HOSTS = 16  # lines of the header that name hosts


class Console:
    """The console of one process. Ranks other than 0 show nothing.

    Args:
        rank: int.
    """

    def __init__(self, rank):
        self.rank = rank
        self.bar = None  # tqdm's progress bar, during an epoch

    def print(self, line):
        if self.rank == 0:
            tqdm.write(line)  # above the progress bar, if there is one
            sys.stdout.flush()

    def with_bar(self, batches, total, description):
        """Yield batches. A terminal shows meanwhile how many of them there have been."""
        self.bar = tqdm(
            total=total,
            desc=description,
            unit="batch",
            leave=False,
            disable=self.rank > 0 or not sys.stdout.isatty(),
            file=sys.stdout,
        )
        with self.bar:
            for batch in batches:
                yield batch
                self.bar.update()

    def print_launch(self, record, device):
        """Print how a run was started, and its devices. Every rank must call it.

        Args:
            record: dict, which holds run_fields().
            device: torch.device, of this rank.
        """
        world_size = record["world_size"]
        local = f" ({record['local_world_size']} on this machine)" if world_size > 1 else ""
        started_by = f"started by {record['launcher']} | world size {world_size}{local}"
        self.print(f"{record['script']} | {started_by} | torch {record['torch']}")
        self.print_devices(device, record["device_name"], record["cpu_threads"], world_size)

    def print_devices(self, device, name, threads, world_size):
        """Print the devices of all ranks, a line per host. Every rank must call it.

        Args:
            device: torch.device, of this rank.
            name: str, of the device.
            threads: int, CPU threads of this rank.
            world_size: int.
        """
        if world_size == 1:
            self.print(f"device: {device} ({name}, {threads} CPU threads)")
            return
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (platform.node(), device, name, threads))
        lines = host_lines(everyone)
        for line in lines[:MAX_HOSTS]:
            self.print(line)
        if len(lines) > MAX_HOSTS:
            self.print(f"... and {len(lines) - MAX_HOSTS} more hosts")


def host_lines(everyone):
    """Return a line per host: "ranks 0-7 on node1: cuda:0-7 (NVIDIA H100, 12 CPU threads each)".

    A host has more than one line if its devices or threads differ.

    Args:
        everyone: for each rank (host, torch.device, name of the device, CPU threads).
    """
    groups = {}
    for rank, (host, device, name, threads) in enumerate(everyone):
        groups.setdefault((host, device.type, name, threads), []).append((rank, device.index))
    lines = []
    for (host, device, name, threads), members in groups.items():
        ranks, indices = zip(*members, strict=True)
        if device != "cpu":
            device += f":{number_range(indices)}"
        plural, each = ("s", " each") if len(ranks) > 1 else ("", "")
        threads = f"{threads} CPU thread{'s' * (threads > 1)}{each}"
        lines.append(f"rank{plural} {number_range(ranks)} on {host}: {device} ({name}, {threads})")
    return lines


def number_range(numbers):
    """Return numbers as text: "0-3" if they follow each other, else "0,2,3"."""
    first = numbers[0]
    last = numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def memory_used(device):
    """Return the peak memory of this process, in words."""
    peak = peak_memory()
    text = f"peak memory {peak / 2**30:.2f} GiB" if peak else "peak memory unknown"
    if device.type == "cuda":
        text += f", on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    return text
