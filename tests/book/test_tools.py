"""The Makefile, the benchmarks, the mutants and the steps."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torchvision
from images import write_images
from needs import need
from processes import ROOT, start
from ranks import Ranks

from common.models import MnistNet
from tools import demo, steps
from tools.bench import ddp as bench_ddp
from tools.bench import memory as bench_memory
from tools.bench import my_ddp as bench_my_ddp
from tools.bench import rendezvous as bench_rendezvous
from tools.mutants import listed
from tools.records import checkpoint_cost, checkpoint_seconds


def make(*arguments, cwd=ROOT, env=None):
    # of a make around us
    env = {name: value for name, value in (env or os.environ).items() if name != "MAKEFLAGS"}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )


def test_the_demo_compares_the_records_of_both_runs(monkeypatch, capsys):
    """One run of 01 and one of 03 with two processes, with the same images per step."""
    commands = []
    records = []

    def run(command, original=demo.run):
        commands.append(command)
        records.append(original(command))
        return records[-1]

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--epochs", "1", "--limit", "512"])
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
    with pytest.raises(SystemExit) as error:
        demo.run("python 01_snsc.py --arch no_such_model")
    assert error.value.code == 2
    assert "exit code 2 of: python 01_snsc.py --arch no_such_model" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "gpus"), [("cuda", 2), ("mps", 0)])
def test_the_demo_counts_the_gpus_that_a_process_group_can_use(monkeypatch, kind, gpus):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert demo.count_gpus() == gpus


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1), (2, 2), (3, 2), (4, 4), (16, 8)])
def test_the_demo_uses_the_gpus_that_divide_its_batch(gpus, processes):
    assert demo.count_processes(gpus) == processes


# Makefile


def test_make_help_names_every_command():
    named = [line.split()[1] for line in make("help").stdout.splitlines()]
    assert named == [
        "help",
        "demo",
        "test",
        "test-all",
        "test-oldest",
        "mutants",
        "gpu",
        "lint",
        "charts",
        "site",
        "clean",
    ]


def fake_python(folder, body):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


@pytest.fixture
def clone(tmp_path):
    """A folder with the Makefile and requirements alone, as after a clone."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_make_installs_again_when_the_requirements_change(clone):
    """Make installs once and again when the requirements change."""

    def plan():
        return make("--dry-run", "demo", "test", cwd=clone).stdout

    assert "pip install" in plan() and "01_snsc.py" in plan() and "pytest" in plan()
    (clone / ".venv").mkdir()
    for stamp in ("ready", "ready-dev"):
        (clone / ".venv" / stamp).touch()
    assert "pip install" not in plan() and "01_snsc.py" in plan() and "pytest" in plan()
    later = time.time() + 10
    os.utime(clone / "requirements.txt", (later, later))
    assert "pip install" in plan()


def test_an_old_python_is_named(clone):
    old = fake_python(clone, 'case "$1" in -c) exit 1;; *) echo Python 3.8.10;; esac')
    end = make("demo", old, cwd=clone)
    assert (
        end.returncode == 2 and "found Python 3.8.10, expected Python 3.10 or newer" in end.stderr
    )
    assert not (clone / ".venv").exists()


def test_a_python_without_venv_says_which_package_to_install(clone):
    bare = fake_python(
        clone, 'case "$2" in *ensurepip*) exit 1;; *-venv*) echo python3.12-venv;; esac'
    )
    (clone / "bin").mkdir()
    # a user who is not root, and a machine on which nothing gets installed
    for command in ("id", "apt-get"):
        (clone / "bin" / command).write_text("#!/bin/sh\necho 1000\nexit 1\n")
        (clone / "bin" / command).chmod(0o755)
    end = make("demo", bare, cwd=clone, env={"PATH": f"{clone / 'bin'}:/usr/bin:/bin"})
    assert end.returncode == 2 and "sudo apt-get install python3.12-venv" in end.stderr
    assert not (clone / ".venv").exists()


# tools/mutants/listed.py


def test_every_mutant_fits_the_code_as_it_is_now():
    listed.check(listed.MUTANTS)
    assert len(listed.MUTANTS) >= 60
    assert all(
        (ROOT / mutant.tests.split()[0].partition("::")[0]).exists() for mutant in listed.MUTANTS
    )


# tools/bench/


def bench(*given):
    process = start(
        "tools/bench/input.py", "--arch", "mnist_net", "--batch-size", 2, "--repeats", 1, *given
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_the_input_benchmark_compares_four_loops_on_small_images(small_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    out = bench("--dataset", "folder", "--data-dir", small_folder, "--log-file", log)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["loop"] for r in records] == ["classic, files", "classic, memory", "01", "limit"]
    for r in records:
        assert (
            r["images_per_second"] > 0
            and r["peak_memory_mib"] > 100
            and r["device_name"]
            and r["torch"]
        )
        assert re.search(rf"^{r['loop']}\s+{r['images_per_second']:.0f} \(", out, re.M)
    ours = records[2]["images_per_second"]
    for r in records:
        ratio = ours / r["images_per_second"]
        assert re.search(rf"^{r['loop']}\s.*MiB\s+{ratio:.2f} \(", out, re.M)


@pytest.mark.slow
def test_the_input_benchmark_compares_loaders_on_large_images(large_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    out = bench(
        "--dataset",
        "folder",
        "--data-dir",
        large_folder,
        "--log-file",
        log,
        "--arch",
        "mobilenet_v3_small",
    )
    loops = [json.loads(line)["loop"] for line in log.read_text().splitlines()]
    assert loops == ["classic, files", "01", "limit", "classic loader", "our loader"]
    assert re.search(r"^ours / classic\s+[\d.]+ \(", out, re.M)


@pytest.mark.slow
def test_the_benchmark_of_reencoding_reads_smaller_copies(large_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    process = start(
        "tools/bench/reencode.py",
        "--data-dir",
        large_folder,
        "--short-side",
        32,
        "--image-size",
        32,
        "--repeats",
        2,
        "--log-file",
        log,
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["short_side"], r["repeat"]) for r in records] == [
        (None, 0),
        (32, 0),
        (None, 1),
        (32, 1),
    ]
    assert (
        records[1]["megabytes"] < records[0]["megabytes"]
        and records[1]["images"] == records[0]["images"] > 0
    )
    ratio = statistics.median(
        records[k + 1]["images_per_second"] / records[k]["images_per_second"] for k in (0, 2)
    )
    assert re.search(rf"^ +32 .* {ratio:.2f} \([\d.]+ to [\d.]+\)$", out, re.M)


@pytest.mark.slow
def test_a_benchmark_of_too_few_steps_says_so(small_folder):
    given = ["--dataset", "folder", "--data-dir", small_folder, "--limit", 8, "--batch-size", 4]
    given += ["--repeats", 1]
    process = start("tools/bench/input.py", "--arch", "mnist_net", *given)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "2 steps are too few to time, expected 10 or more: lower --batch-size" in err


@pytest.mark.slow
def test_the_ddp_benchmark_tells_efficiency_and_launches(tmp_path):
    """The ddp benchmark tells efficiency communication and launches."""
    log = tmp_path / "bench.jsonl"
    given = ["--arch", "mnist_net", "--batch-size", 2, "--repeats", 1, "--launches", 1]
    given += ["--log-file", log]
    process = start("tools/bench/ddp.py", *given)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    *steps, launch = [json.loads(line) for line in log.read_text().splitlines()]
    speeds = {
        f"{r['world_size']} x {r['threads']} {r['variant']}": r["images_per_second"] for r in steps
    }
    assert list(speeds) == [
        "1 x 1 plain",
        *(f"2 x 1 {variant}" for variant in bench_ddp.VARIANTS),
        "1 x 2 plain",
    ]
    for name, speed in speeds.items():
        n = int(name[0]) * int(name[4])
        assert re.search(
            rf"^{name} +{speed:.0f} \(.*\) +{speed / n / speeds['1 x 1 plain']:.2f} \(", out, re.M
        )
    exposed = 1 - speeds["2 x 1 ddp"] / speeds["2 x 1 no_sync"]
    assert re.search(rf"^2 x 1 ddp .* {exposed:.2f} \({exposed:.2f} to {exposed:.2f}\)$", out, re.M)
    assert launch["bench"] == "launch" and launch["world_size"] == 1
    assert re.search(rf"^  1 processes +{launch['seconds']:.1f} \(", out, re.M)


@pytest.mark.slow
def test_the_my_ddp_benchmark_counts_messages_bytes_and_state(tmp_path):
    log = tmp_path / "bench.jsonl"
    given = ["--arch", "mnist_net", "--batch-size", 2, "--repeats", 2, "--log-file", log]
    ranks = Ranks(tmp_path, 2, given, script="tools/bench/my_ddp.py")
    assert ranks.wait() == [0, 0], ranks.output()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    variants = list(bench_my_ddp.variants())
    assert [(r["repeat"], r["variant"]) for r in records] == [
        (repeat, variant) for repeat in (0, 1) for variant in variants
    ]
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


def test_the_my_ddp_benchmark_compares_variants_in_the_same_repeat():
    def run(variant, seconds):
        counted = {"messages": 3, "sent_bytes": 2_000_000, "state_bytes": [3e6, 4e6]}
        return {"variant": variant, "seconds_per_step": seconds} | counted

    times = {bench_my_ddp.ALONE: (1, 3), bench_my_ddp.TORCHS: (2, 4), "21": (4, 4)}
    runs = [run(variant, seconds[k]) for k in (0, 1) for variant, seconds in times.items()]
    alone, _, buckets = bench_my_ddp.rows(runs)
    assert alone[3] == ""
    ratios, exposed = "1.50 (1.00 to 2.00)", "0.50 (0.25 to 0.75)"
    assert buckets == ("21", "4000 (4000 to 4000)", ratios, exposed, 3, "2.0", "3.0 + 4.0")


def test_the_my_ddp_benchmark_of_one_process_says_how_to_start_two(tmp_path):
    ranks = Ranks(tmp_path, 1, [], script="tools/bench/my_ddp.py")
    assert ranks.wait() == [2]
    assert "expected two or more: torchrun --nnodes=1 --nproc-per-node=2" in ranks.output()


def test_the_memory_benchmark_compares_with_ddp_in_the_same_repeat():
    def run(name, peak, sent, speed):
        held = {"weights": 1e6, "gradients": 2e6, "optimizer": 3e6, "other": 4e6}
        return {
            "name": name,
            "peak_bytes": peak * 1e6,
            "computed_peak_bytes": 22e6,
            "held_bytes": held,
            "sent_bytes": sent * 1e6,
            "images_per_second": speed,
        }

    runs = {
        "DDP, 2 ranks": [run("DDP", 40, 8, 10.0), run("DDP", 40, 8, 5.0)],
        "FSDP, 2 ranks": [run("FSDP", 20, 12, 20.0), run("FSDP", 19, 12, 5.0)],
    }
    head, ddp, fsdp = bench_memory.table(runs)
    assert head.split()[:3] == ["variant", "peak", "MB"]
    assert ddp.split()[3:6] == ["40", "1.00", "-45.0"]
    # peak, ratio, computed (%), held, sent, ratio, img/s, ratio
    found = re.fullmatch(
        r"FSDP, 2 ranks +20 +0.50 +\+10.0 % +10 +12 +1.50 +12.5 \((.*)\) +1.50 \((.*)\)", fsdp
    )
    assert found.groups() == ("5.0 to 20.0", "1.00 to 2.00")


def test_the_memory_benchmark_scales_its_variants_with_the_machine():
    def processes(counts):
        return {name: variant.processes for name, variant in bench_memory.variants(counts).items()}

    two, four, eight = (processes(counts) for counts in ([1, 2], [1, 2, 4], [1, 2, 8]))
    assert (
        len(two) == 7
        and max(two.values()) == 2
        and two["1 process"] == 1
        and "FSDP, 2 ranks" in two
    )
    assert set(four) - set(two) == {"FSDP, 4 ranks", "HSDP 2 x 2, 4 ranks"}
    assert set(eight) - set(two) == {"FSDP, 8 ranks", "HSDP 4 x 2, 8 ranks"}


@pytest.mark.slow
def test_the_finetune_benchmark_trains_in_three_ways(tmp_path):
    """The finetune benchmark trains in three ways on the other half of the classes."""
    for split in ("train", "val"):
        write_images(tmp_path, split, (32, 32), ("a", "b", "c", "d"), 40)
    given = ["--data-dir", tmp_path, "--epochs", 1, "--tuning-epochs", 2, "--images", 30]
    given += ["--repeats", 1]
    process = start("tools/bench/finetune.py", *given, "--log-file", tmp_path / "log")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["way"], row["steps"]) for row in rows] == [
        ("from nothing", 2),
        ("fine-tuned", 2),
        ("only the head", 2),
    ]
    for row in rows:
        assert re.search(rf"^{row['way']} +{row['test_acc']:.1f} \(", out, re.M)


@pytest.mark.slow
def test_the_train_benchmark_compares_06_with_the_bare_step(large_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    given = ["--arch", "mnist_net", "--image-size", 16, "--batch-size", 2, "--steps", 20]
    given += ["--every", 5, "--repeats", 1]
    process = start("tools/bench/train.py", *given, "--data-dir", large_folder, "--log-file", log)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    records = [json.loads(line) for line in log.read_text().splitlines()]
    speeds = {r["run"]: r["images_per_second"] for r in records}
    assert list(speeds) == ["bare", "dummy", "checkpoints", "files", "classic loader", "our loader"]
    for run in ("dummy", "checkpoints", "files"):
        assert re.search(
            rf"^{run} +{speeds[run]:.1f} \(.* MiB +{speeds[run] / speeds['bare']:.3f} \(", out, re.M
        )
    cost = 100 * checkpoint_cost(speeds["dummy"], speeds["checkpoints"], {"every": 5})
    assert f"a checkpoint every 100 steps costs {cost:.2f} (" in out
    assert f"ratio {speeds['our loader'] / speeds['classic loader']:.2f} (" in out


def test_a_checkpoint_costs_what_it_adds_to_the_steps():
    """A checkpoint costs what it adds to the steps between two."""
    # 10 images a step: 1 s without, 1.05 s with a checkpoint every 10 steps. So one takes 0.5 s, of
    # 100 s.
    saving = {"every": 10, "batch_size": 10, "images_per_second": 10 / 1.05}
    assert checkpoint_cost(10, 10 / 1.05, saving) == pytest.approx(0.005)
    assert checkpoint_seconds({"images_per_second": 10}, saving) == pytest.approx(0.5)


# tools/steps.py


def test_the_steps_of_the_ladder_are_listed_and_shown(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["steps.py"])
    with contextlib.suppress(SystemExit):  # a script that breaks a rule: test_ladder.py
        steps.main()
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(steps.MAX_LINES)
    monkeypatch.setattr("sys.argv", ["steps.py", "03"])
    steps.main()
    shown = capsys.readouterr().out.splitlines()
    assert "+import torch.distributed as dist" in shown
    added, removed = (sum(line.startswith(sign) for line in shown) for sign in "+-")
    assert re.search(
        rf"03_mnmc_ddp_launch.py +\d+ lines <- 01: \+{added} -{removed}; changes", "\n".join(listed)
    )
    monkeypatch.setattr("sys.argv", ["steps.py", "01"])
    with pytest.raises(
        SystemExit, match=r"steps\.py: error: 01: expected one of 02, 03, 04, 05, 07$"
    ):
        steps.main()


@pytest.mark.slow
def test_the_rendezvous_benchmark_compares_ours_with_torchs_own(
    tmp_path,
):
    log = tmp_path / "rendezvous.jsonl"
    given = ["--ranks", 2, "--start", 2, "--repeats", 1, "--log-file", log]
    process = start("tools/bench/rendezvous.py", *given)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    need(bench_rendezvous.missing())
    records = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [(what, ranks) for what, ranks in (("rendezvous", 2), ("start", 2))]
    assert [(r["what"], r["ranks"]) for r in records] == rows * 2
    for record in records:
        least = 4.5 if record["names"] == "slow" else 0
        for who in ("ours", "torch"):
            (seconds,) = record[f"{who}_seconds"]
            assert least < seconds and f"{seconds:.2f} s" in out


@pytest.mark.slow
def test_64_ranks_meet_where_the_name_server_does_not_answer(tmp_path):
    """64 ranks rendezvous where the name server does not answer."""
    need(bench_rendezvous.missing())
    log = tmp_path / "rendezvous.jsonl"
    given = ["--names", "slow", "--ranks", 64, "--start", 0, "--repeats", 1, "--log-file", log]
    process = start("tools/bench/rendezvous.py", *given)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (record,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert record["ours_seconds"] != [None], out


@pytest.mark.slow
def test_the_checkpoint_benchmark_compares_one_file_with_shards(tmp_path):
    log = tmp_path / "checkpoint.jsonl"
    given = ["--arch", "mobilenet_v3_small", "--repeats", 1, "--folder", tmp_path]
    ranks = Ranks(
        tmp_path, 2, [*given, "--log-file", log], script=str(ROOT / "tools/bench/checkpoint.py")
    )
    assert ranks.wait() == [0, 0], ranks.output()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["way"] for r in records] == ["06", "gathered", "shards", "async"]
    weights = sum(p.numel() for p in torchvision.models.mobilenet_v3_small().parameters())
    for record in records:
        assert record["files"] == (1 if record["way"] in ("06", "gathered") else 3)
        assert 2 * 4 * weights < record["bytes"] < 2.3 * 4 * weights, "weights and momentum"
        (waits,), (complete,) = record["waits_seconds"], record["complete_seconds"]
        assert 0 < waits <= complete
        assert f"{waits:.2f} s" in ranks.output() and f"{complete:.2f} s" in ranks.output()
    assert list(tmp_path.glob("tmp*")) == [], "its files are deleted"
