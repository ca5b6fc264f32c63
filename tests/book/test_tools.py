"""`make demo`, the steps of the ladder, and the benchmarks."""

import json
import os
import re
import shlex
import subprocess

import pytest
import torch
from processes import ROOT, finished, start
from ranks import Ranks
from rungs import ALL_SCRIPTS

from common.models import MnistNet
from tools import demo, steps
from tools.bench import ddp, my_ddp
from tools.records import checkpoint_cost, checkpoint_seconds


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_demo_compares_the_records_of_both_runs(
    real, small_folder, tmp_path, monkeypatch, capsys
):
    """One run of 01 and one of 03 with two processes, with the same images per step."""
    commands = []
    records = []

    def fork(command):
        words = shlex.split(command)
        k = next(k for k, word in enumerate(words) if word.endswith(".py"))
        log = tmp_path / f"{len(commands)}.jsonl"
        given = [*words[k + 1 :], "--dataset", "folder", "--data-dir", small_folder]
        world_size = 2 if "--nproc-per-node=2" in words else 1
        ranks = Ranks(tmp_path, world_size, [*given, "--log-file", log], script=words[k])
        assert set(ranks.wait()) == {0}, ranks.output()
        return json.loads(log.read_text().splitlines()[-1])

    def run(command, original=demo.run if real else fork):
        commands.append(command)
        records.append(original(command))
        return records[-1]

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.argv", ["demo.py", "--epochs", "1", "--limit", "512"])
    demo.main(demo.parse_args())
    assert all(" --limit 512 --epochs 1 " in command for command in commands)
    assert "--batch-size 256" in commands[0] and "--batch-size 128" in commands[1]
    out = capsys.readouterr().out
    assert re.search(r"^processes +1 +2$", out, re.M)
    assert re.search(r"^images per process and step +256 +128$", out, re.M)
    for name, key in (("loss in training", "train_loss"), ("loss on the test set", "test_loss")):
        printed = re.search(rf"^{name} +([\d.]+) +([\d.]+)$", out, re.M).groups()
        assert printed == tuple(f"{record[key]:.3f}" for record in records)
    assert [record["script"][:2] for record in records] == ["01", "03"]


def test_a_run_of_the_demo_that_fails_ends_it(capsys):
    command = "python -c 'import sys; sys.exit(3)'"
    with pytest.raises(SystemExit) as error:
        demo.run(command)
    assert error.value.code == 3
    assert f"exit code 3 of: {command}" in capsys.readouterr().err


def test_the_demo_uses_the_gpus_that_divide_its_batch_and_no_mps(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    for kind, gpus in (("cuda", 3), ("mps", 0)):
        device = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda device=device: device)
        assert demo.count_gpus() == gpus
    assert [demo.count_processes(gpus) for gpus in (0, 1, 3, 16)] == [2, 1, 2, 8]


# Makefile


def make(*arguments, cwd=ROOT, **variables):
    # without those of a make around us
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=cwd, env=env | variables, capture_output=True, text=True)


def fake(folder, name, body):
    """A program for the shell."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_is_too_old_or_lacks_venv_is_named(tmp_path):
    assert "make demo " in make("help").stdout
    for name in ("Makefile", "requirements.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    old = fake(tmp_path, "old", 'case "$1" in -c) exit 1;; *) echo Python 3.8.10;; esac')
    end = make("demo", f"PYTHON={old}", cwd=tmp_path)
    assert end.returncode == 2
    assert "found Python 3.8.10, expected Python 3.10 or newer" in end.stderr

    bare = 'case "$2" in *ensurepip*) exit 1;; *-venv*) echo python3.12-venv;; esac'
    python = fake(tmp_path, "bare", bare)
    fake(tmp_path, "id", "echo 1000")  # a user who is not root
    path = f"{tmp_path}:/usr/bin:/bin"
    end = make("demo", f"PYTHON={python}", cwd=tmp_path, PATH=path)
    assert end.returncode == 2 and "sudo apt-get install python3.12-venv" in end.stderr
    assert not (tmp_path / ".venv").exists()


# The steps of the ladder

LINES = {  # about as many as they have; a new concept needs a reason, not a new number
    "01_snsc.py": 82,
    "02_snmc_dp.py": 85,
    "03_mnmc_ddp_launch.py": 104,
    "04_mnmc_ddp_mp.py": 105,
    "05_mnmc_ddp_slurm.py": 107,
    "06_imagenet.py": 342,
    "07_fsdp.py": 130,
}


def test_a_step_is_small_and_leaves_other_sections_as_they_are(monkeypatch, capsys):
    assert list(LINES) == ALL_SCRIPTS
    for script, most in LINES.items():
        assert len(steps.read(script)) <= most, script
    monkeypatch.setattr("sys.argv", ["steps.py"])
    steps.main()  # exits with a message if another section has changed
    listed_lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed_lines] == ALL_SCRIPTS


def test_the_change_of_a_step_is_shown(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["steps.py", "03"])
    steps.main()
    shown = capsys.readouterr().out.splitlines()
    assert "+import torch.distributed as dist" in shown
    sizes = tuple(sum(line.startswith(sign) for line in shown) for sign in "+-")
    assert sizes == steps.size("03_mnmc_ddp_launch.py")
    monkeypatch.setattr("sys.argv", ["steps.py", "01"])
    expected = r"steps\.py: error: 01: expected one of 02, 03, 04, 05, 07$"
    with pytest.raises(SystemExit, match=expected):
        steps.main()
    monkeypatch.setitem(steps.STEPS, "05_mnmc_ddp_slurm.py", steps.Step("01_snsc.py", ("0",)))
    monkeypatch.setattr("sys.argv", ["steps.py"])
    with pytest.raises(SystemExit, match=r"05_mnmc_ddp_slurm\.py: changes the sections .*, expect"):
        steps.main()


# Benchmarks


def test_a_checkpoint_costs_what_it_adds_to_the_steps():
    # 10 images a step: 1 s without, 1.05 s with a checkpoint every 10 steps. So one takes 0.5 s, of
    # 100 s.
    saving = {"every": 10, "batch_size": 10, "images_per_second": 10 / 1.05}
    assert checkpoint_cost(10, 10 / 1.05, saving) == pytest.approx(0.005)
    assert checkpoint_seconds({"images_per_second": 10}, saving) == pytest.approx(0.5)


INPUT = ["--arch", "mobilenet_v3_small", "--dataset", "folder"]
LOOPS = ["classic, files", "01", "limit"]
TRAIN = ["--arch", "mnist_net", "--image-size", 16, "--steps", 20]
RUNS = ["bare", "dummy", "checkpoints", "files"]
LOADERS = ["classic loader", "our loader"]
DDP = ["--arch", "mnist_net", "--launches", 1]
VARIANTS = ["plain", *ddp.VARIANTS, "plain"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "given", "variants", "last"),
    [
        ("input", INPUT, [*LOOPS, *LOADERS], r"01: \d+ img/s, .* of limit$"),
        ("train", TRAIN, [*RUNS, *LOADERS], r"06: \d+ img/s, .* of bare$"),
        ("ddp", DDP, VARIANTS, r"^  1 processes +\d"),
    ],
)
def test_a_benchmark_prints_and_records_every_variant(
    name, given, variants, last, large_folder, tmp_path
):
    """A rehearsal of make gpu runs the other variants: small images, and loops of examples."""
    log = tmp_path / "log.jsonl"
    images = ["--data-dir", large_folder] if name != "ddp" else []
    command = [f"tools/bench/{name}.py", *given, *images, "--batch-size", 2, "--repeats", 1]
    code, out, err = finished(start(*command, "--log-file", log), timeout=600)
    assert code == 0, err
    assert re.search(last, out.splitlines()[-1]), out
    records = [json.loads(line) for line in log.read_text().splitlines()]
    if name == "ddp":
        assert records.pop()["bench"] == "launch"
    found = [next(r[key] for key in ("loop", "run", "variant") if key in r) for r in records]
    assert found == variants
    printed = re.findall(r"\d[\d.]*", out)
    for record in records:
        speed = record["images_per_second"]
        assert speed > 0 and record["device_name"] and record["repeat"] == 0
        assert f"{speed:.0f}" in printed or f"{speed:.1f}" in printed, out


@pytest.mark.slow
@pytest.mark.rare
def test_the_my_ddp_benchmark_counts_messages_bytes_and_state(tmp_path):
    log = tmp_path / "bench.jsonl"
    given = ["--arch", "mnist_net", "--batch-size", 2, "--repeats", 2, "--log-file", log]
    ranks = Ranks(tmp_path, 2, given, script="tools/bench/my_ddp.py")
    assert ranks.wait() == [0, 0], ranks.output()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [(repeat, variant) for repeat in (0, 1) for variant in my_ddp.variants()]
    assert [(r["repeat"], r["variant"]) for r in records] == expected
    alone, after, hooks, buckets, torchs, sharded = records[:6]
    model = MnistNet(3, (32, 32), 10)
    parameters = len(list(model.parameters()))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert alone["messages"] == 0
    assert after["messages"] == hooks["messages"] == parameters == 8
    assert buckets["messages"] == 1 <= torchs["messages"] <= 3
    assert sharded["messages"] == torchs["messages"] + parameters
    sent = [r["sent_bytes"] for r in records[:6]]
    assert sent == [0, size, size, size, size, 1.5 * size]
    assert torchs["state_bytes"] == [size, size]
    assert sum(sharded["state_bytes"]) == size and min(sharded["state_bytes"]) > 0
    for r in records[:6]:
        assert re.search(rf"^{r['variant']} .* {r['messages']} +[\d.]+ +", ranks.output(), re.M)
