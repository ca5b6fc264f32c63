"""make gpu: its plan for machines that are not here; how parts end, are recorded and continue."""

import json
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT
from rungs import parse

from common.errors import UserError
from tools import gpu
from tools.lab import same_bits

PLANS = {n: gpu.plan(SimpleNamespace(devices=n, name="x"), has_data=lambda _: True) for n in (1, 8)}
COMMANDS = sorted(
    {command for parts in PLANS.values() for part in parts for command in part.commands}
)


def test_the_plan_is_short_and_begins_with_the_most_valuable():
    """The plan is short and the most valuable parts come first."""
    for parts in PLANS.values():
        assert [part.name for part in parts][:4] == ["tests", "sync", "resume", "fp16"]
        assert all(60 * part.minutes <= gpu.PART_SECONDS for part in parts)
        assert len({part.name for part in parts}) == len(parts)
    assert sum(part.minutes for part in PLANS[1]) <= 50 and "ddp" not in {
        part.name for part in PLANS[1]
    }
    assert "torchrun --nproc-per-node=8 launch/preflight.py" in str(PLANS[8])
    without = gpu.plan(SimpleNamespace(devices=1, name="x"), has_data=lambda _: False)
    assert sum(part.minutes for part in without) <= 40, (
        "what data/ holds is measured if it is there"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_script_of_the_plan_takes_its_flags(command, monkeypatch):
    words = shlex.split(
        command.format(tmp="/tmp", train="/tmp/t", input="/tmp/i", ddp="/tmp/d", peer="/tmp/p")
    )
    words = [
        word
        for word in words[words.index(next(w for w in words if w in ("python", "torchrun"))) + 1 :]
    ]
    if words[:2] == ["-m", "pytest"] or words[0] == "tools/lab/same_bits.py":
        return
    if words[0] == "tools/lab/sync_warnings.py":
        words = words[1:]
    script = next(word for word in words if word.endswith(".py"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    parse(monkeypatch, script, *words[words.index(script) + 1 :])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of one GPU whose plan has two parts, the second of which fails; returns its results
    file.
    """
    parts = [
        gpu.Part(
            "good", 1, "x", ["python -c 'print(1 + 1)'", "! timeout -s KILL 1 sleep 9", "ls {tmp}"]
        ),
        gpu.Part(
            "bad", 1, "x", ["python -c 'print(7); raise SystemExit(3)'", "python -c 'print(8)'"]
        ),
    ]
    monkeypatch.setattr(gpu, "plan", lambda _: parts)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.Machine, "here", lambda: SimpleNamespace(name="fake"))
    monkeypatch.setattr(gpu, "pick_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return tmp_path / "results/gpu/fake.jsonl"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.flags("tools/gpu.py", "--list")
def test_what_has_passed_is_recorded_and_not_run_again(machine, capfd):
    for expected in (["good", "bad"], ["bad"]):
        before = len(records(machine)) if machine.exists() else 0
        with pytest.raises(UserError, match=r"failed: bad; run again: python tools/gpu.py bad"):
            gpu.main(SimpleNamespace(parts=[], list=False))
        assert [record["part"] for record in records(machine)[before:]] == expected
    good, bad = records(machine)[:2]
    assert good["passed"] and good["ended"][0]["output"] == ["2"] and len(good["ended"]) == 3
    assert (
        not bad["passed"]
        and [end["code"] for end in bad["ended"]] == [3]
        and bad["ended"][0]["output"] == ["7"]
    )
    gpu.main(SimpleNamespace(parts=["good"], list=False))
    assert [record["part"] for record in records(machine)] == ["good", "bad", "bad", "good"]
    capfd.readouterr()
    gpu.main(SimpleNamespace(parts=[], list=True))
    assert "done  good" in capfd.readouterr().out


def test_a_part_that_takes_too_long_is_killed_with_its_children(tmp_path):
    """A part that takes too long is killed with all that it started."""
    file = tmp_path / "beats"
    code, output = gpu.execute(
        f"echo begun; (while true; do echo x >> {file}; sleep 0.1; done) & wait", 2, tmp_path
    )
    assert code == 124 and output == ["begun"]
    beats = file.stat().st_size
    time.sleep(0.5)
    assert file.stat().st_size == beats


def test_without_a_gpu_make_gpu_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    end = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert end.returncode == 2
    (line,) = [line for line in end.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith(
        "gpu.py: error: found no NVIDIA GPU that torch can use: expected one or more"
    )
    assert "PYTHON=/path/to/python make gpu" in line


def test_the_same_bits_are_found_and_others_named(tmp_path):
    one = {"a": torch.ones(2), "b": [1, (torch.zeros(1), None)]}
    other = {"a": torch.ones(2), "b": [1, (torch.ones(1), None)]}
    assert same_bits.differences(one, one) == [] and same_bits.differences(one, other) == ["/b/1/0"]
    assert same_bits.differences(one, {"a": one["a"]}) == [""]
    with pytest.raises(UserError, match="holds no checkpoint"):
        same_bits.newest(tmp_path)
