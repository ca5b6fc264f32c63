"""setup_distributed: who started this process, and do the ranks meet? No launcher runs here but in
the last part.
"""

import json
import multiprocessing
import os
import re
import signal
import socket
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launchers import TRAIN, by_hand, meet, mpirun, slurm_step, srun, torchrun, without
from on_hosts import without_launcher
from processes import ROOT, finished, read_until, start_copy
from ranks import Ranks

from common import distributed
from common.distributed import (
    Address,
    LaunchError,
    check_launch,
    find_address,
    find_launcher,
    first_host,
    free_port,
    rendezvous,
    setup_device,
    setup_distributed,
)


def find(port=None):
    """What setup_distributed() finds: (launcher, *ranks, address)."""
    launcher, ranks = find_launcher()
    check_launch(launcher)
    return launcher, *ranks, find_address(launcher, ranks, port)


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
# Of the job or of srun itself: they do not describe the step.
OTHER = {"SLURM_NTASKS": 64, "SLURM_JOB_NODELIST": "a,n[01-31]", "WORLD_SIZE": 4}
OTHER |= {"PMI_RANK": 9, "PMI_SIZE": 99}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("python", 0, 1, 0, 1, None)),
        (torchrun(3) | srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)"),
         ("torchrun", 3, 4, 1, 2, None)),
        (by_hand(), ("torchrun", 1, 4, 1, 2, ("node0", 29500, ""))),
        (without(by_hand(), "LOCAL_WORLD_SIZE"),
         ("torchrun", 1, 4, 1, None, ("node0", 29500, ""))),
        (srun(**OTHER), ("srun", 1, 4, 1, 2, ("n01", 15719, "7.0"))),
        (srun(SLURM_STEP_ID=4294967290), ("srun", 1, 4, 1, 2, ("n01", 25735, "7.4294967290"))),
        (srun(MASTER_PORT=4000, MASTER_ADDR="fd00::1"),
         ("srun", 1, 4, 1, 2, ("fd00::1", 4000, "7.0"))),
        (srun(5, 7, "n[1-3]", SLURM_NODEID=1, SLURM_LOCALID=0, SLURM_STEP_TASKS_PER_NODE="5,1(x2)"),
         ("srun", 5, 7, 0, 1, ("n1", 15719, "7.0"))),
        (SBATCH_SHELL, ("python", 0, 1, 0, 1, None)),
        (srun(0, 1) | mpirun(PMIX_NAMESPACE="prterun-a-1@1"),
         ("mpirun", 1, 2, 1, 2, ("127.0.0.1", 14745, "prterun-a-1@1"))),
        (srun(0, 1) | MPICH, ("mpirun", 1, 2, 0, 1, ("m0", 29500, ""))),
        (NODES, ("nodes", 1, 2, 0, 1, ("job-0", 23456, ""))),
    ],
)  # fmt: skip
def test_the_launcher_is_recognised_by_its_variables(environment, variables, expected):
    environment(**variables)
    assert find() == expected


def test_a_port_is_used_unless_the_environment_names_one(environment):
    for variables, job in (srun(), "7.0"), (MPICH, ""):
        environment(**variables)
        assert find(port=1234)[-1][1:] == (1234, job)
        environment(**variables | {"MASTER_PORT": 4000})
        assert find(port=1234)[-1][1:] == (4000, job)


def test_the_shell_of_an_sbatch_file_is_one_process(environment, caplog):
    environment(**srun())
    find()
    assert not caplog.text
    environment(**SBATCH_SHELL)
    find()
    command = f"srun python {distributed.SCRIPT}"
    assert f"running as one process, though SLURM_NTASKS=4: {command}" in caplog.text


def test_torchruns_that_do_not_know_of_each_other_are_told_so(environment, caplog):
    environment(**srun(0, 2) | torchrun(0, GROUP_WORLD_SIZE=1))
    find()
    assert "each of 2 machines trains alone: for one run of all, torchrun --nnodes=2" in caplog.text


def nodes(**more):
    return NODES | more


NO_NUMBERS = [
    (torchrun, "RANK", 4, "from 0 to 3; torchrun --nproc-per-node=2 "),
    (torchrun, "WORLD_SIZE", 0, "of 1 or more; torchrun "),
    (torchrun, "LOCAL_RANK", 2, "from 0 to 1; torchrun "),
    (torchrun, "LOCAL_WORLD_SIZE", 5, "from 1 to 4; torchrun "),
    (nodes, "RANK", 2, "from 0 to 1; torchrun "),
    (nodes, "WORLD_SIZE", 0, "of 1 or more; torchrun "),
    (srun, "SLURM_PROCID", 4, "from 0 to 3; srun --ntasks=2 python "),
    (srun, "SLURM_LOCALID", 2, "from 0 to 1; srun "),
    (srun, "SLURM_NODEID", 2, "from 0 to 1; srun "),
    (srun, "SLURM_JOB_ID", "x", "of 0 or more; srun "),
    (srun, "MASTER_PORT", 70000, "from 1 to 65535; export MASTER_PORT=29500 on all machines"),
    (mpirun, "OMPI_COMM_WORLD_RANK", 2, "from 0 to 1; mpirun -n 2 python "),
    (mpirun, "OMPI_COMM_WORLD_LOCAL_RANK", 2, "from 0 to 1; mpirun "),
]


def test_a_number_that_cannot_be_is_named_with_its_limits(environment):
    for launcher, name, value, expected in NO_NUMBERS:
        environment(**launcher(**{name: value}))
        with pytest.raises(LaunchError) as caught:
            setup_distributed()
        assert str(caught.value).startswith(f"{name}={value}: expected a whole number {expected}")


@pytest.mark.parametrize(
    ("variables", "found", "command"),
    [
        ({"RANK": 0}, "RANK set without WORLD_SIZE and LOCAL_RANK: expected all", "torchrun"),
        (without(by_hand(), "MASTER_ADDR"), "MASTER_ADDR is not set", "export MASTER_ADDR="),
        (
            mpirun(OMPI_COMM_WORLD_LOCAL_SIZE=1, OMPI_COMM_WORLD_LOCAL_RANK=0),
            "MASTER_ADDR is not set",
            "mpirun -x MASTER_ADDR=",
        ),
        (without(MPICH, "MPI_LOCALRANKID"), "MPI_LOCALRANKID=(not set): expected a", "mpirun -n"),
        (srun(SLURM_STEP_TASKS_PER_NODE="2(y2)"), "SLURM_STEP_TASKS_PER_NODE=2(y2): ", "srun"),
        (
            srun(0, SLURM_NODEID=1, SLURM_LOCALID=0),
            "rank 0 is not on the first machine, n01: expected --distribution=block",
            "export MASTER_ADDR",
        ),
        (
            srun(0, 2, SLURM_STEP_NUM_NODES=1) | torchrun(),
            "SLURM_STEP_NUM_TASKS=2: srun has started 2 tasks with a torchrun on 1 machine(s)",
            "srun --ntasks=1 --ntasks-per-node=1 torchrun",
        ),
    ],
)
def test_wrong_variables_are_named_with_what_works(environment, variables, found, command):
    environment(**variables)
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    message = str(caught.value)
    assert found in message and command in message and "\n" not in message
    assert not dist.is_initialized()


def test_a_spawned_process_does_not_take_its_parents_rank(environment, monkeypatch, caplog):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    for variables, launcher in ((slurm_step(), "srun"), (mpirun(), "mpirun")):
        environment(**variables)
        found = f"{launcher} has started a script that starts processes itself"
        with pytest.raises(LaunchError, match=found):
            setup_distributed()
    for variables in torchrun(), by_hand():  # torchrun itself spawns if it is given a function
        environment(**variables)
        assert find()[:2] == ("torchrun", 1)
    environment()
    find()
    assert "the process that spawned this one has not set RANK" in caplog.text


HOSTS = {
    "gpu-a[01-02]-ib,n[1-3,07-09]": "gpu-a01-ib",
    "r1n2,r2n[1,3]": "r1n2",
    "gpu001.cluster.local,ip-10-0-0-[1-3]": "gpu001.cluster.local",
    "rack[1-2]n[098-101]": "rack1n098",
}


def test_the_first_host_of_a_slurm_node_list():
    assert {nodelist: first_host(nodelist) for nodelist in HOSTS} == HOSTS


def test_what_is_no_node_list_is_refused():
    for nodelist in ("", "n[1-3", "n[a-b]", "-n", "$(touch x)", "a\nb"):
        with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST="):
            first_host(nodelist)


# Devices and cores


def test_each_local_process_takes_the_gpu_of_its_local_rank(environment, gpus):
    current = gpus(4)
    assert [setup_device(k, 4).index for k in range(4)] == current == [0, 1, 2, 3]


def test_a_task_that_sees_one_gpu_takes_that_one(environment, gpus):
    for variables in (srun(3), by_hand(3), mpirun()):
        environment(**variables, CUDA_VISIBLE_DEVICES=3)
        gpus(1)
        assert setup_device(3, 4) == torch.device("cuda", 0)
    environment(**torchrun(3, LOCAL_RANK=0))  # with --virtual-local-rank
    assert setup_device(0, 4) == torch.device("cuda", 0)


def test_one_slurm_task_with_several_gpus_is_refused(environment, gpus):
    alone = srun(0, 2, SLURM_STEP_TASKS_PER_NODE="1(x2)")
    environment(**alone)
    gpus(2)
    found = r"one Slurm task with 2 GPUs, .*srun --ntasks-per-node=2 python .*, or srun torchrun"
    with pytest.raises(LaunchError, match=found):
        setup_device(0, 1)
    environment(**alone, **torchrun(0))
    assert setup_device(0, 2) == torch.device("cuda", 0), "a torchrun in the task"
    assert setup_device(0, 1) == torch.device("cuda", 0), "ranks that somebody has set by hand"
    environment(**alone | MPICH)
    assert setup_device(0, 1) == torch.device("cuda", 0), "an mpirun of MPICH in the task"
    environment(**srun(0))
    assert setup_device(0, 2) == torch.device("cuda", 0), "a task for each GPU"
    environment(**alone)
    gpus(1)
    assert setup_device(0, 1) == torch.device("cuda", 0)


def test_accelerators_with_a_backend_of_their_own_are_used(environment, gpus):
    gpus(2, "xpu")
    assert setup_device(1, 2) == torch.device("xpu", 1)
    gpus(1, "mps")
    assert setup_device(0, 1) == torch.device("cpu")


def test_two_ranks_of_one_torchrun_do_not_share_a_gpu(environment, gpus):
    environment(TORCHELASTIC_RUN_ID="none", CUDA_VISIBLE_DEVICES=0)
    gpus(1)
    found = r"2 processes on this machine, 1 GPU\(s\) in CUDA_VISIBLE_DEVICES=0: expected a "
    found += "GPU for each; torchrun --nproc-per-node=1"
    with pytest.raises(LaunchError, match=found):
        setup_device(1, 2)
    environment(CUDA_VISIBLE_DEVICES=0)  # ranks that somebody started and gave a GPU each
    assert setup_device(1, 2) == torch.device("cuda", 0)


# PyTorchJob with nprocPerNode: "2" on 2 pods, as of version 1.7: WORLD_SIZE counts processes.
PODS = {"WORLD_SIZE": 4, "PET_NPROC_PER_NODE": 2, "PET_NNODES": 2}


@pytest.mark.parametrize(
    ("more", "number_of_gpus", "processes", "machines"),
    [({}, 8, 8, "$WORLD_SIZE"), (PODS, 0, 2, "$PET_NNODES")],
)
def test_variables_that_count_machines_need_one_gpu_on_each(
    environment, gpus, more, number_of_gpus, processes, machines
):
    environment(**NODES | more)
    gpus(number_of_gpus)
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    found = f"counts machines, and this one should run {processes} processes: expected torchrun"
    command = f"torchrun --nnodes={machines} --node-rank=$RANK --nproc-per-node={processes}"
    assert found in str(caught.value) and command in str(caught.value)


def test_nccl_without_gpus_is_refused(environment, gpus):
    gpus(0)
    found = "backend='nccl', and this process sees no GPU: expected a GPU, or gloo"
    with pytest.raises(LaunchError, match=found):
        setup_distributed(backend="nccl")


ALONE = srun(SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_CPUS_ON_NODE=16)


@pytest.mark.parametrize(
    ("variables", "affinity", "local_world_size", "cores"),
    [
        ({}, 16, 4, 4),
        ({}, 2, 4, 1),
        # two tasks on sixteen cores of sixty-four, not bound
        (srun(SLURM_CPUS_ON_NODE=16), 64, 2, 8),
        (srun(SLURM_CPUS_ON_NODE=16), 8, 2, 8),  # each bound to eight of its own
        (srun(SLURM_CPUS_ON_NODE=1), 64, 2, 1),
        (ALONE | torchrun(), 16, 4, 4),  # the processes of one torchrun
    ],
)
def test_local_processes_share_the_cores_that_they_may_use(
    environment, monkeypatch, variables, affinity, local_world_size, cores
):
    environment(**variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity))
    found = distributed.cores_per_process(local_world_size)
    assert found == cores and isinstance(found, int)


# Where ranks rendezvous


def test_ranks_meet_whoever_comes_first(monkeypatch, caplog):
    monkeypatch.setattr(distributed, "WARN_AFTER", 0.3)
    stores = meet(3, [2, 0, 1], before=lambda rank: time.sleep(1.2 * (rank < 2)))
    assert all(isinstance(store, dist.Store) for store in stores), stores
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == stores[2].get("greeting") == b"hello"
    assert re.search(
        r"rank 2 is waiting for the store of rank 0 at localhost:\d+ \(.* refused\)", caplog.text
    )


def test_a_rank_that_is_there_twice_is_named_to_all():
    """Also to rank 2, which joins after rank 0 has read of it."""
    late = meet(4, [0, 1, 1, 2], timeout=10, before=lambda rank: time.sleep(0.7 * (rank == 2)))
    assert all("rank 1 is claimed twice, by process" in result for result in late), late


def test_a_rank_that_comes_once_more_is_named_to_itself():
    """The others have met, and train."""
    port = free_port()
    stores = meet(2, [0, 1], port)
    (result,) = meet(2, [1], port)
    assert "rank 1 is claimed twice, by process" in result and len(stores) == 2


def test_a_rank_that_waits_for_others_hears_ctrl_c():
    address = Address("127.0.0.1", free_port(), "")
    context = multiprocessing.get_context("fork")
    arguments = [(address, rank, 3, timedelta(minutes=5)) for rank in (0, 1)]
    ranks = [context.Process(target=distributed.rendezvous, args=args) for args in arguments]
    try:
        for rank in ranks:
            rank.start()
        store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False)
        store.wait(["rank 1"], timedelta(minutes=1))
        os.kill(ranks[1].pid, signal.SIGINT)
        ranks[1].join(60)
        assert ranks[1].exitcode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_ranks_that_do_not_come_are_named(caplog, monkeypatch):
    monkeypatch.setattr(distributed, "WARN_AFTER", 0.5)
    results = meet(4, [0, 2], timeout=4)
    assert all("ranks 1, 3 of 4 did not join rank 0 on" in result for result in results)
    # on a slow machine rank 2 joins after the warning
    assert re.search("is waiting for ranks 1, (2, )?3 of 4", caplog.text)


@pytest.mark.parametrize(
    ("world_size", "found"),
    [
        (2, "a rank that fell silent while it joined"),  # all have claimed their ranks
        (64, "ranks 2, 3, 4, 5, 6, 7, 8, 9, ... of 64"),
    ],
)
def test_a_rank_that_dies_while_it_joins_is_told_of(world_size, found):
    """Rank 1 has claimed its rank, and does not count itself."""
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"rank {rank}", "a process")
    address = Address("localhost", 29500, "")
    distributed.wait_for_verdict(store, world_size, address, timedelta(seconds=0.1))
    verdict = json.loads(store.get("verdict"))
    assert verdict[0].startswith(f"{found} did not join rank 0 on ")
    assert verdict[1] == "all within 0:00:00.100000"


def test_a_rank_zero_that_does_not_come_is_named():
    (result,) = meet(2, [1], timeout=1.5)
    assert "rank 1 could not reach rank 0 at localhost:" in result
    assert "Connection refused" in result and "MASTER_ADDR and MASTER_PORT" in result


def test_a_rank_zero_that_is_lost_is_named(monkeypatch):
    def connect(*arguments):
        arguments[-1].set_exception(RuntimeError("Connection reset by peer"))

    port = free_port()
    lost = f"lost rank 0, which kept the store at localhost:{port}: "
    store = distributed.open_store(Address("localhost", port, ""), 0, 2)
    (result,) = meet(2, [1], port, timeout=0.5)  # rank 0 hangs: it never says that all have joined
    assert result.startswith(lost) and store.check(["rank 1"])
    monkeypatch.setattr(distributed, "connect", connect)
    (result,) = meet(2, [1], port)
    assert result.startswith(lost)


def test_a_name_that_is_unknown_is_waited_for_and_named(monkeypatch, caplog):
    """It may be that of a pod that will run soon, and the name server may be busy."""
    monkeypatch.setattr(distributed, "WARN_AFTER", 0.5)
    known_at = time.monotonic() + 1
    look_up = socket.getaddrinfo

    def late(host, *arguments, **options):
        if time.monotonic() < known_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    stores = meet(2, [0, 1])
    assert all(isinstance(store, dist.Store) for store in stores), stores
    found = r"rank 1 is waiting for the store of rank 0 at localhost:\d+ \(.*service not known\)"
    assert re.search(found, caplog.text)


def test_a_name_that_stays_unknown_ends_in_an_error():
    found = "rank 1 could not reach rank 0 at no-such-host.invalid:29500 .*Name or service not "
    with pytest.raises(LaunchError, match=found):
        rendezvous(Address("no-such-host.invalid", 29500, ""), 1, 2, timedelta(seconds=1))


def test_a_port_that_this_user_may_not_use_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("The server socket has failed to bind\n(errno: 13 - Permission denied).")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    (result,) = meet(2, [0], port=80)
    assert "port 80 of this machine cannot be used (The server" in result and "\n" not in result


def test_a_port_that_is_taken_is_named_with_a_free_one():
    with socket.create_server(("", 0)) as stranger:  # which says nothing to those who connect
        port = stranger.getsockname()[1]
        first, second = meet(2, [0, 1], port=port, timeout=2)
    assert f"port {port} of this machine is taken" in first and "export MASTER_PORT=" in first
    expected = f"could not reach rank 0 at localhost:{port} (something listens "
    expected += "there, and has not answered as the store of 2 ranks)"
    assert expected in second and "\n" not in second


def test_two_jobs_that_share_a_port_do_not_merge():
    port = free_port()
    store = distributed.open_store(Address("localhost", port, "7.0"), 0, 2)
    (result,) = meet(2, [1], port, job="8.0")
    found = f"the store of 2 ranks of job 7.0 answers at localhost:{port}: "
    assert f"{found}expected the store of 2 ranks of job 8.0;" in result
    assert not store.check(["rank 1"]), "it has left no trace there"


def test_ranks_meet_with_the_timeout_that_they_have(environment, monkeypatch):
    def meet_nobody(*given):
        raise LaunchError(given, "", "")

    monkeypatch.setattr(distributed, "rendezvous", meet_nobody)
    environment(**by_hand())
    timeout = timedelta(seconds=33)
    with pytest.raises(LaunchError) as caught:
        setup_distributed(timeout=timeout)
    assert caught.value.args[0] == (Address("node0", 29500, ""), 1, 4, timeout)


def test_the_store_has_the_timeout_of_the_job():
    """It begins with a longer one, which is for ranks that wait for rank 0."""
    timeout = timedelta(seconds=33)
    assert rendezvous(Address("127.0.0.1", free_port(), ""), 0, 1, timeout).timeout == timeout


# The end


def test_setup_distributed_twice_is_refused(environment):
    """Once more after the group is destroyed is not."""
    with distributed.cleaned_up():
        d = setup_distributed()
        assert (d.rank, d.world_size, d.launcher, d.backend) == (0, 1, "python", "gloo")
        with pytest.raises(LaunchError, match="a process group exists already"):
            setup_distributed()
    with distributed.cleaned_up():
        assert setup_distributed().world_size == 1


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


# The variables that it sets


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


SIX = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "1", "0", "1", "127.0.0.1")),
        (srun(1, WORLD_SIZE=64, MASTER_PORT=4000), ("1", "4", "1", "2", "n01", "4000")),
        (NODES, ("1", "2", "0", "1", "job-0", "23456")),
    ],
)
def test_the_variables_of_torchrun_are_set_under_every_launcher(join, variables, expected):
    join(**variables)
    assert tuple(os.environ.get(name) for name in SIX)[: len(expected)] == expected
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536


def test_rank_0_alone_is_main_on_two_machines(join):
    """The second machine has a process of local rank 0 too."""
    ranks = [join(**srun(rank)) for rank in range(4)]
    assert [d.local_rank for d in ranks] == [0, 1, 0, 1]
    assert [d.is_main for d in ranks] == [True, False, False, False]


def test_under_torchrun_nothing_is_overwritten_and_no_port_is_tried(join, monkeypatch):
    """A sandbox may forbid to try one."""
    monkeypatch.setattr(distributed, "free_port", lambda: 1 / 0)
    join(**torchrun())
    before = {name: str(value) for name, value in torchrun().items()}
    assert {name: os.environ[name] for name in before} == before
    assert find()[:5] == ("torchrun", 1, 4, 1, 2)


def test_processes_that_torchrun_restarts_on_one_machine_find_no_old_addresses(environment):
    """On several machines, whose numbers of restarts may differ, torch chooses the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "GROUP_WORLD_SIZE": 1}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    environment(**torchrun() | shared)
    distributed.store_of_torchrun().set("rank 0", "an address")
    assert distributed.store_of_torchrun().check(["rank 0"]), "of the same start"
    environment(**torchrun() | shared | {"TORCHELASTIC_RESTART_COUNT": 1})
    assert not distributed.store_of_torchrun().check(["rank 0"])
    for other in ({"GROUP_WORLD_SIZE": 2}, {"TORCHELASTIC_USE_AGENT_STORE": False}):
        environment(**torchrun() | shared | other)
        assert distributed.store_of_torchrun() is None


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


def test_the_copied_file_works_under_torchrun(copy):
    process = start_copy(copy, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py")
    assert outputs(process) == [line.format("torchrun") for line in TWO]


def test_ranks_that_are_set_by_hand_share_the_cores_of_their_machine(copy):
    """Nobody has told them how many they are on this machine: they count themselves."""
    (copy / "train.py").write_text(TRAIN + 'print(torch.get_num_threads(), "threads")\n')
    world = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    world["OMP_NUM_THREADS"] = None
    processes = [start_copy(copy, "train.py", RANK=r, LOCAL_RANK=r, **world) for r in (0, 1)]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = [f"{threads} threads"] * 2 + [line.format("torchrun") for line in TWO]
    assert outputs(*processes) == expected


def as_a_task_of_srun(rank):
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    without_launcher()
    os.environ.update({name: str(value) for name, value in slurm_step(rank, 2).items()} | address)


def by_python(rank):
    without_launcher()


def short_version():
    page = (ROOT / "docs/copy-setup-distributed.md").read_text()
    return re.search("```python\n(# torchrun\n[^`]*def setup.*?)```", page, re.S)[1]


@pytest.mark.parametrize(
    ("prepare", "world_size"), [(None, 2), (as_a_task_of_srun, 2), (by_python, 1)]
)
def test_the_short_version_of_the_docs_works(tmp_path, prepare, world_size):
    """Under torchrun, srun and python."""
    (tmp_path / "short.py").write_text(short_version())
    script = str(tmp_path / "short.py")
    ranks = Ranks(tmp_path, world_size, [], prepare=prepare, script=script)
    assert ranks.wait() == [0] * world_size, ranks.output()
    assert ranks.output() == f"{world_size} ranks, sum {world_size}\n"


def test_two_trainings_of_one_process_run_at_once_with_the_short_version(tmp_path):
    """Each keeps its process group until both have one."""
    wait = "print('joined', flush=True)\nwhile not os.path.exists('both'):\n    pass\ndist.destroy"
    (tmp_path / "short.py").write_text(short_version().replace("dist.destroy", wait))
    both = [start_copy(tmp_path, "short.py") for _ in range(2)]
    for process in both:
        read_until(process, "joined")
    (tmp_path / "both").touch()
    assert outputs(*both) == []  # nothing after what was read
