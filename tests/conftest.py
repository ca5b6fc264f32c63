"""The fixtures that several files of tests share."""

import contextlib
import gc
import os
import runpy
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from imagenet_runs import CLASSES, SMALL_06
from images import write_images
from launchers import TRAIN, VARIABLES, slurm_step
from needs import need
from processes import ROOT, STARTED, without_gloo
from ranks import Ranks

from common.machine import free_port
from imagenet import signals
from tools.lab import hosts as hosts_module
from tools.lab import slurm_cluster as slurm_cluster_module


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a script of the ladder to its end in this process, which spares the seconds of importing
    torch.

    03, 05, 07 and 08 find in the environment that they are alone. Returns a function (script,
    *flags) -> namespace of code, out and err. 06 has no handlers
    of signals here.
    """
    torchrun = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
    }
    launchers = {
        "03": torchrun,
        "07": torchrun,
        "08": torchrun,
        "05": slurm_step() | {"CUDA_VISIBLE_DEVICES": 0},
    }

    def run(script, *flags):
        monkeypatch.chdir(ROOT)
        for name, value in launchers.get(script[:2], {}).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
        capfd.readouterr()
        code = 0
        before = dict(os.environ)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
        os.environ.clear()  # of what setup_distributed() has set
        os.environ.update(before)
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()
        if script[:2] in ("07", "08"):
            # A device mesh leaves its process groups to the garbage collector. It would wait for
            # their threads in a process that is forked here.
            gc.collect()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=without_gloo(out), err=err)

    threads = torch.get_num_threads()
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(signals, "ignore", lambda: None)
    monkeypatch.setattr(signals, "stop", signals.StopRequest())
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def run_06(run, tmp_path):
    """A function (*flags) -> how 06 trained one epoch of one step, in this process."""

    def run_06(*flags):
        given = ["--dummy", 4, "--batch-size", 4, "--image-size", 16, "--arch", "mnist_net"]
        given += ["--epochs", 1, "--eval-every", 0, "--checkpoints-path", tmp_path / "checkpoints"]
        return run("06_imagenet.py", *given, *flags)

    return run_06


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    need(slurm_cluster_module.missing())
    with slurm_cluster_module.SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster):
    """A real Slurm cluster of four machines with four CPUs each, without jobs."""
    yield slurm_cluster
    slurm_cluster.clear()


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def hosts():
    """Two hosts with a network between them."""
    need(hosts_module.missing())
    with hosts_module.Hosts() as two:
        yield two


@pytest.fixture(scope="session", autouse=True)
def a_port_for_each_process_of_pytest():
    """torchrun of torch 2.9 takes port 29500 for every job, so two that run at the same time need
    other ports.
    """
    if torch.__version__ < (2, 15):  # which takes a free one
        os.environ["PET_MASTER_PORT"] = str(free_port())


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    """Kill the processes of a failed test, and undo what setup_distributed() did in this one."""
    variables = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(variables)
    while STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)


@pytest.fixture
def small_folder(tmp_path):
    """An ImageFolder tree of 32x32 images: 24 in train/, 24 in test/."""
    write_images(tmp_path, "train", (32, 32))
    return write_images(tmp_path, "test", (32, 32))


@pytest.fixture
def large_folder(tmp_path):
    """An ImageFolder tree of 300x260 JPEGs: 24 in train/, 8 in val/."""
    write_images(tmp_path, "train", (260, 300), suffix=".jpg")
    return write_images(tmp_path, "val", (260, 300), per_class=4, suffix=".jpg")


@pytest.fixture
def copy(tmp_path):
    """A folder with setup_distributed.py and a script of ten lines that uses it."""
    shutil.copy(ROOT / "common/setup_distributed.py", tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def environment(monkeypatch):
    """A function that sets these environment variables and no other of a launcher."""

    def environment(**variables):
        for name in list(os.environ):
            if name.startswith(VARIABLES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    environment(OMP_NUM_THREADS=torch.get_num_threads())
    return environment


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes this machine one with so many GPUs; returns the list of those made
    current.
    """

    def gpus(count, kind="cuda"):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0 and kind == "cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
        return current

    return gpus


@pytest.fixture(scope="module")
def one_each(tmp_path_factory):
    """A folder with 40 classes of one image each: the target tells which image it is."""
    root = tmp_path_factory.mktemp("one-each")
    write_images(root, "train", (40, 44), CLASSES, 1, ".jpg")
    return write_images(root, "val", (40, 44), CLASSES, 1, ".jpg")


@pytest.fixture
def train(tmp_path):
    """A function (name, world_size, *flags) -> Ranks, whose checkpoints and output lie in the
    folder of that name.
    """
    started = []

    def train(name, world_size, *flags, **options):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        flags = [*SMALL_06, *flags, "--checkpoints-path", folder / "checkpoints"]
        started.append(Ranks(folder, world_size, flags, **options))
        return started[-1]

    yield train
    for ranks in started:
        ranks.end()
