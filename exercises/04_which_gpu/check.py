"""Each process must choose a GPU that its machine has, and that no other process there uses."""

import torch

from exercises.judge.judging import refuse, say, variable
from exercises.judge.runner import Setup

TWO_MACHINES = Setup(local_ranks=(0, 1, 0, 1), environment={"PRETENDED_GPUS": 2})
ONE_MACHINE = Setup(local_ranks=(0, 1, 2), environment={"PRETENDED_GPUS": 3})
SETUPS = [TWO_MACHINES, ONE_MACHINE]


def check(*runs):
    for setup, ranks in zip(SETUPS, runs, strict=True):
        refuse_bad_choice(setup.local_ranks, [chosen(rank) for rank in ranks])
    return say(
        "on two machines with two GPUs, and on one with three, each process has its own GPU.",
        "无论是两台机器各两块 GPU，还是一台机器三块 GPU，每个进程都有自己的 GPU。",
    )


def chosen(rank):
    """Return the number on its machine of the GPU that a rank chose."""
    device = value = variable(rank, "device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("cpu")
    number = rank.gpu if device.index is None else device.index
    if device.type != "cuda" or number is None:
        refuse(
            f"Rank {rank.rank} chose {value}; I expected a GPU with its number, such as cuda:0.",
            f"rank {rank.rank} 选择了 {value}；应该选择带编号的 GPU，例如 cuda:0。",
        )
    if rank.visible_gpus is None:
        return number
    visible = rank.visible_gpus.split(",")
    if number >= len(visible):
        refuse(
            f"Rank {rank.rank} chose {device}, but CUDA_VISIBLE_DEVICES={rank.visible_gpus} shows"
            f" {len(visible)} GPUs.",
            f"rank {rank.rank} 选择了 {device}，但 CUDA_VISIBLE_DEVICES={rank.visible_gpus}"
            f" 只显示 {len(visible)} 块 GPU。",
        )
    return int(visible[number])


def refuse_bad_choice(local_ranks, numbers):
    gpus = max(local_ranks) + 1  # of each machine
    used = {}
    machine = -1
    for rank, (local_rank, number) in enumerate(zip(local_ranks, numbers, strict=True)):
        machine += local_rank == 0
        if number >= gpus:
            refuse(
                f"Rank {rank} chose cuda:{number}, but its machine has {gpus} GPUs, numbered from"
                " 0.",
                f"rank {rank} 选择了 cuda:{number}，但所在的机器只有 {gpus} 块 GPU，"
                "编号从 0 开始。",
            )
        other = used.setdefault((machine, number), rank)
        if other != rank:
            refuse(
                f"With {gpus} processes on a machine, ranks {other} and {rank} share cuda:{number}"
                " of one machine.",
                f"每台机器有 {gpus} 个进程时，rank {other} 和 rank {rank} 共用同一台机器上的"
                f" cuda:{number}。",
            )
