"""setup_distributed: who started this process, and do the ranks meet? No launcher runs here but in
the last part.
"""

import multiprocessing
import os
import re
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launchers import TRAIN, by_hand, meet, mpirun, slurm_step, srun, torchrun, without
from on_hosts import without_launcher
from processes import ROOT, finished, read_until, start_copy, without_gloo
from ranks import Ranks

from common import machine
from common import setup_distributed as module
from common.machine import free_port
from common.setup_distributed import (
    LaunchError,
    cleaned_up,
    find_address,
    find_launcher,
    first_host,
    setup_device,
    setup_distributed,
)


def find(port=None):
    """What setup_distributed() finds: (launcher, rank, world size, local rank, host, port)."""
    launcher, rank, world_size, local_rank = find_launcher()
    return launcher, rank, world_size, local_rank, *find_address(launcher, world_size, port)


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
        ({}, ("python", 0, 1, 0, "127.0.0.1", 29500)),
        (torchrun(3) | srun(0, 2), ("torchrun", 3, 4, 1, "node0", 29500)),
        (by_hand(), ("torchrun", 1, 4, 1, "node0", 29500)),
        (without(by_hand(), "LOCAL_WORLD_SIZE"), ("torchrun", 1, 4, 1, "node0", 29500)),
        (srun(**OTHER), ("srun", 1, 4, 1, "n01", 12007)),
        (srun(MASTER_PORT=4000, MASTER_ADDR="fd00::1"), ("srun", 1, 4, 1, "fd00::1", 4000)),
        (srun(5, 7, "n[1-3]", SLURM_LOCALID=0), ("srun", 5, 7, 0, "n1", 12007)),
        (srun(SLURM_STEP_ID=1), ("srun", 1, 4, 1, "n01", 13016)),
        (SBATCH_SHELL, ("python", 0, 1, 0, "127.0.0.1", 29500)),
        (srun(0, 1) | mpirun(), ("mpirun", 1, 2, 1, "127.0.0.1", 29500)),
        (srun(0, 1) | MPICH, ("mpirun", 1, 2, 0, "m0", 29500)),
        (NODES, ("nodes", 1, 2, 0, "job-0", 23456)),
    ],
)
def test_the_launcher_is_recognised_by_its_variables(environment, variables, expected):
    environment(**variables)
    assert find() == expected


def test_a_port_is_used_unless_the_environment_names_one(environment):
    for variables in (srun(), MPICH):
        environment(**variables)
        assert find(port=1234)[-1] == 1234
        environment(**variables | {"MASTER_PORT": 4000})
        assert find(port=1234)[-1] == 4000


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": 0}, "only ['RANK'] set: expected RANK, WORLD_SIZE and LOCAL_RANK"),
        (without(MPICH, "MPI_LOCALRANKID"), "only ['PMI_RANK'] set"),
        (by_hand(4), "torchrun: rank 4 of 4: expected 0 to one less"),
        (without(by_hand(), "MASTER_ADDR"), "MASTER_ADDR is not set: expected rank 0's host"),
        (mpirun(OMPI_COMM_WORLD_LOCAL_SIZE=1), "MASTER_ADDR is not set: expected rank 0's host"),
    ],
)
def test_variables_that_cannot_work_are_named_at_once(environment, variables, found):
    environment(**variables)
    with pytest.raises(LaunchError) as caught:
        setup_distributed()
    assert str(caught.value).startswith(found) and "\n" not in str(caught.value)
    assert not dist.is_initialized()


HOSTS = {
    "gpu-a[01-02]-ib,n[1-3,07-09]": "gpu-a01-ib",
    "r1n2,r2n[1,3]": "r1n2",
    "gpu001.cluster.local,ip-10-0-0-[1-3]": "gpu001.cluster.local",
    "rack[1-2]n[098-101]": "rack1n098",
}


def test_the_first_host_of_a_slurm_node_list():
    assert {nodelist: first_host(nodelist) for nodelist in HOSTS} == HOSTS


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


@pytest.mark.parametrize("alone", [srun(0, 2), NODES])
def test_one_process_for_several_gpus_of_a_machine_is_refused(environment, gpus, alone):
    """Of a Slurm task or a pod: torchrun and python may leave GPUs to others."""
    environment(**alone)
    gpus(2)
    with pytest.raises(LaunchError, match="one process for 2 GPUs: torchrun --nproc-per-node=2"):
        setup_device(0, 1)
    assert setup_device(0, 2) == torch.device("cuda", 0), "a task for each GPU"
    gpus(1)
    assert setup_device(0, 1) == torch.device("cuda", 0)
    gpus(2)
    for variables in (alone | torchrun(0), {}):
        environment(**variables)
        assert setup_device(0, 1) == torch.device("cuda", 0)


def test_accelerators_with_a_backend_of_their_own_are_used(environment, gpus):
    gpus(2, "xpu")
    assert setup_device(1, 2) == torch.device("xpu", 1)
    gpus(1, "mps")
    assert setup_device(0, 1) == torch.device("cpu")


def test_two_ranks_of_one_torchrun_do_not_share_a_gpu(environment, gpus):
    environment(TORCHELASTIC_RUN_ID="none")
    gpus(1)
    with pytest.raises(LaunchError, match=r"local rank 1, 1 GPU\(s\): --nproc-per-node=1"):
        setup_device(1, 2)
    environment()  # ranks that somebody started and gave a GPU each
    assert setup_device(1, 2) == torch.device("cuda", 0)


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
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity))
    threads = torch.get_num_threads()
    setup_device(0, local_world_size)
    found = torch.get_num_threads(), machine.cores_per_process(local_world_size)
    torch.set_num_threads(threads)
    assert found == (cores, cores) and isinstance(found[1], int)


# Where ranks meet


def test_ranks_meet_whoever_comes_first(monkeypatch, caplog):
    monkeypatch.setattr(module, "WARN_AFTER", 0.3)
    stores = meet(3, [2, 0, 1], before=lambda rank: time.sleep(1.2 * (rank < 2)))
    assert all(isinstance(store, dist.Store) for store in stores), stores
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == stores[2].get("greeting") == b"hello"
    assert re.search(r"rank 2 is waiting for rank 0 at localhost:\d+ \(.* refused\)", caplog.text)


def test_a_rank_that_is_there_twice_is_named():
    port = free_port()
    stores = meet(2, [0, 1], port)
    (late,) = meet(2, [1], port)  # the others have met, and train
    assert "rank 1 is there twice, now as process" in late and len(stores) == 2
    early = meet(3, [0, 1, 1], timeout=3)
    assert sum("rank 1 is there twice" in result for result in early) == 1
    assert "is waiting for ranks [2] of 3" in early[0]


def test_ranks_that_do_not_come_are_named_to_all(caplog, monkeypatch):
    """Also to those that wait for rank 0: it gives up two seconds after them."""
    monkeypatch.setattr(module, "WARN_AFTER", 0.5)
    results = meet(4, [0, 2], timeout=2, before=lambda rank: time.sleep(rank / 2))
    assert all("is waiting for ranks [1, 3] of 4, for 0:00:0" in result for result in results)
    assert re.search(r"is waiting for ranks \[1, (2, )?3\] of 4", caplog.text)


def test_a_rank_that_waits_for_others_hears_ctrl_c():
    port = free_port()
    context = multiprocessing.get_context("fork")
    arguments = [("127.0.0.1", port, rank, 3, timedelta(minutes=5)) for rank in (0, 1)]
    ranks = [context.Process(target=module.meet, args=args) for args in arguments]
    # a shell makes its background jobs deaf to it, and the ranks inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for rank in ranks:
            rank.start()
        time.sleep(2)
        for rank in ranks[::-1]:
            os.kill(rank.pid, signal.SIGINT)
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == 1
    finally:
        signal.signal(signal.SIGINT, before)
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_rank_zero_that_does_not_come_is_named():
    (result,) = meet(2, [1], timeout=1)
    assert "rank 1 is waiting for rank 0 at localhost:" in result and "refused" in result


def test_a_name_that_is_unknown_is_waited_for_and_named(monkeypatch, caplog):
    """It may be that of a pod that will run soon, and the name server may be busy."""
    monkeypatch.setattr(module, "WARN_AFTER", 0.5)
    known_at = time.monotonic() + 1
    look_up = socket.getaddrinfo

    def late(host, *arguments, **options):
        if time.monotonic() < known_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    stores = meet(2, [0, 1])
    assert all(isinstance(store, dist.Store) for store in stores), stores
    found = r"rank 1 is waiting for rank 0 at localhost:\d+ \(.*service not known\)"
    assert re.search(found, caplog.text)


def test_a_port_that_is_taken_is_named_by_torch():
    with socket.create_server(("", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"EADDRINUSE|{port}"):
            module.connect("localhost", port, 0, timedelta(seconds=5))


def test_one_process_needs_no_port(environment):
    """Another training may have it."""
    with socket.create_server(("", 0)) as taken, cleaned_up():
        environment(MASTER_PORT=taken.getsockname()[1])
        assert setup_distributed().launcher == "python"


def test_a_process_may_leave_its_group_and_join_again(environment):
    for timeout in (30, timedelta(seconds=30)):
        with cleaned_up():
            d = setup_distributed(timeout=timeout)
            assert (d.rank, d.world_size, d.backend) == (0, 1, "gloo")
            with pytest.raises(ValueError, match="initialize the default process group twice"):
                setup_distributed()
        assert not dist.is_initialized()


# The variables that it sets


@pytest.fixture
def join(environment, monkeypatch):
    """A function that joins a process group with these variables, which needs no other rank to be
    there.
    """
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    store = dist.HashStore()
    store.add(f"ranks on {socket.gethostname()}", 2)
    monkeypatch.setattr(module, "meet", lambda *_: store)

    def join(**variables):
        environment(**variables)
        return setup_distributed()

    return join


SIX = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (mpirun(), ("1", "2", "1", "2", "127.0.0.1", "29500")),
        (srun(1, WORLD_SIZE=64, MASTER_PORT=4000), ("1", "4", "1", "2", "n01", "4000")),
        (torchrun(), ("1", "4", "1", "2", "node0", "29500")),
    ],
)
def test_the_variables_of_torchrun_are_set_under_every_launcher(join, variables, expected):
    join(**variables)
    assert tuple(os.environ.get(name) for name in SIX) == expected


def test_rank_0_alone_is_main_on_two_machines(join):
    """The second machine has a process of local rank 0 too."""
    ranks = [join(**srun(rank)) for rank in range(4)]
    assert [d.local_rank for d in ranks] == [0, 1, 0, 1]
    assert [d.is_main for d in ranks] == [True, False, False, False]


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
    assert without_gloo(ranks.output()) == f"{world_size} ranks, sum {world_size}\n"


def test_two_trainings_of_one_process_run_at_once_with_the_short_version(tmp_path):
    """Each keeps its process group until both have one."""
    wait = "print('joined', flush=True)\nwhile not os.path.exists('both'):\n    pass\ndist.destroy"
    (tmp_path / "short.py").write_text(short_version().replace("dist.destroy", wait))
    both = [start_copy(tmp_path, "short.py") for _ in range(2)]
    for process in both:
        read_until(process, "joined")
    (tmp_path / "both").touch()
    assert outputs(*both) == []  # nothing after what was read
