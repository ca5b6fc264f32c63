"""The Makefile, the benchmark and the tables of the README."""

import json
import os
import re
import shlex
import statistics
import subprocess
import time

import pytest
from conftest import ROOT, flags, start

from tools import tables


def make(*arguments, cwd=ROOT, env=None):
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )


# Makefile


def test_make_help_names_every_command():
    assert [line.split()[1] for line in make("help").stdout.splitlines()] == ["help", "demo", "test", "lint", "clean"]


def fake_python(folder, body):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


@pytest.fixture
def fresh(tmp_path):
    """A folder with the Makefile and requirements alone, as after a clone."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_make_installs_once_and_again_when_the_requirements_change(fresh):
    def plan():
        return make("--dry-run", "demo", "test", cwd=fresh).stdout

    assert "pip install" in plan() and "01_snsc.py" in plan() and "pytest" in plan()
    (fresh / ".venv").mkdir()
    for stamp in ("ready", "ready-dev"):
        (fresh / ".venv" / stamp).touch()
    assert "pip install" not in plan() and "01_snsc.py" in plan() and "pytest" in plan()
    later = time.time() + 10
    os.utime(fresh / "requirements.txt", (later, later))
    assert "pip install" in plan()


def test_an_old_python_is_named(fresh):
    old = fake_python(fresh, 'case "$1" in -c) exit 1;; *) echo Python 3.8.10;; esac')
    end = make("demo", old, cwd=fresh)
    assert end.returncode == 2 and "found Python 3.8.10, expected Python 3.10 or newer" in end.stderr
    assert not (fresh / ".venv").exists()


def test_a_python_without_venv_says_which_package_to_install(fresh):
    bare = fake_python(fresh, 'case "$2" in *ensurepip*) exit 1;; *-venv*) echo python3.12-venv;; esac')
    (fresh / "bin").mkdir()
    for command in ("id", "apt-get"):  # a user who is not root, and a machine on which nothing gets installed
        (fresh / "bin" / command).write_text("#!/bin/sh\necho 1000\nexit 1\n")
        (fresh / "bin" / command).chmod(0o755)
    end = make("demo", bare, cwd=fresh, env={"PATH": f"{fresh / 'bin'}:/usr/bin:/bin"})
    assert end.returncode == 2 and "sudo apt-get install python3.12-venv" in end.stderr
    assert not (fresh / ".venv").exists()


# tools/bench.py


def bench(*given):
    process = start("tools/bench.py", "input", "--arch", "mnist_net", "--batch-size", 2, "--repeats", 1, *given)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def test_the_input_benchmark_compares_four_loops_on_small_images(small_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    out = bench("--dataset", "folder", "--data-dir", small_folder, "--log-file", log)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["loop"] for r in records] == ["classic, files", "classic, memory", "01", "limit"]
    for r in records:
        assert r["images_per_second"] > 0 and r["peak_memory_mib"] > 100 and r["device_name"] and r["torch"]
        assert re.search(rf"^{r['loop']}\s+{r['images_per_second']:.0f} \(", out, re.M)
    ours = records[2]["images_per_second"]
    for r in records:
        ratio = ours / r["images_per_second"]
        assert re.search(rf"^{r['loop']}\s.*MiB\s+{ratio:.2f} \(", out, re.M)


def test_the_input_benchmark_compares_loaders_on_large_images(large_folder, tmp_path):
    log = tmp_path / "bench.jsonl"
    out = bench("--dataset", "folder", "--data-dir", large_folder, "--log-file", log, "--arch", "resnet18")
    loops = [json.loads(line)["loop"] for line in log.read_text().splitlines()]
    assert loops == ["classic, files", "01", "limit", "classic loader", "our loader"]
    assert re.search(r"^ours / classic\s+[\d.]+ \(", out, re.M)


def test_a_benchmark_of_too_few_steps_says_so(small_folder):
    given = ["--dataset", "folder", "--data-dir", small_folder, "--limit", 8, "--batch-size", 4, "--repeats", 1]
    process = start("tools/bench.py", "input", "--arch", "mnist_net", *given)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "2 steps are too few to time, expected 10 or more: lower --batch-size" in err


# README.md and results/


def test_the_tables_of_the_readme_are_fresh():
    process = start("tools/tables.py", "--check")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_every_command_of_the_readme_is_one_a_script_takes():
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"python (\d\d_\w+\.py)([^`\n#|]*)", text)
    assert len(commands) >= 5
    for script, rest in commands:
        assert (ROOT / script).exists(), script
        if rest.strip() != "--help":
            flags(*shlex.split(rest))
    for target in re.findall(r"make (\w+) ", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_cifar10_is_recorded_within_a_point_and_a_half_of_the_published_run():
    for epoch, published in ((1, 39.2), (5, 65.1)):
        accuracies = [r["train_acc"] for r in tables.cifar10_runs() if r["epoch"] == epoch]
        assert len(accuracies) >= 3 and abs(statistics.mean(accuracies) - published) < 1.5


def test_mnist_is_recorded_above_98_percent_after_two_epochs():
    runs = [r for r in tables.records("first_runs") if (r["dataset"], r["model"]) == ("mnist", "mnist_net")]
    assert runs and all(r["test_acc"] > 98 for r in runs if r["epoch"] == 2)


def test_shapes_is_recorded_above_90_percent_after_five_epochs():
    runs = [r for r in tables.records("first_runs") if (r["dataset"], r["limit"]) == ("shapes", None)]
    assert runs and all(r["test_acc"] > 90 for r in runs if r["epoch"] == 5)


def test_the_input_pipeline_is_recorded_as_fast_as_the_step_allows():
    runs = [r for r in tables.records("input") if r["device"] == "cpu"]

    def ratio(data_dir, ours, other):
        speeds = {}
        for r in runs:
            if r["data_dir"] == data_dir:
                speeds.setdefault(r["loop"], []).append(r["images_per_second"])
        return statistics.median(a / b for a, b in zip(speeds[ours], speeds[other], strict=True))

    assert ratio("data/cifar10", "01", "limit") >= 0.95
    assert ratio("data/cifar10", "01", "classic, memory") >= 1.05
    assert ratio("data/cifar10", "01", "classic, files") >= 1.25
    assert ratio("data/imagenet-mini", "our loader", "classic loader") >= 1.4
