"""make gpu: its plan for machines that are not here; how parts end, are recorded and continue."""

import json
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, finished, start
from rungs import parse

from common.errors import UserError
from tools import gpu
from tools.lab import same_bits

PLANS = {n: gpu.plan(SimpleNamespace(devices=n, name="x"), has_data=lambda _: True) for n in (1, 8)}
COMMANDS = sorted(
    {command for parts in PLANS.values() for part in parts for command in part.commands}
)


def test_the_plan_is_short_and_begins_with_what_proves_most():
    first = ["tests", "rungs", "preflight", "sync", "fp16", "resume", "shards"]
    for parts in PLANS.values():
        names = [part.name for part in parts]
        assert names[:7] == first
        assert len(set(names)) == len(names)
        assert all(60 * part.minutes <= gpu.PART_SECONDS for part in parts)
    assert sum(part.minutes for part in PLANS[1]) <= 60
    assert not {"ddp", "memory"} & {part.name for part in PLANS[1]}
    assert "torchrun --nproc-per-node=8 launch/preflight.py" in str(PLANS[8])
    without = gpu.plan(SimpleNamespace(devices=1, name="x"), has_data=lambda _: False)
    names = [part.name for part in without]
    assert names == [*first, "resnet50", "peer", "compile", "speed", "resnet18"]
    assert sum(part.minutes for part in without) <= 40


@pytest.mark.parametrize("command", COMMANDS)
def test_every_script_of_the_plan_takes_its_flags(command, monkeypatch):
    files = ("train", "input", "ddp", "peer", "shards", "memory", "out")
    words = shlex.split(command.format(tmp="/tmp", **{name: f"/tmp/{name}" for name in files}))
    if "grep" in words or "pytest" in words or "tools/lab/same_bits.py" in words:
        return
    scripts = [word for word in words if word.endswith(".py") and not word.startswith("tools/lab")]
    flags = words[words.index(scripts[0]) + 1 :]
    if "|" in flags:
        flags = flags[: flags.index("|")]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    parse(monkeypatch, scripts[0], *flags)


GOOD = ["python -c 'print(1 + 1)'", "! grep 3 {tmp}/output", "ls {tmp} > {out}/seen"]
BAD = ["python -c 'print(7); raise SystemExit(3)' | cat", "python -c 'print(8)'"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of one GPU whose plan has two parts, the second of which fails.

    Returns a function (*flags) that runs it and returns the parts that it has recorded.
    """
    parts = [gpu.Part("good", 2, "x", GOOD), gpu.Part("bad", 1, "x", BAD)]
    monkeypatch.setattr(gpu, "plan", lambda _: parts)
    monkeypatch.setattr(gpu.Machine, "here", lambda: SimpleNamespace(name="fake"))
    monkeypatch.setattr(gpu, "pick_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)  # this process keeps its handlers
    path = tmp_path / "carried/gpu/fake.jsonl"

    def run(*flags):
        before = len(path.read_text().splitlines()) if path.exists() else 0
        argv = ["gpu.py", "--out", str(tmp_path / "carried"), *map(str, flags)]
        monkeypatch.setattr(sys, "argv", argv)
        error = None
        try:
            gpu.main(gpu.parse_args())
        except UserError as failure:
            error = str(failure)
        lines = path.read_text().splitlines()[before:] if path.exists() else []
        return [json.loads(line) for line in lines], error

    return run


@pytest.mark.flags("tools/gpu.py", "--list", "--out")
def test_what_has_passed_is_recorded_and_not_run_again(machine, tmp_path, capfd):
    carried = tmp_path / "carried"
    again = f"failed: bad; run again: python tools/gpu.py --out {carried} bad"
    (good, bad), error = machine()
    assert error == again
    assert good["passed"] and good["ended"][0]["output"] == ["2"] and len(good["ended"]) == 3
    assert not bad["passed"] and len(bad["ended"]) == 1
    assert bad["ended"][0]["code"] == 3 and bad["ended"][0]["output"] == ["7"]
    assert "python" in (carried / "seen").read_text()
    (record,), error = machine()
    assert (record["part"], error) == ("bad", again)
    (record,), error = machine("good")
    assert (record["part"], error) == ("good", None)
    capfd.readouterr()
    assert machine("--list") == ([], None)
    assert "done  good" in capfd.readouterr().out


@pytest.mark.flags("tools/gpu.py", "--minutes")
def test_no_part_begins_that_does_not_fit_into_the_time(machine, capfd):
    (record,), _ = machine("--minutes", 1.9)
    assert record["part"] == "bad", "which takes one minute"
    assert "no time for good; to continue: python tools/gpu.py --out" in capfd.readouterr().out
    records, _ = machine("--minutes", 2.5)
    assert [record["part"] for record in records] == ["good", "bad"]


def test_a_part_ends_with_the_time(machine, monkeypatch):
    monkeypatch.setattr(gpu, "plan", lambda _: [gpu.Part("slow", 0.01, "x", ["sleep 20"])])
    (record,), _ = machine("--minutes", 0.03)
    assert not record["passed"] and record["ended"][0]["code"] == 124


LOST = "setsid sh -c 'while true; do echo x >> {file}; sleep 0.1; done' & "  # of its own session


def still_grows(file):
    """Whether something still writes to a file."""
    size = file.stat().st_size
    time.sleep(0.5)
    return file.stat().st_size > size


@pytest.mark.parametrize(
    ("command", "seconds", "expected"), [("sleep 60", 2, 124), ("sleep 1", 60, 0)]
)
def test_no_process_of_a_part_outlives_it(tmp_path, command, seconds, expected):
    file = tmp_path / "beats"
    # bash would wait for a process that holds its output
    lost = LOST.format(file=file).replace("' &", "' > /dev/null 2>&1 &")
    code, output = gpu.execute(f"echo begun; {lost}{command}", seconds, tmp_path)
    assert code == expected and output == ["begun"]
    assert not still_grows(file)


SIGNALLED = """
import sys
from tools import gpu
from types import SimpleNamespace
command = sys.argv.pop()
gpu.plan = lambda _: [gpu.Part("long", 1, "x", [command])]
gpu.torch.cuda.is_available = lambda: True
gpu.Machine.here = lambda: SimpleNamespace(name="fake")
gpu.main(gpu.parse_args())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_behind(tmp_path, number):
    file = tmp_path / "beats"
    arguments = ["--out", tmp_path, LOST.format(file=file) + "sleep 60"]
    process = start("-c", SIGNALLED, *arguments)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    code, _, _ = finished(process, timeout=60)
    assert code != 0
    assert not still_grows(file)
    assert not (tmp_path / "gpu").exists(), "it is run again"


def test_a_program_is_killed_once_its_file_is_there(tmp_path):
    script = ROOT / "tools/lab/kill_after.py"
    write = f"touch {tmp_path}/step-5.pt; exec sleep 60"
    for command, code, said in (
        (write, 0, "killed after it wrote"),
        ("exit 4", 2, "ended with exit code 4 before there was a file"),
    ):
        words = [sys.executable, script, tmp_path / "step-*.pt", "sh", "-c", command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and said in done.stdout + done.stderr
        (tmp_path / "step-5.pt").unlink(missing_ok=True)


WAITS = """
import warnings
for step in range(4):
    warnings.warn("called a synchronizing CUDA operation")
"""


@pytest.mark.flags("tools/lab/sync_warnings.py", "--most")
def test_a_line_that_waits_in_each_step_is_an_error(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    for most, code in ((4, 0), (3, 2)):
        command = [sys.executable, ROOT / "tools/lab/sync_warnings.py", "--most", str(most), script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code
        assert f"     4  {script}:4" in done.stdout
        assert ("train.py:4 waited 4 times: expected 3 at most" in done.stderr) == bool(code)


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
