"""What preflight says of launches that setup_distributed() does not look at."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from launchers import mpirun, slurm_step, srun, torchrun

from common.machine import free_port
from common.setup_distributed import LaunchError, find_launcher
from launch.checks import starting

NODES = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "job-0", "MASTER_PORT": 23456}
# PyTorchJob with nprocPerNode: "2" on 2 pods, as of version 1.7: WORLD_SIZE counts processes.
PODS = {"WORLD_SIZE": 4, "PET_NPROC_PER_NODE": 2, "PET_NNODES": 2}
ALONE = mpirun() | torchrun(GROUP_WORLD_SIZE=1)
LONE_TASK = srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)")


@pytest.mark.parametrize(
    ("variables", "number_of_gpus", "found", "command"),
    [
        (
            srun(0, 2, SLURM_STEP_NUM_NODES=1) | torchrun(),
            0,
            "srun has started 2 tasks with a torchrun on 1 machine(s)",
            "srun --ntasks=1 --ntasks-per-node=1 torchrun",
        ),
        (ALONE, 0, "mpirun has started several torchruns", "mpirun -n 2 python"),
        (
            srun(0, SLURM_NODEID=1, SLURM_LOCALID=0),
            0,
            "rank 0 is not on the first machine, n01",
            "export MASTER_ADDR",
        ),
        (LONE_TASK, 2, "one Slurm task with 2 GPUs", "srun --ntasks-per-node=2"),
        (NODES, 8, "this one should run 8 processes", "--nnodes=$WORLD_SIZE --node-rank=$RANK"),
        (NODES | PODS, 0, "this one should run 2 processes", "torchrun --nnodes=$PET_NNODES"),
    ],
)
def test_launches_that_work_and_are_wrong_are_refused(
    environment, gpus, variables, number_of_gpus, found, command
):
    environment(**variables)
    gpus(number_of_gpus)
    with pytest.raises(LaunchError) as caught:
        starting.check_start(find_launcher()[0])
    assert found in str(caught.value) and command in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [{}, srun(), mpirun(), torchrun(), NODES, *(one | torchrun() for one in (LONE_TASK, mpirun()))],
)
def test_right_launches_are_accepted(environment, gpus, variables):
    environment(**variables)
    gpus(0)
    assert starting.check_start(find_launcher()[0]) == []


def test_processes_that_train_alone_are_told_so(environment):
    environment(SLURM_JOB_ID=7, SLURM_NTASKS=4)  # the shell of an sbatch file
    found = ["running as one process, though SLURM_NTASKS=4: srun python ..."]
    assert starting.check_start(find_launcher()[0]) == found
    environment(**srun(0, 2) | torchrun(0, GROUP_WORLD_SIZE=1))
    found = ["each of 2 machines trains alone: torchrun --nnodes=2"]
    assert starting.check_start(find_launcher()[0]) == found


def test_the_processes_of_this_machine_are_counted(environment):
    for variables, expected in ((slurm_step(0, 3), 3), (torchrun(), 2), (mpirun(), 2), ({}, 1)):
        environment(**variables)
        launcher, _, _, local_rank = find_launcher()
        assert starting.processes_here(launcher, local_rank) == expected


def open_store(rank, port, world_size=2, seconds=1):
    """The error with which preflight's rank fails to open the store."""
    with pytest.raises(LaunchError) as caught:
        starting.open_store("localhost", port, rank, world_size, timedelta(seconds=seconds))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_port_that_is_taken_is_named_with_a_free_one():
    with socket.create_server(("", 0)) as stranger:  # which says nothing to those who connect
        port = stranger.getsockname()[1]
        first = open_store(0, port)
        assert f"port {port} of this machine is taken" in first and "export MASTER_PORT=" in first
        second = open_store(1, port)
    assert f"could not reach rank 0 at localhost:{port} (something listens there" in second


def test_a_port_that_this_user_may_not_use_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("The server socket has failed to bind\n(errno: 13 - Permission denied).")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    assert "port 80 of this machine cannot be used (The server" in open_store(0, 80)


def test_a_rank_zero_that_does_not_come_is_named():
    assert "rank 1 could not reach rank 0 at localhost:" in (found := open_store(1, free_port()))
    assert "Connection refused" in found and "MASTER_ADDR and MASTER_PORT" in found


def test_the_store_of_another_job_is_refused():
    port = free_port()
    store = starting.open_store("localhost", port, 0, 3, timedelta(seconds=30))
    assert f"the store of 3 ranks answers at localhost:{port}" in open_store(1, port, seconds=30)
    assert store.timeout == timedelta(seconds=30)
