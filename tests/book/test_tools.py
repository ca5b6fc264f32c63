"""`make demo`, make, the steps of the ladder, and the benchmark."""

import json
import os
import re
import shutil
import subprocess
import sys
from statistics import median

import pytest
import torch
from processes import ROOT
from rungs import ALL_SCRIPTS

from tools import demo, steps


@pytest.mark.slow
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
    monkeypatch.setattr("sys.argv", ["demo.py", "--epochs", "1", "--limit", "512"])
    demo.main(demo.parse_args())
    assert all(command.endswith(" --limit 512 --epochs 1") for command in commands)
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


def test_the_demo_refuses_fewer_images_than_its_processes_can_train_on(monkeypatch, capsys):
    for gpus, least in ((0, 3), (1, 2), (8, 9)):  # each process needs two, the last may repeat one
        monkeypatch.setattr(demo, "count_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr("sys.argv", ["demo.py", "--limit", str(least)])
        assert demo.parse_args().limit == least
        monkeypatch.setattr("sys.argv", ["demo.py", "--limit", str(least - 1)])
        with pytest.raises(SystemExit):
            demo.parse_args()
        assert f"expected a whole number of {least} or more" in capsys.readouterr().err


# tools/bench.py

IMAGES = ["images", "--arch=small_net", "--image-size=32", "--batch-size=8", "--runs"]
LOOPS = {
    "06": [*IMAGES, "bare", "dummy"],
    "08": ["text", "--layers=1", "--width=16", "--batch-tokens=256", "--runs", "plain", "08"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", LOOPS)
def test_the_benchmark_compares_a_script_with_plain_loops(script, tmp_path):
    log = tmp_path / "log.jsonl"
    flags = [*LOOPS[script], "--steps=20", "--repeats=2", f"--log-file={log}"]
    command = [sys.executable, "tools/bench.py", *flags]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in log.read_text().splitlines()]
    speed = {"06": "images_per_second", "08": "tokens_per_second"}[script]
    runs = {}
    for record in records:
        runs.setdefault(record["run"], []).append(record[speed])
    name = {"06": "dummy", "08": "08"}[script]
    expected = f"{script}: {median(runs[name]):.0f} "
    assert out.splitlines()[-1].startswith(expected), out
    for other in runs.keys() - {name}:
        ratio = median(ours / theirs for ours, theirs in zip(runs[name], runs[other], strict=True))
        assert f"{ratio:.2f} of {other}" in out.splitlines()[-1]
    assert all(record["peak_memory_mib"] > 100 for record in records)


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


@pytest.mark.parametrize(
    ("command", "files", "others"),
    [
        ("demo", [""], ["matplotlib", "tensorboard", "pytest", "sphinx"]),
        ("charts", ["", "-charts"], ["tensorboard", "pytest", "sphinx"]),
        ("test", ["", "-dev"], ["sphinx", "playwright"]),
        ("lint", ["", "-dev"], ["sphinx", "playwright"]),
        ("site", ["", "-site"], ["matplotlib", "tensorboard", "pytest"]),
    ],
)
def test_a_make_command_installs_what_it_needs_and_no_more(tmp_path, command, files, others):
    """A Python that only notes its arguments, which is also the one of the environment."""
    for path in [ROOT / "Makefile", *ROOT.glob("requirements*.txt")]:
        shutil.copy(path, tmp_path)
    (tmp_path / "notebooks").mkdir()
    for program in ("python", "ruff"):
        fake(tmp_path, program, f'echo "$@" >> {tmp_path}/log')
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(tmp_path)
    make(command, f"PYTHON={tmp_path}/python", cwd=tmp_path)
    installs = re.findall(r"pip install .*-r (\S+)", (tmp_path / "log").read_text())
    assert installs == [f"requirements{name}.txt" for name in files]
    installed = "".join(packages_of(tmp_path / name) for name in installs)
    assert "torch>=" in installed and "tqdm>=" in installed
    assert not [name for name in others if f"{name}>=" in installed]


def packages_of(file):
    """What pip reads in a file, and in those that it includes."""
    return re.sub(r"-r (.*)", lambda found: packages_of(file.parent / found[1]), file.read_text())


# The steps of the ladder


def test_a_step_changes_no_section_that_is_not_its_lesson(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["steps.py"])
    steps.main()  # exits with a message if another section has changed
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ALL_SCRIPTS
    monkeypatch.setattr("sys.argv", ["steps.py", "3"])
    steps.main()
    shown = capsys.readouterr().out.splitlines()
    assert "+import torch.distributed as dist" in shown
    sizes = tuple(sum(line.startswith(sign) for line in shown) for sign in "+-")
    assert sizes == steps.size("03_mnmc_ddp_launch.py")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    steps.main()
    in_color = capsys.readouterr().out
    assert "\n\033[32m+import torch.distributed as dist\033[0m\n" in in_color
    assert "\n\033[31m-" in in_color
    monkeypatch.setenv("NO_COLOR", "1")
    steps.main()
    assert capsys.readouterr().out.splitlines() == shown
    monkeypatch.setattr("sys.argv", ["steps.py", "01"])
    with pytest.raises(SystemExit, match="error: 01: expected one of 02, 03, 04, 05, 07, 08"):
        steps.main()
