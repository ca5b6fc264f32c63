"""The proof of the ladder: however many processes share a global batch, and whoever starts them,
they learn the same.

Every run takes 20 steps (with resnet18, 8) of the same 64 images: one process with batch 64, two
with 32, four with 16.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from images import write_images
from processes import ROOT
from ranks import Ranks
from rungs import ALL_SCRIPTS, SCRIPTS, flags

from common import report
from common.data import build_datasets
from common.models import build_model
from tools import steps

STEPS = {"mnist_net": 20, "resnet18": 8}
GLOBAL_BATCH = 64

PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An ImageFolder tree of 8x8 images: 20 global batches to train on, a few to test on."""
    root = tmp_path_factory.mktemp("ladder")
    classes = [str(k) for k in range(5)]
    write_images(root, "train", (8, 8), classes, max(STEPS.values()) * GLOBAL_BATCH // 5)
    # 65: one rank has a batch more to test than the others
    return write_images(root, "test", (8, 8), classes, 13)


def command(launcher, world_size, folder):
    """The start of a command line."""
    return {
        "python": [*PYTHON, "01_snsc.py"],
        "torchrun": [*TORCHRUN, f"--nproc-per-node={world_size}", "03_mnmc_ddp_launch.py"],
        "mp.spawn": [*PYTHON, "04_mnmc_ddp_mp.py", f"--nproc-per-node={world_size}"],
        "srun": ["srun", "--nodes=2", f"--ntasks={world_size}", *PYTHON, "05_mnmc_ddp_slurm.py"],
    }[launcher]


def unwrapped(folder):
    """03 without DistributedDataParallel."""
    text = (ROOT / "03_mnmc_ddp_launch.py").read_text()
    assert "DistributedDataParallel(model)" in text
    (folder / "unwrapped.py").write_text(text.replace("DistributedDataParallel(model)", "model"))
    return str(folder / "unwrapped.py")


def look_in(rank):
    runpy.run_path(str(ROOT / "tests/helpers/probe/sitecustomize.py"))


# Where who starts the processes is not the matter, they are forked: that spares the seconds of each
# import of torch.
FORKED = {
    "forked": lambda folder: "03_mnmc_ddp_launch.py",
    "sharded": lambda folder: "07_fsdp.py",
    "unwrapped": unwrapped,
}


@pytest.fixture(scope="module")
def train(folder, tmp_path_factory, request):
    """A function (launcher, world_size, arch, *flags) -> what the run trained on, its losses and
    weights; cached.
    """
    runs = {}

    def train(launcher, world_size, arch, *flags):
        key = launcher, world_size, arch, flags
        if key not in runs:
            env = os.environ if launcher != "srun" else request.getfixturevalue("slurm_cluster").env
            runs[key] = run(launcher, world_size, arch, flags, env, tmp_path_factory.mktemp("run"))
        return runs[key]

    def run(launcher, world_size, arch, flags, env, out):
        given = ["--arch", arch, "--limit", STEPS[arch] * GLOBAL_BATCH, *flags]
        given += ["--dataset", "folder", "--data-dir", folder, "--epochs", 1, "--no-augment"]
        given += ["--lr", 0.01]
        given += ["--batch-size", GLOBAL_BATCH // world_size, "--save", out / "net.pt"]
        probe = {
            "PROBE": out,
            "OMP_NUM_THREADS": 1,
            "PROBE_DTYPE": "float64" if arch == "resnet18" else "float32",
        }
        if launcher in FORKED:
            script = FORKED[launcher](folder)
            ranks = Ranks(out, world_size, given, env=probe, prepare=look_in, script=script)
            assert set(ranks.wait()) == {0}, ranks.output()
            printed = ranks.output()
        else:
            env = {
                **env,
                **{k: str(v) for k, v in probe.items()},
                "PYTHONPATH": f"{ROOT / 'tests/helpers/probe'}:{ROOT}",
            }
            line = [*map(str, command(launcher, world_size, folder)), *map(str, given)]
            end = subprocess.run(
                line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
            )
            assert end.returncode == 0, end.stderr
            printed = end.stdout
        told = [
            json.loads(line)
            for file in out.glob("*.jsonl")
            for line in file.read_text().splitlines()
        ]
        assert {t["rank"] for t in told} == set(range(world_size))

        def by_step(what):
            ranks = [
                [t[what] for t in told if t["rank"] == r and what in t] for r in range(world_size)
            ]
            return list(zip(*(rank[: STEPS[arch]] for rank in ranks), strict=True))

        return SimpleNamespace(
            out=printed,
            batches=[sorted(chain(*step)) for step in by_step("indices")],
            statistics={t["statistics"] for t in told if "statistics" in t},
            printed=[
                float(n)
                for n in re.search(
                    r"== step: .* loss: ([\d.]+) \| acc: +([\d.]+)%", printed
                ).groups()
            ],
            tested=float(re.search(r"== test: .* acc: *([\d.]+)%", printed)[1]),
            losses=torch.tensor(
                [sum(step) / world_size for step in by_step("loss")], dtype=torch.float64
            ),
            weights=torch.load(out / "net.pt", weights_only=True),
        )

    return train


def distance(a, b):
    """How far two networks are apart: the norm of the difference of all weights, relative to that
    of the weights.
    """
    a, b = (torch.cat([w.flatten().double() for w in net.weights.values()]) for net in (a, b))
    return ((a - b).norm() / b.norm()).item()


WORLDS = [("torchrun", 2), ("mp.spawn", 2), ("srun", 2), ("forked", 4)]
WORLDS += [("sharded", 2), ("sharded", 4)]


@pytest.mark.parametrize(("launcher", "world_size"), WORLDS)
def test_without_batch_norm_any_world_learns_the_same(train, launcher, world_size):
    """A network without batch norm learns the same on any number of processes."""
    one = train("python", 1, "mnist_net")
    many = train(launcher, world_size, "mnist_net")
    assert many.batches == one.batches and len(one.batches) == 20
    assert sorted(chain(*one.batches)) == list(range(20 * GLOBAL_BATCH))
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-5, atol=1e-6)
    assert one.losses[0] - one.losses[-1] > 0.03, (
        "it has learned, so there was something to disagree on"
    )
    assert distance(many, one) < 1e-5
    assert many.printed == pytest.approx(one.printed, abs=2e-3), "loss and accuracy of all ranks"
    assert many.tested == pytest.approx(one.tested, abs=1.6), (
        "of 65 images, one at most is on the edge"
    )
    assert launcher in FORKED or f"started by {launcher} | world size {world_size} " in many.out
    assert (
        f"global batch = {GLOBAL_BATCH // world_size} x {world_size} = "
        f"{GLOBAL_BATCH} | lr 0.01 -> 0.0025"
    ) in many.out


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["forked", "sharded"])
def test_resnet18_with_sync_bn_learns_the_same_on_two_processes(train, launcher):
    """In float64.

    In float32 no two ways to add up the same numbers stay together: one process that takes the
    images of each batch in reverse order is as far off after 20 steps, 4 %, because a rounding
    error that carries one value across the kink of a ReLU changes its gradient at once."""
    one = train("python", 1, "resnet18")
    many = train(launcher, 2, "resnet18", "--sync-bn")
    assert many.batches == one.batches
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-9, atol=0)
    assert distance(many, one) < 1e-9
    assert many.tested == one.tested


@pytest.mark.slow
def test_resnet18_without_synchronised_batch_norm_does_not(train):
    one, many = train("python", 1, "resnet18"), train("forked", 2, "resnet18")
    assert many.batches == one.batches
    assert (many.losses - one.losses).abs().max() > 1e-2
    assert len(many.statistics) == 1, (
        "it is one network that is tested, though every rank has normalised by its own"
    )
    assert distance(many, one) > 1e-2


def test_without_the_wrap_a_rank_learns_from_its_own_images(train):
    """Without the wrap a rank learns from its own images alone."""
    one, alone = train("python", 1, "mnist_net"), train("unwrapped", 2, "mnist_net")
    assert alone.batches == one.batches
    assert distance(alone, one) > 1e-3


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_1003_test_images_are_counted_once_each(world_size, tmp_path):
    """At a rate too low to change a weight, so that every run tests the same network.

    Its seed is one that gets the first image right: a sampler that repeats the first images, to
    give every rank as many, would count too much."""
    write_images(tmp_path, "train", (32, 32), ["a", "b"], 8)
    write_images(tmp_path, "test", (32, 32), ["a", "b"], 502)
    (tmp_path / "test/b/501.png").unlink()
    given = ["--dataset", "folder", "--data-dir", tmp_path, "--arch", "mnist_net"]
    given += ["--batch-size", 250]
    train_set, test_set = build_datasets(flags(*given))
    mean, std = (s.float()[:, None, None] for s in train_set.channel_stats())

    def outputs(seed):
        torch.manual_seed(seed)
        model = build_model(flags(*given), train_set).eval()
        with torch.no_grad():
            return model((test_set.images - mean) / std)

    def first_is_right(seed):
        return outputs(seed)[0].argmax() == test_set.targets[0]

    seed = next(seed for seed in range(100) if first_is_right(seed))
    correct = (outputs(seed).argmax(1) == test_set.targets).sum().item()
    loss = torch.nn.functional.cross_entropy(outputs(seed), test_set.targets).item()
    assert len(test_set) == 1003 and 0 < correct < 1003

    log = tmp_path / "log.jsonl"
    given += ["--epochs", 1, "--lr", 1e-30, "--seed", seed, "--log-file", log]
    ranks = Ranks(tmp_path, world_size, given, script="03_mnmc_ddp_launch.py")
    assert set(ranks.wait()) == {0}, ranks.output()
    record = json.loads(log.read_text())
    assert record["test_acc"] == round(100 * correct / 1003, 3)
    assert record["test_loss"] == pytest.approx(loss, abs=1e-4)


class NoReport:
    """Takes the place of Report and does nothing."""

    def __init__(self, *args):
        pass

    def timed(self, loader, epoch):
        return loader

    def due(self, step):
        return False

    def __getattr__(self, name):
        return lambda *args: None


def without_report(rank):
    report.Report = NoReport


@pytest.mark.parametrize(
    ("script", "world_size"), [("01_snsc.py", 1), ("03_mnmc_ddp_launch.py", 2)]
)
def test_a_script_trains_to_the_same_weights_without_its_report(
    folder, tmp_path, script, world_size
):
    weights = []
    for name, prepare in (("with", None), ("without", without_report)):
        (tmp_path / name).mkdir()
        given = ["--dataset", "folder", "--data-dir", folder, "--epochs", 2, "--arch", "mnist_net"]
        given += ["--save", tmp_path / name / "model.pt"]
        ranks = Ranks(tmp_path / name, world_size, given, script=script, prepare=prepare)
        assert set(ranks.wait()) == {0}, ranks.output()
        assert ("done: test accuracy" in ranks.output()) == (name == "with")
        weights.append(torch.load(tmp_path / name / "model.pt", weights_only=True))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


# The steps from script to script


def test_the_command_prints_the_size_of_every_rung(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["steps.py"])
    runpy.run_path(str(ROOT / "tools/steps.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.name for path in ROOT.glob("0?_*.py"))
    for line in lines:
        script, count = line.split()[:2]
        assert int(count) == len((ROOT / script).read_text().splitlines())


@pytest.mark.parametrize("script", steps.MAX_LINES)
def test_a_step_is_small_and_leaves_other_sections_as_they_are(script):
    """A step is small and leaves the other sections as they are."""
    assert steps.problems(script) == []


def test_every_script_is_a_step_but_01_and_06():
    scripts = sorted(path.name for path in ROOT.glob("[0-9][0-9]_*.py"))
    assert (
        scripts
        == list(steps.MAX_LINES)
        == sorted(["01_snsc.py", *steps.STEPS, "06_imagenet.py"])
        == ALL_SCRIPTS
    )


def test_a_step_that_grows_or_strays_is_reported(tmp_path, monkeypatch):
    for script in SCRIPTS:
        (tmp_path / script).write_text((ROOT / script).read_text())
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    child = tmp_path / "05_mnmc_ddp_slurm.py"
    heading = "    # 3. define loss and optimizer\n"
    child.write_text(child.read_text().replace(heading, heading + f"    more = {'1' * 100}\n" * 40))
    lines, columns, size, sections = steps.problems("05_mnmc_ddp_slurm.py")
    assert re.search(r"05_mnmc_ddp_slurm\.py: \d+ lines, expected 107 at most", lines)
    assert "more than 100 columns in line" in columns
    assert re.search(r"\d+ lines added, expected 14 at most", size) and "'0', '3')" in sections
    child.write_text(child.read_text().replace("# 5. tear down", "# 5. the end"))
    with pytest.raises(ValueError, match=r"05_mnmc_ddp_slurm[.]py has no section '5' after '4'"):
        steps.problems("05_mnmc_ddp_slurm.py")
