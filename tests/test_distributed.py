"""setup_distributed: who started this process, and do the ranks meet? No launcher runs here but in the last part."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, slurm_step

from common import distributed
from common.distributed import LaunchError, expand_hosts, rendezvous, setup_device, setup_distributed

LAUNCHERS = (
    "RANK",
    "PET_",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
)


@pytest.fixture
def environment(monkeypatch):
    """A function that sets these environment variables and no other of a launcher."""

    def environment(**variables):
        for name in list(os.environ):
            if name.startswith(LAUNCHERS):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    environment(OMP_NUM_THREADS=torch.get_num_threads())
    return environment


def torchrun(rank=1, world_size=4, **more):
    """What torchrun tells a worker of two machines with two processes each."""
    return {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2,
        "MASTER_ADDR": "node0", "MASTER_PORT": 29500, "TORCHELASTIC_USE_AGENT_STORE": "True",
    } | more  # fmt: skip


def srun(rank=1, tasks=4, nodes="n[01-02]", **more):
    """What srun tells a task of a step of two machines with two tasks each."""
    layout = {"SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    return slurm_step(rank, tasks, nodes) | layout | {"SLURM_STEP_NUM_NODES": 2, "SLURM_NTASKS": tasks} | more


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def mpirun(rank=1, size=2, **more):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()} | more


SBATCH_SHELL = {"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 4, "SLURM_NODEID": 0}
NODES = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "job-0", "MASTER_PORT": 23456}
MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 1, "MASTER_ADDR": "m0"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("python", 0, 1, 0, 1, None)),
        (torchrun(), ("torchrun", 1, 4, 1, 2, None)),
        (torchrun(3) | srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)"), ("torchrun", 3, 4, 1, 2, None)),
        (torchrun(TORCHELASTIC_USE_AGENT_STORE=""), ("torchrun", 1, 4, 1, 2, "tcp://node0:29500")),
        (without(torchrun(TORCHELASTIC_USE_AGENT_STORE=""), "LOCAL_WORLD_SIZE"),
         ("torchrun", 1, 4, 1, None, "tcp://node0:29500")),
        (srun(), ("srun", 1, 4, 1, 2, "tcp://n01:12112?job=7.0")),
        (srun(2), ("srun", 2, 4, 0, 2, "tcp://n01:12112?job=7.0")),
        (srun(SLURM_JOB_ID=8), ("srun", 1, 4, 1, 2, "tcp://n01:12128?job=8.0")),
        (srun(SLURM_STEP_ID=3), ("srun", 1, 4, 1, 2, "tcp://n01:12115?job=7.3")),
        (srun(MASTER_PORT=4000, MASTER_ADDR="ib0"), ("srun", 1, 4, 1, 2, "tcp://ib0:4000")),
        (srun(SLURM_NTASKS=64, SLURM_JOB_NODELIST="a,n[01-31]"), ("srun", 1, 4, 1, 2, "tcp://n01:12112?job=7.0")),
        (srun(MASTER_ADDR="fd00::1"), ("srun", 1, 4, 1, 2, "tcp://[fd00::1]:12112?job=7.0")),
        (srun(SLURM_STEP_ID=4294967290), ("srun", 1, 4, 1, 2, "tcp://n01:19402?job=7.4294967290")),
        (srun(WORLD_SIZE=4), ("srun", 1, 4, 1, 2, "tcp://n01:12112?job=7.0")),
        (srun(0, 1) | mpirun(), ("mpirun", 1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (srun(0, 1) | MPICH, ("mpirun", 1, 2, 0, 1, "tcp://m0:29500")),
        (srun(PMI_RANK=9, PMI_SIZE=99), ("srun", 1, 4, 1, 2, "tcp://n01:12112?job=7.0")),
        (srun(5, 7, "n[1-3]", SLURM_NODEID=1, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="5,1(x2)"),
         ("srun", 5, 7, 0, 1, "tcp://n1:12112?job=7.0")),
        (SBATCH_SHELL, ("python", 0, 1, 0, 1, None)),
        (mpirun(), ("mpirun", 1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (mpirun(MASTER_ADDR="m0", MASTER_PORT=5000), ("mpirun", 1, 2, 1, 2, "tcp://m0:5000")),
        (MPICH, ("mpirun", 1, 2, 0, 1, "tcp://m0:29500")),
        (NODES, ("nodes", 1, 2, 0, 1, "tcp://job-0:23456")),
        (NODES | {"WORLD_SIZE": 1, "RANK": 0}, ("nodes", 0, 1, 0, 1, None)),
    ],
)  # fmt: skip
def test_the_launcher_is_recognised_by_its_variables(environment, variables, expected):
    environment(**variables)
    assert distributed.find_launcher(port=None) == expected


def test_two_open_mpi_jobs_on_one_machine_meet_at_two_ports(environment):
    urls = set()
    for job in ("prterun-a-1@1", "prterun-a-2@1"):
        environment(**mpirun(PMIX_NAMESPACE=job))
        urls.add(distributed.find_launcher(port=None)[-1])
    assert len(urls) == 2


def test_a_port_that_is_asked_for_is_used_unless_the_environment_names_one(environment):
    for variables in (srun(), mpirun(), MPICH):
        environment(**variables)
        assert distributed.find_launcher(port=1234)[-1].endswith(":1234")
        environment(**variables | {"MASTER_PORT": 4000})
        assert distributed.find_launcher(port=1234)[-1].endswith(":4000")


def test_the_shell_of_an_sbatch_file_is_told_that_it_is_one_process(environment, caplog):
    environment(**SBATCH_SHELL)
    with caplog.at_level(logging.WARNING):
        distributed.find_launcher(port=None)
    assert "running as one process" in caplog.text and "SLURM_NTASKS=4" in caplog.text and "srun python" in caplog.text


def test_torchruns_that_do_not_know_of_each_other_are_told_so(environment, caplog):
    environment(**srun(0, 2) | torchrun(0, GROUP_WORLD_SIZE=1))
    distributed.find_launcher(port=None)
    assert "each of 2 machines trains alone: for one run of all, torchrun --nnodes=2" in caplog.text


@pytest.mark.parametrize(
    ("variables", "found", "command"),
    [
        (torchrun(RANK=4), "RANK=4: expected a whole number from 0 to 3", "torchrun --nproc-per-node"),
        (torchrun(RANK="one"), "RANK=one: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(RANK=-1), "RANK=-1: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(RANK=""), "RANK=: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(WORLD_SIZE=0), "WORLD_SIZE=0: expected a whole number of 1 or more", "torchrun"),
        (torchrun(WORLD_SIZE="4.0"), "WORLD_SIZE=4.0: expected a whole number of 1 or more", "torchrun"),
        (torchrun(LOCAL_RANK=2), "LOCAL_RANK=2: expected a whole number from 0 to 1", "torchrun"),
        (torchrun(LOCAL_WORLD_SIZE=5), "LOCAL_WORLD_SIZE=5: expected a whole number from 1 to 4", "torchrun"),
        ({"RANK": 0}, "RANK set without WORLD_SIZE and LOCAL_RANK: expected all three, or none", "torchrun"),
        ({"WORLD_SIZE": 2, "LOCAL_RANK": 0}, "WORLD_SIZE and LOCAL_RANK set without RANK", "torchrun"),
        (without(torchrun(TORCHELASTIC_USE_AGENT_STORE=""), "MASTER_ADDR"), "MASTER_ADDR is not set", "export"),
        (torchrun(TORCHELASTIC_USE_AGENT_STORE="", MASTER_PORT="http"), "MASTER_PORT=http: expected", "unset"),
        (srun(MASTER_PORT=70000), "MASTER_PORT=70000: expected a whole number from 1 to 65535", "unset"),
        (without(srun(), "SLURM_PROCID"), "SLURM_PROCID is not set: expected srun to set it", "srun --ntasks=2 python"),
        (without(srun(), "SLURM_LOCALID"), "SLURM_LOCALID is not set: expected srun", "srun --ntasks"),
        (without(srun(), "SLURM_JOB_ID"), "SLURM_JOB_ID is not set", "srun --ntasks"),
        (srun(SLURM_PROCID=4), "SLURM_PROCID=4: expected a whole number from 0 to 3", "srun --ntasks"),
        (srun(SLURM_STEP_NUM_TASKS="four"), "SLURM_STEP_NUM_TASKS=four: expected a whole number", "srun --ntasks"),
        (srun(SLURM_NODEID=2), "SLURM_NODEID=2: expected a whole number from 0 to 1", "srun --ntasks"),
        (srun(SLURM_LOCALID=2), "SLURM_LOCALID=2: expected a whole number from 0 to 1", "srun --ntasks"),
        (srun(SLURM_STEP_TASKS_PER_NODE="2(y2)"), "SLURM_STEP_TASKS_PER_NODE=2(y2): expected tasks", "srun"),
        (without(srun(), "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST=: expected host names", "srun --ntasks"),
        (srun(SLURM_STEP_NODELIST="$(touch x)"), "SLURM_STEP_NODELIST=$(touch x): expected host", "srun"),
        (srun(0, SLURM_NODEID=1, SLURM_LOCALID=0), "SLURM_NODEID=1 of rank 0: expected it on the first machine, n01",
         "export MASTER_ADDR"),
        (mpirun(OMPI_COMM_WORLD_RANK=2), "OMPI_COMM_WORLD_RANK=2: expected a whole number from 0 to 1", "mpirun -n 2"),
        (mpirun(OMPI_COMM_WORLD_LOCAL_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0), "MASTER_ADDR is not set", "export"),
        (without(MPICH, "MPI_LOCALRANKID"), "MPI_LOCALRANKID is not set: expected mpirun", "mpirun -n 2 python"),
        (NODES | {"RANK": 2}, "RANK=2: expected a whole number from 0 to 1", "torchrun"),
        (srun(0, 2, SLURM_STEP_NUM_NODES=1) | torchrun(), "SLURM_STEP_NUM_TASKS=2: srun has started 2 tasks with",
         "srun --ntasks=1 --ntasks-per-node=1 torchrun"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named_with_what_was_found_and_what_works(environment, variables, found, command, tmp_path):
    environment(**variables)
    os.chdir(tmp_path)
    try:
        with pytest.raises(LaunchError) as caught:
            setup_distributed()
    finally:
        os.chdir(ROOT)
    assert found in str(caught.value) and command in str(caught.value) and "\n" not in str(caught.value)
    assert not dist.is_initialized() and list(tmp_path.iterdir()) == [], "no shell has read the node list"


def test_a_process_that_a_launched_script_spawned_does_not_take_its_parents_rank(environment, monkeypatch, caplog):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    for variables, name in (
        (srun(), "SLURM_PROCID=1"),
        (slurm_step(), "SLURM_PROCID=0"),
        (mpirun(), "OMPI_COMM_WORLD_RANK=1"),
        (MPICH, "PMI_RANK=1"),
    ):
        environment(**variables)
        with pytest.raises(LaunchError, match=f"{name} is the rank of the process that spawned this one"):
            setup_distributed()
    for store in ("True", ""):  # torchrun itself spawns if it is given a function; others set variables for each
        environment(**torchrun(TORCHELASTIC_USE_AGENT_STORE=store))
        assert distributed.find_launcher(port=None)[:2] == ("torchrun", 1)
    environment()
    distributed.find_launcher(port=None)
    assert "the one that spawned this one has not set RANK" in caplog.text


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n[1-3,07-09],login,gpu-a[01-02]-ib",
         ["n1", "n2", "n3", "n07", "n08", "n09", "login", "gpu-a01-ib", "gpu-a02-ib"]),
        ("gpu-a[01-04],gpu-b7", ["gpu-a01", "gpu-a02", "gpu-a03", "gpu-a04", "gpu-b7"]),
        ("gpu-a[01,03],gpu-b7", ["gpu-a01", "gpu-a03", "gpu-b7"]),
        ("r1n2,r2n[1,3]", ["r1n2", "r2n1", "r2n3"]),
        ("alpha,beta,tux[8-11]", ["alpha", "beta", "tux8", "tux9", "tux10", "tux11"]),
        ("ip-10-0-0-[1,3]", ["ip-10-0-0-1", "ip-10-0-0-3"]),
        ("gpu001.cluster.local,ip-10-0-0-[1-3]", ["gpu001.cluster.local", "ip-10-0-0-1", "ip-10-0-0-2", "ip-10-0-0-3"]),
        ("rack[1-2]n[098-101]", [f"rack{r}n{n:03}" for r in (1, 2) for n in range(98, 102)]),
        ("node", ["node"]),
    ],
)  # fmt: skip
def test_slurm_node_lists_are_expanded(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    ["", ",", "$(touch x)", "a;touch x", "n[1-3", "n1-3]", "n[3-1]", "n[]", "n[a-b]", "n[1-999999999]", "a b", "-n",
     "n[1[2]]", "`x`", "a\nb"],
)  # fmt: skip
def test_what_is_no_node_list_is_refused(nodelist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST="):
        expand_hosts(nodelist)
    assert list(tmp_path.iterdir()) == []


# Devices and cores


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes this machine one with so many GPUs; returns the list of those made current."""

    def gpus(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return gpus


def test_each_local_process_takes_the_gpu_of_its_local_rank(environment, gpus):
    current = gpus(4)
    assert [setup_device(k, 4).index for k in range(4)] == [device.index for device in current] == [0, 1, 2, 3]


def test_a_task_that_sees_one_gpu_takes_that_one_whatever_its_local_rank(environment, gpus):
    for variables in (srun(3), torchrun(3), srun(3) | torchrun(3, TORCHELASTIC_USE_AGENT_STORE=""), mpirun()):
        environment(**variables, CUDA_VISIBLE_DEVICES=3)
        gpus(1)
        assert setup_device(3, 4) == torch.device("cuda", 0)


@pytest.mark.parametrize("count", [1, 2])
def test_more_processes_than_gpus_are_refused(environment, gpus, count):
    environment(**torchrun())
    gpus(count)
    found = rf"3 processes on this machine, {count} GPU\(s\) with CUDA_VISIBLE_DEVICES=.not.*--nproc-per-node={count}"
    with pytest.raises(LaunchError, match=found):
        setup_device(0, 3)


def test_variables_that_count_machines_are_refused_where_a_machine_has_several_gpus(environment, gpus):
    environment(**NODES)
    gpus(8)
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    assert "count machines, and this one has 8 GPUs" in str(caught.value)
    assert "torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=8" in str(caught.value)


def test_a_pod_of_several_processes_is_told_to_start_them_with_torchrun(environment):
    # PyTorchJob with nprocPerNode: "2" on 2 pods, as of version 1.7: RANK counts pods, WORLD_SIZE processes.
    environment(**NODES | {"RANK": 1, "WORLD_SIZE": 4, "PET_NPROC_PER_NODE": 2, "PET_NNODES": 2})
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    assert "expected torchrun to start 2 processes on this machine" in str(caught.value)
    assert "torchrun --nnodes=$PET_NNODES --node-rank=$RANK --nproc-per-node=2" in str(caught.value)


def test_nccl_without_gpus_is_refused(environment, gpus):
    gpus(0)
    with pytest.raises(LaunchError, match="backend='nccl' needs GPUs and this process sees none"):
        setup_distributed(backend="nccl")


@pytest.mark.parametrize(
    ("variables", "affinity", "local_world_size", "cores"),
    [
        ({}, 16, 1, 16),
        ({}, 16, 4, 4),
        ({}, 2, 4, 1),
        (srun(SLURM_CPUS_ON_NODE=16), 64, 2, 8),  # two tasks on sixteen cores of sixty-four, not bound
        (srun(SLURM_CPUS_ON_NODE=16), 8, 2, 8),  # each bound to eight of its own
        (srun(SLURM_CPUS_ON_NODE=2), 64, 2, 1),
        (srun(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_CPUS_ON_NODE=16), 64, 1, 16),
        (srun(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_CPUS_ON_NODE=16) | torchrun(), 16, 4, 4),  # of one torchrun
    ],
)
def test_local_processes_share_the_cores_that_they_may_use(
    environment, monkeypatch, variables, affinity, local_world_size, cores
):
    environment(**variables)
    monkeypatch.setattr(distributed, "cpu_count", lambda: affinity)
    assert distributed.cores_per_process(local_world_size) == cores


def test_threads_are_the_share_of_cores_unless_the_environment_says_how_many(environment, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    setup_device(0, 1)
    monkeypatch.delenv("OMP_NUM_THREADS")
    setup_device(0, 10_000)
    assert chosen == [1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]"), "closed by peer"),
        (RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms"), "Timed out waiting"),
        (RuntimeError("/gloo/x: connect [127.0.1.1]:5: Connection refused"), "export GLOO_SOCKET_IFNAME="),
        (RuntimeError("Application timeout caused pair closure"), "Application timeout"),
        (dist.DistBackendError("NCCL error: remote process exited"), "remote process"),
        (dist.DistBackendError(f"NCCL error {'x' * 99} Last error: Connect to 10.0.0.1 returned 113(No route to host)"),
         "(Connect to 10.0.0.1 returned 113(No route to host)): ranks on several machines need export NCCL_SOCKET"),
        (dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("/gloo/ Connection closed"), None),
    ],
)  # fmt: skip
def test_the_loss_of_another_rank_is_told_from_other_errors(error, expected):
    told = distributed.lost_peer(error)
    assert told is None if expected is None else expected in told and told.startswith("lost another rank (")
    assert "/src/" not in str(told)


# Where ranks meet


def meet(world_size, ranks, port=None, timeout=30, before=lambda rank: None):
    """Send these ranks to one rendezvous, a thread each; returns what each got: a store, or an error."""
    url = f"tcp://localhost:{port or distributed.free_port()}"
    results = [None] * len(ranks)

    def go(k, rank):
        before(rank)
        try:
            results[k] = rendezvous(url, rank, world_size, timedelta(seconds=timeout))
        except LaunchError as error:
            results[k] = str(error)

    threads = [threading.Thread(target=go, args=arguments, daemon=True) for arguments in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_meet_whoever_comes_first():
    stores = meet(3, [2, 0, 1], before=lambda rank: time.sleep(0.5 * (rank < 2)))
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == stores[2].get("greeting") == b"hello"


def test_a_rank_that_is_there_twice_is_named_to_all():
    results = meet(3, [0, 1, 1])
    assert all("rank 1 is there twice, as process" in result for result in results)


def test_a_rank_that_is_there_a_second_time_later_is_turned_away():
    port = distributed.free_port()
    first = meet(2, [0, 1], port)
    assert all(isinstance(store, dist.Store) for store in first)
    (late,) = meet(2, [1], port)
    assert "rank 1 is there twice, as process" in late


def test_a_gpu_that_is_there_twice_is_named(monkeypatch, gpus):
    gpus(1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="b1-2c"))
    assert all("GPU b1-2c is there twice, as process" in result for result in meet(2, [0, 1]))


def test_ranks_that_do_not_come_are_named(caplog, monkeypatch):
    monkeypatch.setattr(distributed, "PATIENCE", 1)
    results = meet(4, [0, 2], timeout=3)
    assert all("ranks 1, 3 of 4 did not come to tcp://localhost:" in result for result in results)
    assert "waits for ranks 1, 3 of 4" in caplog.text


def test_a_rank_zero_that_does_not_come_is_named(monkeypatch, caplog):
    monkeypatch.setattr(distributed, "PATIENCE", 1)
    (result,) = meet(2, [1], timeout=3)
    assert "rank 1 could not reach rank 0 at localhost:" in result and "Connection refused" in result
    assert "rank 1 waits for rank 0 at localhost:" in caplog.text


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(distributed, "QUICK", 2)


def test_an_address_that_does_not_resolve_is_named(quick):
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"'no-such-host.invalid' does not resolve: expected .* MASTER_ADDR"):
        rendezvous("tcp://no-such-host.invalid:29500", 1, 2)
    assert time.monotonic() - begin < 15


def test_a_port_that_is_taken_is_named_with_a_free_one(quick):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        first, second = meet(2, [0, 1], port=port)
    assert f"port {port} of this machine is taken" in first and "export MASTER_PORT=" in first and "--dist-url" in first
    assert f"something that says nothing for 2 s answers at localhost:{port}" in second


def test_two_jobs_that_share_a_port_do_not_merge():
    port = distributed.free_port()
    other = distributed._listen(port, "2 ranks of job 7.0")
    with pytest.raises(LaunchError) as caught:
        rendezvous(f"tcp://localhost:{port}?job=8.0", 1, 2)
    assert other.get("job") == b"2 ranks of job 7.0"
    found = f"the store of 2 ranks of job 7.0 answers at localhost:{port}: expected the store of 2 ranks of job 8.0;"
    assert found in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:29500", "tcp://localhost", "tcp://localhost:x", "tcp://:1", "tcp://a:70000",
                                 "env://", "tcp://a:1/b", ""])  # fmt: skip
def test_what_is_no_address_is_refused(url):
    with pytest.raises(LaunchError, match="expected tcp://HOST:PORT"):
        rendezvous(url, 0, 2)


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(LaunchError, match="rank 2 of a world of 2: expected a rank from 0 to 1"):
        rendezvous("tcp://localhost:29500", 2, 2)


def test_setup_distributed_twice_is_refused_and_once_more_after_cleanup_is_not(environment):
    d = setup_distributed()
    assert (d.rank, d.world_size, d.launcher, d.backend, d.is_main) == (0, 1, "python", "gloo", True)
    try:
        with pytest.raises(LaunchError, match="called twice"):
            setup_distributed()
    finally:
        distributed.cleanup()
    setup_distributed()
    distributed.cleanup()
    distributed.cleanup()


# The file alone, beside a script of ten lines


def outputs(*processes):
    """All lines that processes write, once all have ended with exit code 0."""
    lines = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        lines += out.splitlines()
    return sorted(lines)


def started(folder, *command, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    env |= {name: str(value) for name, value in variables.items()} | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=env, **pipes)


TWO = ["{} 0 of 2, 0 of 2, sum 3", "{} 1 of 2, 1 of 2, sum 3"]


def test_the_copied_file_makes_plain_python_a_world_of_one(copy):
    assert outputs(started(copy, "train.py")) == ["python 0 of 1, 0 of 1, sum 1"]


def test_the_copied_file_works_under_torchrun(copy):
    process = started(copy, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    assert outputs(process) == [line.format("torchrun") for line in TWO]


def test_the_copied_file_works_with_torchruns_words_from_somebody_else(copy):
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": distributed.free_port()}
    processes = [started(copy, "train.py", RANK=r, LOCAL_RANK=r, **variables) for r in (0, 1)]
    assert outputs(*processes) == [line.format("torchrun") for line in TWO]


def test_the_copied_file_works_with_mpiruns_variables(copy):
    port = distributed.free_port()
    processes = [started(copy, "train.py", **mpirun(r, MASTER_PORT=port)) for r in (0, 1)]
    assert outputs(*processes) == [line.format("mpirun") for line in TWO]


def test_the_copied_file_works_with_variables_that_count_machines(copy):
    port = distributed.free_port()
    given = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    assert outputs(*(started(copy, "train.py", RANK=r, **given) for r in (0, 1))) == [
        "nodes 0 of 2, 0 of 1, sum 3",
        "nodes 1 of 2, 0 of 1, sum 3",
    ]
