"""Two hosts with two processes each: what must follow the rank, and not the local rank.

Both hosts have a local rank 0. The ranks are forked, and each enters the network, the name and the
disk of its host: see helpers/on_hosts.py. Each run serves several tests. What torchrun and mp.spawn
themselves do on two hosts is in test_launch.py.
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
from needs import need
from processes import ROOT, finished, without_gloo
from ranks import Ranks
from rungs import QUICK

from imagenet.checkpoint_file import decode, read_file
from tools.lab import hosts as hosts_module

RUNGS = ["03_mnmc_ddp_launch.py", "04_mnmc_ddp_mp.py", "05_mnmc_ddp_slurm.py"]
EPOCHS = 2
TRAIN, TEST = 40, 25  # images; 4 ranks do not divide 25
FLAGS_06 = ["--arch", "mnist_net", "--image-size", 16, "--batch-size", 20, "--epochs", EPOCHS]
FLAGS_06 += ["--print-every", 1, "--checkpoint-every", 1, "--keep", 9]
FLAGS_06 += ["--deterministic", "--timeout", 60]
FILES_06 = ["best.pt", *(f"step-{step:08}.pt" for step in (1, 2, 3, 4))]


@pytest.fixture(scope="module")
def hosts():
    need(hosts_module.missing())
    with hosts_module.Hosts() as two:
        yield two


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of small images of 5 classes: TRAIN to train on, TEST to test on."""
    root = tmp_path_factory.mktemp("images")
    classes = [str(k) for k in range(5)]
    write_images(root, "train", (16, 16), classes, TRAIN // 5)
    return write_images(root, "test", (16, 16), classes, TEST // 5)


@pytest.fixture(scope="module")
def start(hosts, tmp_path_factory):
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
        disk, notes = folder / "disk", folder / "notes"
        notes.mkdir()
        disk.mkdir()
        disks = [disk]
        if own_disks and not one_machine:
            disks = [on_hosts.disk_of(disk, name) for name in hosts.names]
        for each in disks:
            each.mkdir(exist_ok=True)
            if fill:
                fill(each)
        if one_machine:
            prepare = functools.partial(on_hosts.alone, notes, then)
            options = {"nodes": 1}
        else:
            prepare = on_hosts.enter(hosts, disk if own_disks else None, notes, then)
            options = {"nodes": 2, "env": {"MASTER_ADDR": hosts.names[0]}}
        flags = [str(flag).replace("DISK", str(disk)) for flag in flags]
        options |= {"prepare": prepare, "script": str(script)}
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


def counts(run, size):
    """How many times each image of the data set of this size was read, by all ranks."""
    counter = Counter()
    for note in run.notes:
        if note.get("dataset") == size:
            counter.update(note["indices"])
    return counter


def results(run):
    """The lines of rank 0 that hold a loss or an accuracy, without speeds and times."""
    lines = [line for line in run.printed[0].splitlines() if re.search("loss|top-1|acc", line)]
    return [re.sub(r"\| (\d+ img/s|epoch took|\d+ s).*", "", line) for line in lines]


def devices(text):
    """The ranks of each host in the header of a run."""
    return re.findall(r"^ranks (.+) on (\w+): cpu", text, re.M)


def read_records(disk):
    """The lines of the log file on a disk."""
    return [json.loads(line) for line in (disk / "log.jsonl").read_text().splitlines()]


def equal_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# 03, 04 and 05


@pytest.fixture(scope="module")
def rungs(start, images):
    """What each rung did on two hosts with a disk each, and 03 on one machine."""
    flags = [*QUICK, images, "--epochs", EPOCHS]
    flags += ["--save", "DISK/net.pt", "--log-file", "DISK/log.jsonl"]
    spawn = functools.partial(on_hosts.spawn_04, "tcp://host1:29500")
    runs = {
        "03_mnmc_ddp_launch.py": start(RUNGS[0], flags),
        "04_mnmc_ddp_mp.py": start(RUNGS[1], flags, then=spawn, processes=2),
        "05_mnmc_ddp_slurm.py": start(RUNGS[2], flags, then=on_hosts.under_srun),
        "one machine": start(RUNGS[0], flags, one_machine=True),
    }
    return {name: end(run) for name, run in runs.items()}


@pytest.mark.parametrize("script", RUNGS)
def test_one_process_of_two_hosts_prints(rungs, script):
    first, *others = rungs[script].printed
    assert f"{script} | started by" in first and "world size 4 (2 on this machine)" in first
    assert devices(first) == [("0-1", "host1"), ("2-3", "host2")]
    assert first.count("done: test accuracy") == 1 and first.count("== test: [1/2]") == 1
    assert set(others) == {""}


@pytest.mark.parametrize("script", RUNGS)
def test_one_host_of_two_saves_and_logs(rungs, script):
    first, second = rungs[script].disks
    assert names(first) == ["log.jsonl", "net.pt"]
    assert names(second) == []


@pytest.mark.parametrize("script", RUNGS)
def test_the_record_of_two_hosts_counts_all_processes(rungs, script):
    records = read_records(rungs[script].disks[0])
    assert [record["epoch"] for record in records] == [1, 2]
    launcher, command = {
        "03_mnmc_ddp_launch.py": ("torchrun", "torchrun --nnodes=2 --nproc-per-node=2 03_mnmc"),
        "04_mnmc_ddp_mp.py": ("mp.spawn", "python 04_mnmc"),
        "05_mnmc_ddp_slurm.py": ("srun", "srun --nodes=2 --ntasks-per-node=2 python 05_mnmc"),
    }[script]
    expected = {"launcher": launcher, "world_size": 4, "local_world_size": 2}
    expected |= {"global_batch": 32, "lr": 0.01 / 8}
    for record in records:
        assert record.items() >= expected.items()
        assert record["command"].startswith(command)


@pytest.mark.parametrize("script", RUNGS)
def test_two_hosts_share_the_images_among_all_processes(rungs, script):
    assert counts(rungs[script], TRAIN) == dict.fromkeys(range(TRAIN), EPOCHS)
    assert counts(rungs[script], TEST) == dict.fromkeys(range(TEST), EPOCHS)


@pytest.mark.parametrize("script", RUNGS)
def test_two_hosts_train_the_same_as_one_machine(rungs, script):
    """To the bit: each rank crops images and drops out activations as its rank says."""
    run = rungs[script]
    one = rungs["one machine"]
    assert len(results(one)) == 5 and results(run) == results(one)
    weights = torch.load(run.disks[0] / "net.pt", weights_only=True)
    expected = torch.load(one.disks[0] / "net.pt", weights_only=True)
    assert equal_weights(weights, expected)


# 06


@pytest.fixture(scope="module")
def runs_06(start, images):
    """What 06 did on one machine, on two hosts with one folder, and on two with a disk each.

    The last one resumes after step 1, from a checkpoint that the second host alone has.
    """
    flags = [images, *FLAGS_06, "--log-file", "DISK/log.jsonl"]
    flags += ["--checkpoints-path", "DISK/checkpoints"]
    start_06 = functools.partial(start, "06_imagenet.py", then=on_hosts.note_06)
    one = start_06(flags, one_machine=True)
    shared = start_06(flags, own_disks=False)
    runs = {"one machine": end(one), "shared": end(shared)}
    first_step = runs["shared"].disks[0] / "checkpoints/step-00000001.pt"

    def copy_to_the_second(disk):
        if disk.name.endswith("host2"):
            (disk / "checkpoints").mkdir()
            shutil.copy(first_step, disk / "checkpoints")

    runs["resumed"] = end(start_06([*flags, "--resume"], fill=copy_to_the_second))
    return runs


def test_one_process_of_two_hosts_prints_in_06(runs_06):
    for name in ("shared", "resumed"):
        first, *others = runs_06[name].printed
        assert "06_imagenet.py | started by torchrun | world size 4 (2 on this machine)" in first
        assert devices(first) == [("0-1", "host1"), ("2-3", "host2")]
        assert first.count("done: top-1") == 1 and first.count("== test: [1/2]") == 1
        assert set(others) == {""}


def test_rank_0_alone_writes_to_a_folder_of_two_hosts(runs_06):
    run = runs_06["shared"]
    wrote = [(note["rank"], note["wrote"]) for note in run.notes if "wrote" in note]
    assert {rank for rank, _ in wrote} == {0}
    assert {name for _, name in wrote} == set(FILES_06)
    assert names(run.disks[0] / "checkpoints") == FILES_06, "no marker is left"


def test_each_host_without_a_shared_folder_keeps_all_files(runs_06):
    run = runs_06["resumed"]
    first, second = (disk / "checkpoints" for disk in run.disks)
    missing = "step-00000001.pt"  # with which the second host began
    assert names(first) == [name for name in FILES_06 if name != missing]
    assert names(second) == FILES_06
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names(first))
    assert {note["rank"] for note in run.notes if "wrote" in note} == {0, 2}


def test_one_process_of_two_hosts_writes_the_log_of_06(runs_06):
    shared, resumed = runs_06["shared"], runs_06["resumed"]
    assert names(shared.disks[0]) == ["checkpoints", "log.jsonl"]
    assert names(resumed.disks[0]) == ["checkpoints", "log.jsonl"]
    assert names(resumed.disks[1]) == ["checkpoints"]
    for run in (shared, resumed):
        records = read_records(run.disks[0])
        assert [record["epoch"] for record in records] == [1, 2]
        expected = {"launcher": "torchrun", "world_size": 4, "local_world_size": 2}
        expected |= {"global_batch": 20}
        for record in records:
            assert record.items() >= expected.items()
            assert record["command"].startswith("torchrun --nnodes=2 --nproc-per-node=2 06_")


def test_06_shares_the_images_among_all_processes(runs_06):
    run = runs_06["shared"]
    assert counts(run, TRAIN) == dict.fromkeys(range(TRAIN), EPOCHS)
    assert counts(run, TEST) == dict.fromkeys(range(TEST), EPOCHS)
    assert "25 images" in run.printed[0]


def test_06_on_two_hosts_trains_the_same_as_one_machine(runs_06):
    """To the bit: each rank drops out activations with the random numbers of its rank."""
    one, shared = runs_06["one machine"], runs_06["shared"]
    assert len(results(one)) == 7 and results(shared) == results(one)
    for name in FILES_06:
        expected, state = (read(run, name) for run in (one, shared))
        assert equal_weights(state["model"], expected["model"])
        assert torch.equal(state["totals"], expected["totals"])
        assert state["best"] == expected["best"]


def test_two_hosts_resume_and_count_each_image_once(runs_06):
    """Rank 0 adds the totals of the checkpoint to its own. Rank 2 does not, though it reads it."""
    one, resumed = runs_06["one machine"], runs_06["resumed"]
    assert resumed.printed[0].count("resumed from ") == 1
    assert "checkpoints/step-00000001.pt, after step 1 of 4" in resumed.printed[0]
    assert results(resumed) == results(one)[1:]
    for name in FILES_06[2:]:
        expected, state = (read(run, name) for run in (one, resumed))
        assert equal_weights(state["model"], expected["model"])
        assert state["totals"][3] == expected["totals"][3] > 0
        torch.testing.assert_close(state["totals"], expected["totals"])
    assert read(resumed, FILES_06[2])["totals"][3] == TRAIN


def test_the_processes_of_a_host_share_its_cores(runs_06):
    for run in (runs_06["shared"], runs_06["resumed"]):
        workers = [note["workers"] for note in run.notes if "workers" in note]
        assert workers == [on_hosts.CORES // 2] * 8, "two loaders of each of four ranks"


@pytest.mark.slow
def test_torchrun_on_two_hosts_logs_06_once_and_saves_twice(hosts, images, tmp_path):
    """With a real torchrun on each host, and TensorBoard. Each host has a folder of its own."""
    flags = [images, *FLAGS_06, "--workers", 1]
    flags += ["--tensorboard", "events", "--log-file", "log.jsonl"]
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--master-addr=host1"]
    processes = []
    for number, name in enumerate(hosts.names):
        (tmp_path / name).mkdir()
        command = [*torchrun, f"--node-rank={number}", ROOT / "06_imagenet.py", *flags]
        variables = {"OMP_NUM_THREADS": 1}
        processes.append(hosts.popen(number, *command, variables=variables, cwd=tmp_path / name))
    ends = [finished(process) for process in processes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [out.count("done: top-1") for _, out, _ in ends] == [1, 0]
    assert "ranks 2-3 on host2: cpu" in ends[0][1] and ends[1][1] == ""
    first, second = (tmp_path / name for name in hosts.names)
    assert names(first) == ["checkpoints", "events", "log.jsonl"]
    assert names(second) == ["checkpoints"]
    assert len(names(first / "events")) == 1
    assert len((first / "log.jsonl").read_text().splitlines()) == EPOCHS
    assert names(first / "checkpoints") == names(second / "checkpoints") == FILES_06


def read(run, name):
    """The state in a checkpoint of the first host."""
    return decode(read_file(run.disks[0] / "checkpoints" / name))


# template/train.py


@pytest.fixture(scope="module")
def template(start, tmp_path_factory):
    """What the template did on two hosts with a disk each; resumed on one disk, and on one host."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "common/distributed.py", project)
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
    return {"new": new, "shared": end(shared), "one machine": end(one)}


def test_one_process_of_two_hosts_prints_in_the_template(template):
    for name, lines in (("new", 2), ("shared", 4)):
        first, *others = template[name].printed
        assert len(first.splitlines()) == lines and first.count("done: test loss") == 1
        assert set(others) == {""}


def test_one_host_of_two_saves_in_the_template(template):
    first, second = template["new"].disks
    assert names(first) == ["best.pt", "last.pt"]
    assert names(second) == []


def test_the_template_on_two_hosts_trains_as_on_one_machine(template):
    one, shared = template["one machine"], template["shared"]
    assert len(results(one)) == 3 and results(shared) == results(one)
    for name in ("best.pt", "last.pt"):
        state = torch.load(shared.disks[0] / name, weights_only=True)
        expected = torch.load(one.disks[0] / name, weights_only=True)
        assert equal_weights(state["model"], expected["model"])
        assert state.get("epoch") == expected.get("epoch")
    assert shared.printed[0].startswith("resumed from ")
