"""setup_distributed: who started this process, and do the ranks meet? No launcher runs here but in
the last part.
"""

import contextlib
import http.server
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launchers import by_hand, meet, mpirun, slurm_step, srun, torchrun, without
from processes import ROOT, finished, start_copy

from common import distributed
from common.distributed import (
    Address,
    LaunchError,
    check_processes,
    find_address,
    find_launcher,
    first_host,
    free_port,
    original_environment,
    rendezvous,
    setup_device,
    setup_distributed,
    sum_over_ranks,
)


def find(port=None):
    """What setup_distributed() finds: (launcher, *ranks, address)."""
    environment = original_environment()
    launcher, ranks = find_launcher(environment)
    check_processes(launcher, environment)
    return launcher, *ranks, find_address(launcher, ranks, environment, port)


SBATCH_SHELL = {
    "SLURM_JOB_ID": 7,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "SLURM_NTASKS": 4,
    "SLURM_NODEID": 0,
}
NODES = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "job-0", "MASTER_PORT": 23456}
MPICH = {
    "PMI_RANK": 1,
    "PMI_SIZE": 2,
    "MPI_LOCALRANKID": 0,
    "MPI_LOCALNRANKS": 1,
    "MASTER_ADDR": "m0",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("python", 0, 1, 0, 1, None)),
        (torchrun(), ("torchrun", 1, 4, 1, 2, None)),
        (torchrun(3) | srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)"),
         ("torchrun", 3, 4, 1, 2, None)),
        (by_hand(), ("torchrun", 1, 4, 1, 2, ("node0", 29500, ""))),
        (without(by_hand(), "LOCAL_WORLD_SIZE"),
         ("torchrun", 1, 4, 1, None, ("node0", 29500, ""))),
        (srun(), ("srun", 1, 4, 1, 2, ("n01", 15719, "7.0"))),
        (srun(2), ("srun", 2, 4, 0, 2, ("n01", 15719, "7.0"))),
        (srun(SLURM_JOB_ID=8), ("srun", 1, 4, 1, 2, ("n01", 22074, "8.0"))),
        (srun(SLURM_STEP_ID=3), ("srun", 1, 4, 1, 2, ("n01", 19261, "7.3"))),
        (srun(MASTER_PORT=4000, MASTER_ADDR="ib0"), ("srun", 1, 4, 1, 2, ("ib0", 4000, "7.0"))),
        (srun(SLURM_NTASKS=64, SLURM_JOB_NODELIST="a,n[01-31]"),
         ("srun", 1, 4, 1, 2, ("n01", 15719, "7.0"))),
        (srun(MASTER_ADDR="fd00::1"), ("srun", 1, 4, 1, 2, ("fd00::1", 15719, "7.0"))),
        (srun(SLURM_STEP_ID=4294967290), ("srun", 1, 4, 1, 2, ("n01", 25735, "7.4294967290"))),
        (srun(WORLD_SIZE=4), ("srun", 1, 4, 1, 2, ("n01", 15719, "7.0"))),
        (srun(0, 1) | mpirun(), ("mpirun", 1, 2, 1, 2, ("127.0.0.1", 29500, ""))),
        (srun(0, 1) | MPICH, ("mpirun", 1, 2, 0, 1, ("m0", 29500, ""))),
        (srun(PMI_RANK=9, PMI_SIZE=99), ("srun", 1, 4, 1, 2, ("n01", 15719, "7.0"))),
        (srun(5, 7, "n[1-3]", SLURM_NODEID=1, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="5,1(x2)"),
         ("srun", 5, 7, 0, 1, ("n1", 15719, "7.0"))),
        (SBATCH_SHELL, ("python", 0, 1, 0, 1, None)),
        (mpirun(), ("mpirun", 1, 2, 1, 2, ("127.0.0.1", 29500, ""))),
        (mpirun(MASTER_ADDR="m0", MASTER_PORT=5000), ("mpirun", 1, 2, 1, 2, ("m0", 5000, ""))),
        (MPICH, ("mpirun", 1, 2, 0, 1, ("m0", 29500, ""))),
        ({"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}, ("torchrun", 0, 1, 0, 1, None)),
        (NODES, ("nodes", 1, 2, 0, 1, ("job-0", 23456, ""))),
        (NODES | {"WORLD_SIZE": 1, "RANK": 0}, ("nodes", 0, 1, 0, 1, None)),
    ],
)  # fmt: skip
def test_the_launcher_is_recognised_by_its_variables(environment, variables, expected):
    environment(**variables)
    assert find() == expected


def test_two_open_mpi_jobs_on_one_machine_meet_at_two_ports(environment):
    addresses = set()
    for job in ("prterun-a-1@1", "prterun-a-2@1"):
        environment(**mpirun(PMIX_NAMESPACE=job))
        host, port, name = find()[-1]
        addresses.add((host, port))
        assert name == job
    assert len(addresses) == 2


def test_a_port_is_used_unless_the_environment_names_one(environment):
    """A port that is asked for is used unless the environment names one."""
    for variables, job in (srun(), "7.0"), (mpirun(), ""), (MPICH, ""):
        environment(**variables)
        assert find(port=1234)[-1][1:] == (1234, job)
        environment(**variables | {"MASTER_PORT": 4000})
        assert find(port=1234)[-1][1:] == (4000, job)


def test_the_shell_of_an_sbatch_file_is_one_process(environment, caplog):
    """The shell of an sbatch file is told that it is one process."""
    environment(**SBATCH_SHELL)
    with caplog.at_level(logging.WARNING):
        find()
    assert (
        "running as one process" in caplog.text
        and "SLURM_NTASKS=4" in caplog.text
        and "srun python" in caplog.text
    )


def test_torchruns_that_do_not_know_of_each_other_are_told_so(environment, caplog):
    environment(**srun(0, 2) | torchrun(0, GROUP_WORLD_SIZE=1))
    find()
    assert "each of 2 machines trains alone: for one run of all, torchrun --nnodes=2" in caplog.text


@pytest.mark.parametrize(
    ("variables", "found", "command"),
    [
        (torchrun(RANK=4), "RANK=4: expected a whole number from 0 to 3",
         "torchrun --nproc-per-node"),
        (torchrun(RANK="one"), "RANK=one: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(RANK=-1), "RANK=-1: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(RANK=""), "RANK=: expected a whole number from 0 to 3", "torchrun"),
        (torchrun(WORLD_SIZE=0), "WORLD_SIZE=0: expected a whole number of 1 or more", "torchrun"),
        (torchrun(WORLD_SIZE="4.0"), "WORLD_SIZE=4.0: expected a whole number of 1 or more",
         "torchrun"),
        (torchrun(LOCAL_RANK=2), "LOCAL_RANK=2: expected a whole number from 0 to 1", "torchrun"),
        (torchrun(LOCAL_WORLD_SIZE=5), "LOCAL_WORLD_SIZE=5: expected a whole number from 1 to 4",
         "torchrun"),
        ({"RANK": 0}, "RANK set without WORLD_SIZE and LOCAL_RANK: expected all three, or none",
         "torchrun"),
        ({"WORLD_SIZE": 2, "LOCAL_RANK": 0}, "WORLD_SIZE and LOCAL_RANK set without RANK",
         "torchrun"),
        (without(by_hand(), "MASTER_ADDR"), "MASTER_ADDR is not set", "export"),
        (by_hand(MASTER_PORT="http"), "MASTER_PORT=http: expected", "unset"),
        (srun(MASTER_PORT=70000), "MASTER_PORT=70000: expected a whole number from 1 to 65535",
         "unset"),
        (without(srun(), "SLURM_PROCID"), "SLURM_PROCID=(not set): expected a whole number",
         "srun --ntasks=2 python"),
        (without(srun(), "SLURM_LOCALID"), "SLURM_LOCALID=(not set): expected a whole number",
         "srun --ntasks"),
        (without(srun(), "SLURM_JOB_ID"), "SLURM_JOB_ID=(not set): expected a whole number",
         "srun --ntasks"),
        (srun(SLURM_PROCID=4), "SLURM_PROCID=4: expected a whole number from 0 to 3",
         "srun --ntasks"),
        (srun(SLURM_STEP_NUM_TASKS="four"), "SLURM_STEP_NUM_TASKS=four: expected a whole number",
         "srun --ntasks"),
        (srun(SLURM_NODEID=2), "SLURM_NODEID=2: expected a whole number from 0 to 1",
         "srun --ntasks"),
        (srun(SLURM_LOCALID=2), "SLURM_LOCALID=2: expected a whole number from 0 to 1",
         "srun --ntasks"),
        (srun(SLURM_STEP_TASKS_PER_NODE="2(y2)"), "SLURM_STEP_TASKS_PER_NODE=2(y2): expected tasks",
         "srun"),
        (without(srun(), "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST=: expected host names",
         "srun --ntasks"),
        (srun(SLURM_STEP_NODELIST="$(touch x)"), "SLURM_STEP_NODELIST=$(touch x): expected host",
         "srun"),
        (srun(0, SLURM_NODEID=1, SLURM_LOCALID=0),
         "rank 0 is not on the first machine, n01: expected --distrib",
         "export MASTER_ADDR"),
        (mpirun(OMPI_COMM_WORLD_RANK=2),
         "OMPI_COMM_WORLD_RANK=2: expected a whole number from 0 to 1", "mpirun -n 2"),
        (mpirun(OMPI_COMM_WORLD_LOCAL_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0),
         "MASTER_ADDR is not set", "mpirun -x"),
        (without(MPICH, "MPI_LOCALRANKID"), "MPI_LOCALRANKID=(not set): expected a whole number",
         "mpirun -n 2 python"),
        (NODES | {"RANK": 2}, "RANK=2: expected a whole number from 0 to 1", "torchrun"),
        (srun(0, 2, SLURM_STEP_NUM_NODES=1) | torchrun(),
         "SLURM_STEP_NUM_TASKS=2: srun has started 2 tasks with",
         "srun --ntasks=1 --ntasks-per-node=1 torchrun"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named_with_what_works(
    environment, variables, found, command, tmp_path
):
    """Wrong variables are named with what was found and what works."""
    environment(**variables)
    os.chdir(tmp_path)
    try:
        with pytest.raises(LaunchError) as caught:
            setup_distributed()
    finally:
        os.chdir(ROOT)
    assert (
        found in str(caught.value)
        and command in str(caught.value)
        and "\n" not in str(caught.value)
    )
    assert not dist.is_initialized() and list(tmp_path.iterdir()) == [], (
        "no shell has read the node list"
    )


def test_a_spawned_process_does_not_take_its_parents_rank(environment, monkeypatch, caplog):
    """A process that a launched script spawned does not take its parents rank."""
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    for variables, launcher in (
        (srun(), "srun"),
        (slurm_step(), "srun"),
        (mpirun(), "mpirun"),
        (MPICH, "mpirun"),
    ):
        environment(**variables)
        with pytest.raises(
            LaunchError, match=f"{launcher} has started a script that starts processes itself"
        ):
            setup_distributed()
    for variables in torchrun(), by_hand():  # torchrun itself spawns if it is given a function
        environment(**variables)
        assert find()[:2] == ("torchrun", 1)
    environment()
    find()
    assert "the process that spawned this one has not set RANK" in caplog.text


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[1-3,07-09],login,gpu-a[01-02]-ib", "n1"),
        ("gpu-a[01-02]-ib,n[1-3,07-09]", "gpu-a01-ib"),
        ("gpu-a[01,03],gpu-b7", "gpu-a01"),
        ("r1n2,r2n[1,3]", "r1n2"),
        ("ip-10-0-0-[1,3]", "ip-10-0-0-1"),
        ("gpu001.cluster.local,ip-10-0-0-[1-3]", "gpu001.cluster.local"),
        ("rack[1-2]n[098-101]", "rack1n098"),
        ("node", "node"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "$(touch x)",
        "a;touch x",
        "n[1-3",
        "n1-3]",
        "n[]",
        "n[a-b]",
        "a b",
        "-n",
        "n[1[2]]",
        "`x`",
        "a\nb",
    ],
)
def test_what_is_no_node_list_is_refused(nodelist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST="):
        first_host(nodelist)
    assert list(tmp_path.iterdir()) == []


# Devices and cores


def test_each_local_process_takes_the_gpu_of_its_local_rank(environment, gpus):
    current = gpus(4)
    assert [setup_device(k, 4).index for k in range(4)] == current == [0, 1, 2, 3]


def test_a_task_that_sees_one_gpu_takes_that_one(environment, gpus):
    """A task that sees one gpu takes that one whatever its local rank."""
    for variables in (srun(3), torchrun(3), srun(3) | by_hand(3), mpirun()):
        environment(**variables, CUDA_VISIBLE_DEVICES=3)
        gpus(1)
        assert setup_device(3, 4) == torch.device("cuda", 0)


def test_one_slurm_task_with_several_gpus_is_refused(environment, gpus):
    """One slurm task with several gpus is refused with the ways that work."""
    alone = srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)")
    environment(**alone)
    gpus(2)
    with pytest.raises(
        LaunchError,
        match=r"one Slurm task with 2 GPUs, .*srun --ntasks-per-node=2 python .*, or srun torchrun",
    ):
        setup_device(0, 1)
    environment(**alone, **torchrun(0))
    assert setup_device(0, 2) == torch.device("cuda", 0), "a torchrun in the task"
    assert setup_device(0, 1) == torch.device("cuda", 0), (
        "processes whose ranks somebody has set by hand"
    )
    environment(**srun(0))
    assert setup_device(0, 2) == torch.device("cuda", 0), "a task for each GPU"
    environment(**alone)
    gpus(1)
    assert setup_device(0, 1) == torch.device("cuda", 0)


def test_accelerators_with_a_backend_of_their_own_are_used(environment, gpus):
    """Accelerators with a backend of their own are used and apples is not."""
    gpus(2, "xpu")
    assert setup_device(1, 2) == torch.device("xpu", 1)
    gpus(1, "mps")
    assert setup_device(0, 1) == torch.device("cpu")


@pytest.mark.parametrize("count", [1, 2])
def test_more_processes_than_gpus_are_refused(environment, gpus, count):
    environment(**torchrun())
    gpus(count)
    found = rf"3 processes on this machine, {count} GPU\(s\): expected .*--nproc-per-node={count}"
    with pytest.raises(LaunchError, match=found):
        setup_device(0, 3)


def test_variables_that_count_machines_need_one_gpu_on_each(environment, gpus):
    """Variables that count machines are refused where a machine has several gpus."""
    environment(**NODES)
    gpus(8)
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    assert "counts machines, and this one should run 8 processes" in str(caught.value)
    assert "torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=8" in str(caught.value)


def test_a_pod_of_several_processes_is_told_to_use_torchrun(environment):
    """A pod of several processes is told to start them with torchrun."""
    # PyTorchJob with nprocPerNode: "2" on 2 pods, as of version 1.7: RANK counts pods, WORLD_SIZE
    # processes.
    environment(**NODES | {"RANK": 1, "WORLD_SIZE": 4, "PET_NPROC_PER_NODE": 2, "PET_NNODES": 2})
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    assert "this one should run 2 processes: expected torchrun" in str(caught.value)
    assert "torchrun --nnodes=$PET_NNODES --node-rank=$RANK --nproc-per-node=2" in str(caught.value)


def test_nccl_without_gpus_is_refused(environment, gpus):
    gpus(0)
    with pytest.raises(
        LaunchError, match="backend='nccl', and this process sees no GPU: expected a GPU, or gloo"
    ):
        setup_distributed(backend="nccl")


@pytest.mark.parametrize(
    ("variables", "affinity", "local_world_size", "cores"),
    [
        ({}, 16, 1, 16),
        ({}, 16, 4, 4),
        ({}, 2, 4, 1),
        # two tasks on sixteen cores of sixty-four, not bound
        (srun(SLURM_CPUS_ON_NODE=16), 64, 2, 8),
        (srun(SLURM_CPUS_ON_NODE=16), 8, 2, 8),  # each bound to eight of its own
        (srun(SLURM_CPUS_ON_NODE=2), 64, 2, 1),
        (srun(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_CPUS_ON_NODE=16), 64, 1, 16),
        # of one torchrun
        (srun(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_CPUS_ON_NODE=16) | torchrun(), 16, 4, 4),
    ],
)
def test_local_processes_share_the_cores_that_they_may_use(
    environment, monkeypatch, variables, affinity, local_world_size, cores
):
    environment(**variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity))
    assert distributed.cores_per_process(local_world_size) == cores


def test_threads_are_the_share_of_cores_unless_set(environment, monkeypatch):
    """Threads are the share of cores unless the environment says how many."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    setup_device(0, 1)
    monkeypatch.delenv("OMP_NUM_THREADS")
    setup_device(0, 10_000)
    assert chosen == [1]


# Where ranks rendezvous


def test_ranks_meet_whoever_comes_first():
    stores = meet(3, [2, 0, 1], before=lambda rank: time.sleep(0.5 * (rank < 2)))
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == stores[2].get("greeting") == b"hello"


def test_a_rank_that_is_there_twice_is_named_to_all():
    results = meet(3, [0, 1, 1])
    assert all("rank 1 is claimed twice, by process" in result for result in results)


def test_a_rank_that_is_there_a_second_time_later_is_turned_away():
    port = free_port()
    first = meet(2, [0, 1], port)
    assert all(isinstance(store, dist.Store) for store in first)
    (late,) = meet(2, [1], port)
    assert "rank 1 is claimed twice, by process" in late


def test_a_gpu_that_is_there_twice_is_named(monkeypatch):
    properties = SimpleNamespace(uuid="b1-2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    results = meet(2, [0, 1], device=torch.device("cuda", 0))
    assert all("GPU b1-2c is claimed twice, by process" in result for result in results)


def test_ranks_that_do_not_come_are_named(caplog, monkeypatch):
    monkeypatch.setattr(distributed, "WARN_AFTER", 1)
    results = meet(4, [0, 2], timeout=3)
    assert all("ranks 1, 3 of 4 did not join rank 0 on" in result for result in results)
    assert "is waiting for ranks 1, 3 of 4" in caplog.text


def test_a_rank_zero_that_does_not_come_is_named(monkeypatch, caplog):
    monkeypatch.setattr(distributed, "WARN_AFTER", 1)
    (result,) = meet(2, [1], timeout=3)
    assert (
        "rank 1 could not reach rank 0 at localhost:" in result and "Connection refused" in result
    )
    assert "rank 1 is waiting for the store of rank 0 at localhost:" in caplog.text


def test_an_address_that_does_not_resolve_is_named(quick):
    with pytest.raises(
        LaunchError, match=r"'no-such-host.invalid' does not resolve: expected .* MASTER_ADDR"
    ):
        rendezvous(Address("no-such-host.invalid", 29500, ""), 1, 2)


def test_the_name_of_a_pod_may_become_known_late(monkeypatch):
    monkeypatch.setattr(distributed, "NETWORK_TIMEOUT", 0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    known_at = time.monotonic() + 2
    look_up = socket.getaddrinfo

    def late(host, *arguments, **options):
        if time.monotonic() < known_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    stores = meet(2, [0, 1])
    assert all(isinstance(store, dist.Store) for store in stores), stores


def test_a_port_that_this_user_may_not_use_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("The server socket has failed to bind\n(errno: 13 - Permission denied).")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    (result,) = meet(2, [0], port=80)
    assert "port 80 of this machine cannot be used (The server" in result and "\n" not in result


def test_a_store_that_ends_while_a_rank_connects_is_a_lost_rank_0(monkeypatch):
    def connect(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(distributed, "connect", connect)
    with pytest.raises(LaunchError, match=r"lost rank 0, which kept the store at host1:29500: "):
        rendezvous(distributed.Address("host1", 29500, ""), 1, 2)


def test_a_machine_on_which_no_port_can_be_used_is_told_so(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(LaunchError, match=r"none of 100 ports from .* can be used"):
        free_port()


def test_a_port_that_is_taken_is_named_with_a_free_one(monkeypatch):
    with socket.create_server(("", 0)) as stranger:  # which says nothing to those who connect
        port = stranger.getsockname()[1]
        first, second = meet(2, [0, 1], port=port, timeout=3)
    assert f"port {port} of this machine is taken" in first and "export MASTER_PORT=" in first
    expected = (
        f"could not reach rank 0 at localhost:{port} (something answers there, "
        "but not as the store of 2 ranks)"
    )
    assert expected in second and "\n" not in second


def test_a_web_server_on_the_port_is_one_line(capfd):
    with http.server.ThreadingHTTPServer(("", 0), http.server.BaseHTTPRequestHandler) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        (result,) = meet(2, [1], port=stranger.server_port, timeout=3)
        stranger.daemon_threads, stranger.block_on_close = True, False
        stranger.shutdown()
    assert (
        "(something answers there, but not as the store of 2 ranks)" in result
        and "\n" not in result
    )


class SlowListener(threading.Thread):
    """Listens in front of a store, and lets each connection wait before it passes it on."""

    def __init__(self, port, seconds):
        super().__init__(daemon=True)
        self.server = socket.create_server(("", 0))
        self.port = port
        self.seconds = seconds
        self.start()

    def run(self):
        while True:
            client, _ = self.server.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        time.sleep(self.seconds)
        with socket.create_connection(("localhost", self.port)) as store, client:
            threading.Thread(target=self.pump, args=(store, client), daemon=True).start()
            self.pump(client, store)

    def pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)


def test_a_slow_store_is_not_a_stranger(monkeypatch, caplog, quick):
    """Slow reverse name look-ups, for one, make a store answer late."""
    monkeypatch.setattr(distributed, "WARN_AFTER", 1)
    port = free_port()
    results = []
    slow = SlowListener(port, seconds=4).server.getsockname()[1]
    first = threading.Thread(target=lambda: results.extend(meet(2, [0], port)))
    first.start()
    results += meet(2, [1], slow)
    first.join()
    assert [isinstance(store, dist.Store) for store in results] == [True, True], results
    assert f"rank 1 is waiting for the store of rank 0 at localhost:{slow}" in caplog.text


def test_two_jobs_that_share_a_port_do_not_merge():
    port = free_port()
    stores = []
    threading.Thread(
        target=lambda: stores.extend(meet(2, [0], port, 5, job="7.0")), daemon=True
    ).start()
    (result,) = meet(2, [1], port, job="8.0")
    found = (
        f"the store of 2 ranks of job 7.0 answers at localhost:{port}: "
        "expected the store of 2 ranks of job 8.0;"
    )
    assert found in result


def test_setup_distributed_twice_is_refused(
    environment,
):
    """Setup distributed twice is refused and once more after the group is destroyed is not."""
    with distributed.cleaned_up():
        d = setup_distributed()
        assert (d.rank, d.world_size, d.launcher, d.backend, d.is_main) == (
            0,
            1,
            "python",
            "gloo",
            True,
        )
        with pytest.raises(LaunchError, match="called twice"):
            setup_distributed()
    with distributed.cleaned_up():
        assert setup_distributed().launcher == "python"


class Model:
    """Something that a weak reference can watch."""


def test_an_error_frees_the_model_that_its_frames_hold():
    watched = []

    def train():
        model = Model()
        watched.append(weakref.ref(model))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as error, distributed.cleaned_up():
        train()
    assert watched[0]() is None and error.value.__traceback__


# The variables that it sets, and those who find them


@pytest.fixture
def join(environment, monkeypatch):
    """A function that joins a process group with these variables, which needs no other rank to be
    there.
    """
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(distributed, "rendezvous", lambda *_: dist.HashStore())

    def join(**variables):
        environment(**variables)
        return setup_distributed()

    return join


def read(*names):
    return tuple(os.environ.get(name) for name in names)


SIX = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "1", "0", "1", "127.0.0.1")),
        (srun(3), ("3", "4", "1", "2", "n01", "15719")),
        (srun(1, WORLD_SIZE=64, MASTER_PORT=4000), ("1", "4", "1", "2", "n01", "4000")),
        (mpirun(), ("1", "2", "1", "2", "127.0.0.1", "29500")),
        (MPICH, ("1", "2", "0", "1", "m0", "29500")),
        (NODES, ("1", "2", "0", "1", "job-0", "23456")),
    ],
)
def test_the_variables_of_torchrun_are_set_under_every_launcher(join, variables, expected):
    join(**variables)
    assert read(*SIX)[: len(expected)] == expected
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536


@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_rank_0_alone_is_main_on_two_machines(join, launcher):
    """The second machine has a process of local rank 0 too."""
    ranks = [join(**launcher(rank)) for rank in range(4)]
    assert [d.local_rank for d in ranks] == [0, 1, 0, 1]
    assert [d.is_main for d in ranks] == [True, False, False, False]


def test_under_torchrun_nothing_is_overwritten(join):
    join(**torchrun())
    before = {name: str(value) for name, value in torchrun().items()}
    assert {name: os.environ[name] for name in before} == before
    assert find()[:5] == ("torchrun", 1, 4, 1, 2)


def test_under_torchrun_no_port_is_tried(join, monkeypatch):
    """A sandbox may forbid it."""
    monkeypatch.setattr(distributed, "free_port", lambda: 1 / 0)
    join(**torchrun())


@pytest.mark.parametrize("variables", [{}, srun(3), mpirun(), MPICH, NODES])
def test_a_second_call_is_not_fooled_by_the_first(join, variables):
    first = join(**variables)
    found = find()
    assert setup_distributed() == first
    assert find() == found


def test_a_child_is_not_fooled_by_the_variables_of_its_parent(join, monkeypatch):
    """A task of srun starts a tool, without srun's variables: it is one process."""
    join(**srun(3))
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    assert find() == ("python", 0, 1, 0, 1, None)
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert find()[0] == "python"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0},
         ("torchrun", 0, 2, 0, None, "127.0.0.1", 5000)),
        ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1},
         ("torchrun", 1, 2, 1, None, "127.0.0.1", 5000)),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "m1"},
         ("torchrun", 0, 2, 0, 2, "m1", 5000)),
        ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 6000},
         ("torchrun", 1, 2, 1, 2, "127.0.0.1", 6000)),
    ],
)  # fmt: skip
def test_what_somebody_sets_by_hand_for_a_child_wins(join, monkeypatch, variables, expected):
    join(MASTER_PORT=5000)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    *ranks, address = find()
    assert (*ranks, *address[:2]) == expected


# The file alone, beside a script of ten lines


def outputs(*processes):
    """All lines that processes write, once all have ended with exit code 0."""
    lines = []
    for process in processes:
        code, out, err = finished(process)
        assert code == 0, err
        lines += out.splitlines()
    return sorted(lines)


TWO = ["{} 0 of 2, 0 of 2, sum 3", "{} 1 of 2, 1 of 2, sum 3"]


def test_the_copied_file_makes_plain_python_a_world_of_one(copy):
    assert outputs(start_copy(copy, "train.py")) == ["python 0 of 1, 0 of 1, sum 1"]


def test_the_copied_file_works_under_torchrun(copy):
    process = start_copy(copy, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    assert outputs(process) == [line.format("torchrun") for line in TWO]


@pytest.mark.slow
def test_the_copied_file_works_with_variables_set_by_hand(copy):
    """The copied file works with torchruns words from somebody else."""
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    processes = [start_copy(copy, "train.py", RANK=r, LOCAL_RANK=r, **variables) for r in (0, 1)]
    assert outputs(*processes) == [line.format("torchrun") for line in TWO]


SPAWN = """\
import os, runpy, sys
import torch.multiprocessing as mp

def run(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    runpy.run_path("train.py", run_name="__main__")

if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_the_copied_file_works_in_processes_of_mp_spawn(copy):
    """The copied file works in processes of mp spawn with variables set by hand."""
    (copy / "spawn.py").write_text(SPAWN)
    assert outputs(start_copy(copy, "spawn.py", str(free_port()))) == [
        line.format("torchrun") for line in TWO
    ]


def test_the_copied_file_works_with_mpiruns_variables(copy):
    port = free_port()
    processes = [start_copy(copy, "train.py", **mpirun(r, MASTER_PORT=port)) for r in (0, 1)]
    assert outputs(*processes) == [line.format("mpirun") for line in TWO]


@pytest.mark.slow
def test_the_copied_file_works_where_variables_count_machines(copy):
    """The copied file works with variables that count machines."""
    port = free_port()
    given = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    assert outputs(*(start_copy(copy, "train.py", RANK=r, **given) for r in (0, 1))) == [
        "nodes 0 of 2, 0 of 1, sum 3",
        "nodes 1 of 2, 0 of 1, sum 3",
    ]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_short_version_of_the_docs_works(tmp_path, launcher):
    page = (ROOT / "docs/copy-setup-distributed.md").read_text()
    (tmp_path / "short.py").write_text(
        re.search("```python\n(# torchrun\n[^`]*def setup.*?)```", page, re.S)[1]
    )
    if launcher == "torchrun":
        processes = [
            start_copy(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", "short.py")
        ]
    else:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        processes = [
            start_copy(tmp_path, "short.py", **slurm_step(r, 2), **address) for r in (0, 1)
        ]
    assert outputs(*processes) == ["2 ranks, sum 2"]


def test_sum_over_ranks_is_a_new_tensor():
    """A caller goes on counting in its own."""
    setup_distributed()
    mine = torch.ones(2)
    total = sum_over_ranks(mine)
    total += 1
    assert mine.tolist() == [1, 1]


def test_a_name_server_that_is_busy_is_asked_again(monkeypatch):
    answers = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), None])
    original = socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host == "busy" and (error := next(answers)):
            raise error
        return original("127.0.0.1" if host == "busy" else host, *args, **options)

    monkeypatch.setattr(distributed, "NETWORK_TIMEOUT", 0)
    monkeypatch.setattr(distributed.socket, "getaddrinfo", getaddrinfo)
    assert distributed.open_store(Address("busy", free_port(), ""), 0, 1, timedelta(seconds=20))


def test_the_store_has_the_timeout_of_the_job():
    """It begins with a longer one, which is for ranks that wait for rank 0."""
    timeout = timedelta(seconds=33)
    assert (
        distributed.rendezvous(Address("127.0.0.1", free_port(), ""), 0, 1, timeout).timeout
        == timeout
    )


def test_a_rank_that_dies_while_it_joins_is_told_of():
    """It has claimed its rank, and not yet been counted."""
    store = torch.distributed.HashStore()
    for rank in range(2):
        store.set(f"rank {rank}", "a process")
    address = Address("localhost", 29500, "")
    distributed.wait_for_verdict(store, 2, address, timedelta(seconds=0.1))
    found, expected, _ = json.loads(store.get("verdict"))
    assert found.startswith("a rank that fell silent while it joined did not join rank 0 on ")
    assert expected == "all within 0:00:00.100000"
