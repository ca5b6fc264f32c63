"""Each process must choose a GPU that its machine has, and that no other process there uses."""

import re

import torch

from exercises.judge.judging import refuse, variable
from exercises.judge.runner import Setup
from exercises.sentences import say

TWO_MACHINES = Setup(local_ranks=(0, 1, 0, 1), environment={"PRETENDED_GPUS": 2})
ONE_MACHINE = Setup(local_ranks=(0, 1, 2), environment={"PRETENDED_GPUS": 3})
SETUPS = [TWO_MACHINES, ONE_MACHINE]


def check(*runs):
    for setup, ranks in zip(SETUPS, runs, strict=True):
        for rank in ranks:
            refuse_another_rank(rank)
        refuse_bad_choice(setup.local_ranks, [chosen(rank) for rank in ranks])
    return say(
        "on two machines with two GPUs, and on one with three, each process has its own GPU."
    )


def refuse_another_rank(rank):
    printed = re.findall(r"rank (\d+) of \d+", rank.output)
    if printed and int(printed[-1]) != rank.rank:
        refuse(
            "Rank {rank} calls itself rank {other}: `rank` must stay the number among all"
            " processes. Rank 0, for example, writes the checkpoint, and there is one.",
            rank=rank.rank,
            other=int(printed[-1]),
        )


def chosen(rank):
    """Return the number on its machine of the GPU that a rank chose."""
    device = value = variable(rank, "device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("cpu")
    number = rank.gpu if device.index is None else device.index
    visible = (rank.visible_gpus or "").split(",")
    if number is None and rank.visible_gpus and len(visible) == 1:
        number = 0  # the only GPU that the process sees
    if device.type != "cuda" or number is None:
        refuse(
            "Rank {rank} chose {value}; I expected a GPU with its number, such as cuda:0.",
            rank=rank.rank,
            value=str(value),
        )
    if rank.visible_gpus is None:
        return number
    if number >= len(visible):
        refuse(
            "Rank {rank} chose {device}, but CUDA_VISIBLE_DEVICES={visible_gpus} shows {count}"
            " GPUs.",
            rank=rank.rank,
            device=str(device),
            visible_gpus=rank.visible_gpus,
            count=len(visible),
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
                "Rank {rank} chose cuda:{number}, but its machine has {gpus} GPUs, numbered from"
                " 0.",
                rank=rank,
                number=number,
                gpus=gpus,
            )
        other = used.setdefault((machine, number), rank)
        if other != rank:
            refuse(
                "With {gpus} processes on a machine, ranks {other} and {rank} share cuda:{number}"
                " of one machine.",
                gpus=gpus,
                other=other,
                rank=rank,
                number=number,
            )
