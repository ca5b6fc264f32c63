"""What 03 to 05 and 07 print and record: a Report of several processes. 06 has its lines too."""

import multiprocessing
import platform

import torch.distributed as dist

from common import records
from common.report import Report
from common.setup_distributed import find_launcher

MAX_HOSTS = 16  # lines of the header that name hosts
# How a recorded command starts, by launcher; otherwise with python.
START = {
    "torchrun": "torchrun --nnodes={machines} --nproc-per-node={per_machine}",
    "srun": "srun --nodes={machines} --ntasks-per-node={per_machine} python",
    "mpirun": "mpirun -n {processes} python",
}


class DistributedReport(Report):
    """The console lines and the records of one run. Only rank 0 prints and writes.

    Args:
        args: the shared flags.
        device: torch.device, of this rank.
        local_world_size: int, the processes on this machine.
    """

    def __init__(self, args, device, local_world_size):
        world_size = dist.get_world_size()
        fields = launch_fields(device, launcher_name(), world_size, local_world_size)
        fields |= {
            "batch_size": args.batch_size // world_size,
            "amp": getattr(args, "amp", "none"),  # of 07
            "sync_bn": args.sync_bn,
        }
        super().__init__(args, device, fields, is_main=dist.get_rank() == 0)

    def launch_lines(self):
        """Return the lines that say how the run was started, and on what. A collective."""
        return launch_lines(self.record, self.device)


def launcher_name():
    """Return what started this process: "mp.spawn" or a launcher."""
    return "mp.spawn" if multiprocessing.parent_process() else find_launcher()[0]


def launch_fields(device, launcher, world_size, local_world_size):
    """Return the fields of a record that say how the processes of a run were started.

    Args:
        device: torch.device.
        launcher: str, "mp.spawn" or one of setup_distributed.LAUNCHERS.
        world_size, local_world_size: int, the processes of the run, and of this machine.
    """
    start = START.get(launcher, "python").format(
        machines=world_size // local_world_size, per_machine=local_world_size, processes=world_size
    )
    fields = records.started_alone()
    fields |= {
        "command": fields["command"].replace("python", start, 1),
        "launcher": launcher,
        "world_size": world_size,
        "local_world_size": local_world_size,
        "backend": dist.get_backend(),
    }
    if fields["backend"] == "nccl":  # torch has several
        fields["nccl_class"] = type(dist.group.WORLD._get_backend(device)).__name__
    return fields


def launch_lines(record, device):
    """Return the lines that say how a run was started, and on what. A collective.

    Args:
        record: dict, which holds environment() and launch_fields().
        device: torch.device, of this rank.
    """
    name = record["device_name"]
    threads = record["cpu_threads"]
    world_size = record["world_size"]
    local = ""
    lines = [f"device: {device} ({name}, {threads} CPU threads)"]
    if world_size > 1:
        local = f" ({record['local_world_size']} on this machine)"
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (platform.node(), device, name, threads))
        lines = host_lines(everyone)
    if len(lines) > MAX_HOSTS:
        lines[MAX_HOSTS:] = [f"... and {len(lines) - MAX_HOSTS} more hosts"]
    started_by = f"started by {record['launcher']} | world size {world_size}{local}"
    return [f"{record['script']} | {started_by} | torch {record['torch']}", *lines]


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
