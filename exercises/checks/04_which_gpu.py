"""Each process must choose a GPU that its machine has, and that no other process there uses."""

from exercises.judging import refuse, say, variable
from exercises.runner import Setup

TWO_MACHINES = Setup(local_ranks=(0, 1, 0, 1))
ONE_MACHINE = Setup(local_ranks=(0, 1, 2))
SETUPS = [TWO_MACHINES, ONE_MACHINE]


def check(*runs):
    for setup, ranks in zip(SETUPS, runs, strict=True):
        refuse_bad_choice(setup.local_ranks, [variable(rank, "device") for rank in ranks])
    return say(
        "on two machines with two GPUs, and on one with three, each process has its own GPU.",
        "无论是两台机器各两块 GPU，还是一台机器三块 GPU，每个进程都有自己的 GPU。",
    )


def refuse_bad_choice(local_ranks, devices):
    gpus = max(local_ranks) + 1  # of each machine
    used = {}
    machine = -1
    for rank, (local_rank, device) in enumerate(zip(local_ranks, devices, strict=True)):
        machine += local_rank == 0
        if device.type != "cuda" or device.index is None:
            refuse(
                f"Rank {rank} chose {device}; I expected a GPU with its number, such as cuda:0.",
                f"rank {rank} 选择了 {device}；应该选择带编号的 GPU，例如 cuda:0。",
            )
        if device.index >= gpus:
            refuse(
                f"Rank {rank} chose {device}, but its machine has {gpus} GPUs, numbered from 0.",
                f"rank {rank} 选择了 {device}，但所在的机器只有 {gpus} 块 GPU，编号从 0 开始。",
            )
        other = used.setdefault((machine, device.index), rank)
        if other != rank:
            refuse(
                f"With {gpus} processes on a machine, ranks {other} and {rank} share {device} of"
                " one machine.",
                f"每台机器有 {gpus} 个进程时，rank {other} 和 rank {rank} 共用同一台机器上的"
                f" {device}。",
            )
