"""What each launcher tells the processes that it starts, and ranks that meet without one."""

import itertools
import threading
import unittest.mock
from datetime import timedelta

from common import setup_distributed as module
from common.machine import free_port
from common.setup_distributed import LaunchError

# The beginnings of the names of their variables
VARIABLES = ("RANK", "PET_", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_")
VARIABLES += ("SLURM_", "OMPI_", "PMI", "MPI_")


def torchrun(rank=1, world_size=4, **more):
    """What torchrun tells a worker of two machines with two processes each."""
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_WORLD_SIZE": 2,
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
    } | more


def by_hand(rank=1, **more):
    """The same variables, set by somebody else."""
    return without(torchrun(rank, **more), "TORCHELASTIC_RUN_ID")


def slurm_step(rank=0, tasks=1, nodelist="localhost"):
    """What srun tells a task of a step on one machine."""
    return {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_CPUS_ON_NODE": tasks,
    }


def srun(rank=1, tasks=4, nodes="n[01-02]", **more):
    """What srun tells a task of a step of two machines with two tasks each."""
    layout = {
        "SLURM_LOCALID": rank % 2,
        "SLURM_NODEID": rank // 2,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    return (
        slurm_step(rank, tasks, nodes)
        | layout
        | {"SLURM_STEP_NUM_NODES": 2, "SLURM_NTASKS": tasks}
        | more
    )


def mpirun(rank=1, size=2, **more):
    """What Open MPI tells a process on one machine."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()} | more


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def meet(world_size, ranks, port=None, timeout=30, before=lambda rank: None):
    """Let these ranks meet, a thread each; return what each got: a store, or an error."""
    port = port or free_port()
    results = [None] * len(ranks)

    def go(k, rank):
        before(rank)
        try:
            place = ("localhost", port, rank, world_size)
            results[k] = module.meet(*place, timedelta(seconds=timeout))
        except LaunchError as error:
            results[k] = str(error)

    threads = [
        threading.Thread(target=go, args=arguments, daemon=True) for arguments in enumerate(ranks)
    ]
    with unittest.mock.patch.object(module, "SETUPS", itertools.repeat(0)):  # of one process each
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout + 30)
    return results


# A script that runs beside a copy of setup_distributed.py, under any launcher.
TRAIN = """\
import os
import torch
import torch.distributed as dist
from setup_distributed import cleaned_up, setup_distributed

@cleaned_up()
def main():
    d = setup_distributed()
    total = torch.tensor(d.rank + 1, device=d.device)
    dist.all_reduce(total)
    # Other code reads them from the environment.
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ranks = [d.rank, d.world_size, d.local_rank, d.local_world_size]
    assert [int(os.environ[name]) for name in names] == ranks
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    place = f"{d.rank} of {d.world_size}, {d.local_rank} of {d.local_world_size}"
    print(f"{d.launcher} {place}, sum {total}\\n", end="")

main()
"""
