"""Two hosts with two processes each: what must follow the rank, and not the local rank.

Both hosts have a local rank 0. The ranks are forked, and each takes the name and the disk of its
host: see helpers/on_hosts.py. What torchrun and mp.spawn themselves do on two hosts is
in test_launch.py.
"""

import functools
import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import on_hosts
import pytest
import torch
from images import write_images
from processes import ROOT, without_gloo
from ranks import Ranks
from rungs import QUICK

from imagenet.checkpoint_file import decode, read_file

RUNGS = ["03_mnmc_ddp_launch.py", "04_mnmc_ddp_mp.py", "05_mnmc_ddp_slurm.py"]
EPOCHS = 2
TRAIN, TEST = 40, 25  # images; 4 ranks do not divide 25
FLAGS_06 = ["--arch", "mnist_net", "--image-size", 16, "--batch-size", 20, "--epochs", EPOCHS]
FLAGS_06 += ["--print-every", 1, "--checkpoint-every", 1, "--keep", 9]
FLAGS_06 += ["--deterministic", "--timeout", 60]
FILES_06 = ["best.pt", *(f"step-{step:08}.pt" for step in (1, 2, 3, 4))]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of small images of 5 classes: TRAIN to train on, TEST to test on."""
    root = tmp_path_factory.mktemp("images")
    classes = [str(k) for k in range(5)]
    write_images(root, "train", (16, 16), classes, TRAIN // 5)
    return write_images(root, "test", (16, 16), classes, TEST // 5)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that starts four ranks on two hosts, or on one machine, for end()."""
    started = []

    def start(script, flags, one_machine=False, own_disks=True, then=None, fill=None, processes=4):
        """Start a script.

        Args:
            flags: where they say DISK, a folder: each host's own one, or one for all ranks.
            then: function of the notes and the rank, called on the host before the script.
            fill: function of the folder of a disk, called before the start.
        """
        folder = tmp_path_factory.mktemp("run")
        notes = folder / "notes"
        notes.mkdir()
        names = on_hosts.HOSTS if own_disks and not one_machine else ["disk"]
        disks = [folder / name for name in names]
        for each in disks:
            each.mkdir()
            if fill:
                fill(each)
        prepare = functools.partial(on_hosts.enter, disks, notes, then)
        flags = [str(flag).replace("DISK", ".") for flag in flags]
        options = {"nodes": 1 if one_machine else 2, "prepare": prepare, "script": str(script)}
        started.append(Ranks(folder, processes, flags, **options))
        return SimpleNamespace(ranks=started[-1], disks=disks, notes=notes)

    yield start
    for ranks in started:
        ranks.end()


def end(run):
    """Wait for a run; return what its ranks printed and noted, and the disks of its hosts."""
    codes = run.ranks.wait()
    printed = [without_gloo(run.ranks.output(rank)) for rank in range(len(codes))]
    assert set(codes) == {0}, on_hosts.read_errors(run.notes)
    return SimpleNamespace(printed=printed, notes=on_hosts.read_notes(run.notes), disks=run.disks)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def one_process_prints(run, start, done):
    """Rank 0 prints, and names the ranks of both hosts. All others are silent."""
    first, *others = run.printed
    assert start in first and "world size 4 (2 on this machine)" in first
    hosts = re.findall(r"^ranks (.+) on (\w+): cpu", first, re.M)
    assert hosts == [("0-1", "host1"), ("2-3", "host2")]
    assert first.count(done) == 1 and first.count("== test: [1/2]") == 1
    assert set(others) == {""}


def all_processes_share_the_images(run):
    """Each image is read once per epoch, by any rank."""
    for size in (TRAIN, TEST):
        counter = Counter()
        for note in run.notes:
            if note.get("dataset") == size:
                counter.update(note["indices"])
        assert counter == dict.fromkeys(range(size), EPOCHS)


def the_log_counts_all_processes(disk, command, **expected):
    """The log file on a disk has a record per epoch, of all ranks."""
    records = [json.loads(line) for line in (disk / "log.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    for record in records:
        assert record.items() >= {"world_size": 4, "local_world_size": 2, **expected}.items()
        assert record["command"].startswith(command)


def results(run):
    """The lines of rank 0 that hold a loss or an accuracy, without speeds and times."""
    lines = [line for line in run.printed[0].splitlines() if re.search("loss|top-1|acc", line)]
    return [re.sub(r"\| (\d+ img/s|[\d.]+ s).*", "", line) for line in lines]


def equal_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# 03, 04 and 05

FLAGS = ["--epochs", EPOCHS, "--batch-size", 32]
FLAGS += ["--save", "DISK/net.pt", "--log-file", "DISK/log.jsonl"]


@pytest.fixture(scope="module")
def one_machine(start, images):
    """What 03 does with four processes on one machine."""
    return end(start(RUNGS[0], [*QUICK, images, *FLAGS], one_machine=True))


@pytest.mark.parametrize(
    ("script", "options", "launcher", "command"),
    [
        (RUNGS[0], {}, "torchrun", "torchrun --nnodes=2 --nproc-per-node=2 03_mnmc"),
        (RUNGS[1], {"then": on_hosts.spawn_04, "processes": 2}, "mp.spawn", "python 04_mnmc"),
        (
            RUNGS[2],
            {"then": on_hosts.under_srun},
            "srun",
            "srun --nodes=2 --ntasks-per-node=2 python 05_mnmc",
        ),
    ],
)
def test_two_hosts_train_print_and_save_as_one_machine(
    start, images, one_machine, script, options, launcher, command
):
    run = end(start(script, [*QUICK, images, *FLAGS], **options))
    one_process_prints(run, f"{script} | started by {launcher}", "done: test accuracy")
    all_processes_share_the_images(run)
    first, second = run.disks
    assert names(first) == ["log.jsonl", "net.pt"] and names(second) == []
    the_log_counts_all_processes(first, command, launcher=launcher, global_batch=32, lr=0.01 / 8)
    # To the bit: each rank crops images and drops out activations as its rank says.
    assert len(results(one_machine)) == 5 and results(run) == results(one_machine)
    weights = torch.load(first / "net.pt", weights_only=True)
    expected = torch.load(one_machine.disks[0] / "net.pt", weights_only=True)
    assert equal_weights(weights, expected)


# 06


@pytest.fixture(scope="module")
def start_06(start, images):
    """A function that starts 06, which logs to DISK/log.jsonl and saves in DISK/checkpoints."""
    flags = [images, *FLAGS_06, "--log-file", "DISK/log.jsonl"]
    flags += ["--checkpoints-path", "DISK/checkpoints"]

    def start_06(*more, **options):
        return start("06_imagenet.py", [*flags, *more], then=on_hosts.note_06, **options)

    return start_06


@pytest.fixture(scope="module")
def runs_06(start_06):
    """What 06 does with four processes on one machine, and on two hosts with one folder."""
    runs = start_06(one_machine=True), start_06(own_disks=False)
    return [end(run) for run in runs]


def shares_the_cores(run):
    """Two loaders of each of four ranks."""
    assert [note["workers"] for note in run.notes if "workers" in note] == [on_hosts.CORES // 2] * 8


def test_06_on_two_hosts_trains_and_saves_as_one_machine(runs_06):
    """To the bit: each rank drops out activations with the random numbers of its rank."""
    one, run = runs_06
    one_process_prints(run, "06_imagenet.py | started by torchrun", "done: top-1")
    all_processes_share_the_images(run)
    shares_the_cores(run)
    assert "25 images" in run.printed[0]
    assert len(results(one)) == 7 and results(run) == results(one)
    (disk,) = run.disks
    assert names(disk) == ["checkpoints", "log.jsonl"]
    assert names(disk / "checkpoints") == FILES_06, "no marker is left"
    wrote = [(note["rank"], note["wrote"]) for note in run.notes if "wrote" in note]
    assert {rank for rank, _ in wrote} == {0} and {name for _, name in wrote} == set(FILES_06)
    command = "torchrun --nnodes=2 --nproc-per-node=2 06_"
    the_log_counts_all_processes(disk, command, launcher="torchrun", global_batch=20)
    for name in FILES_06:
        expected, state = (read(run, name) for run in (one, run))
        assert equal_weights(state["model"], expected["model"])
        assert torch.equal(state["totals"], expected["totals"])
        assert state["best"] == expected["best"]


def read(run, name):
    """The state in a checkpoint of the first host."""
    return decode(read_file(run.disks[0] / "checkpoints" / name))


# template/train.py


def test_the_template_on_two_hosts_trains_and_saves_as_one_machine(start, tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "common/setup_distributed.py", project)
    text = (ROOT / "template/train.py").read_text()
    assert text.count("nn.ReLU(), ") == 1
    (project / "train.py").write_text(text.replace("nn.ReLU(), ", "nn.ReLU(), nn.Dropout(0.1), "))
    here = functools.partial(on_hosts.import_from, project)

    flags = ["--batch-size", 500, "--checkpoints", "DISK"]
    new = end(start(project / "train.py", [*flags, "--epochs", 1], then=here))

    def copy_new(disk):
        shutil.copytree(new.disks[0], disk, dirs_exist_ok=True)

    flags += ["--epochs", 3, "--resume"]
    options = {"then": here, "fill": copy_new}
    shared = start(project / "train.py", flags, own_disks=False, **options)
    one = start(project / "train.py", flags, one_machine=True, **options)
    shared, one = end(shared), end(one)

    for run, lines in ((new, 2), (shared, 4)):
        first, *others = run.printed
        assert len(first.splitlines()) == lines and first.count("done: test loss") == 1
        assert set(others) == {""}
    assert shared.printed[0].startswith("resumed from ")
    assert [names(disk) for disk in new.disks] == [["best.pt", "last.pt"], []]
    assert len(results(one)) == 3 and results(shared) == results(one)
    for name in ("best.pt", "last.pt"):
        state = torch.load(shared.disks[0] / name, weights_only=True)
        expected = torch.load(one.disks[0] / name, weights_only=True)
        assert equal_weights(state["model"], expected["model"])
        assert state.get("epoch") == expected.get("epoch")
