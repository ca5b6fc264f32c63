"""make gpu: its list without a GPU; how parts run, end and are recorded."""

import json
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time

import psutil
import pytest
import torch
from processes import finished, gone, start
from rungs import parse

from common.errors import UserError
from tools import gpu
from tools.gpu import Part, Runner

# A process in a session of its own, which writes for ever.
LOST = "setsid sh -c 'while true; do echo x >> $SHARED/beats; sleep 0.1; done' &"
WAIT = "touch $SHARED/{0}; until [ -e $SHARED/{1} ]; do sleep 0.05; done"
PARTS = [
    Part("good", 1, "", f"{LOST} {WAIT.format('a', 'b')}; echo yes | tee $DIR/log; ls $DIR"),
    Part("bad", 1, "", f"{WAIT.format('b', 'a')}; echo 7; false | cat; echo 8"),
    Part("late", 2, "", f"{LOST} echo begun; sleep 30"),
    Part("skips", 1, "", "echo '2 skipped in 0.1s'"),
    Part("long", 90, "", "exit 1"),
    Part("lacks", 1, "", "exit 1", "IMAGES"),
]


def test_parts_are_run_ended_recorded_and_packed(tmp_path, capsys):
    runner = Runner(
        name="machine",
        out=tmp_path / "out",
        fields={"torch": "2", "sizes": {"IMAGES": "data/none"}},
        variables={"SHARED": str(tmp_path), "IMAGES": "data/none"},
        minutes=1,
        limit=lambda part: 2 if part.name == "late" else 60,
        tar=tmp_path / "all.tgz",
    )
    runner.run(PARTS, 2)
    said = {name: verdict for name, (_, verdict) in runner.rows.items()}
    assert re.fullmatch(r"FAILED: not done after \d+ s; begun", said.pop("late"))
    assert said == {
        "good": "passed: log",
        "bad": "FAILED: 7",
        "skips": "no answer: 2 skipped in 0.1s",
        "long": "not run: no time",
        "lacks": "not run: no data/none; see --data",
    }
    assert runner.passed() == {"good"} and set(runner.failed) == {"bad", "late"}
    size = (tmp_path / "beats").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "beats").stat().st_size == size, "a process has outlived its part"
    with tarfile.open(tmp_path / "all.tgz") as tar:
        packed = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert packed["gpu/machine-good.log"] == b"yes\nlog\n"
    records = map(json.loads, packed["gpu/machine.jsonl"].splitlines())
    outputs = {record["part"]: (record["torch"], record["output"]) for record in records}
    assert outputs["bad"] == ("2", ["7"]) and len(outputs) == 4
    capsys.readouterr()
    runner.show(PARTS)
    failed, table = capsys.readouterr().out.split("\n\nmachine, torch 2\n")
    assert "bad:\n7" in failed and len(table.splitlines()) == 6


def test_the_list_says_what_has_passed_and_a_mistake_is_named(monkeypatch, capsys, tmp_path):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, flags)])
        gpu.main(gpu.parse_args())

    file = tmp_path / f"gpu/{gpu.machine_name()}.jsonl"
    file.parent.mkdir()
    rows = [("rungs", True, gpu.SIZES), ("shards", False, gpu.SIZES), ("cifar10", True, gpu.TINY)]
    rows.append(("preflight", True, gpu.TINY))  # the same command in all sizes
    scripts = {part.name: part.script for part in gpu.PROOFS + gpu.SPEEDS}
    for name, passed, sizes in rows:
        record = {"part": name, "passed": passed, "script": scripts[name], "sizes": sizes}
        with file.open("a") as records:
            records.write(json.dumps(record) + "\n")
    run("--list", "--out", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("passed")] == ["rungs", "preflight"]
    listed = [line.split()[0] for line in lines if line.startswith("   ")]
    assert listed == [part.name for part in gpu.PROOFS + gpu.SPEEDS]
    file.write_text('{"part": "run')
    found = rf"{file}, line 1: '{{\"part\": \"run' given, expected a record as JSON: remove it"
    with pytest.raises(UserError, match=found):
        run("--list", "--out", tmp_path)
    with pytest.raises(UserError, match="no part 'rung': expected one or more of data, rungs, "):
        run("--rehearse", "rung")
    with pytest.raises(UserError, match=r"--data none\.tar: no such file; expected a tar file"):
        run("--rehearse", "--data", "none.tar")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"found no NVIDIA GPU .* PYTHON=/path/to/python make gpu"):
        run()


def commands_of(part):
    """The words of each command that starts Python in the script of a part, in full size."""
    show = 'python() { printf "%q " "$@"; echo; }; torchrun() { python "${@:2}"; }\n'
    variables = gpu.SIZES | {"GPUS": "2", "COUNTS": "1 2", "DIR": "/tmp", "OUT": "x", "NAME": "y"}
    script = f"{show} exec 3>&1; tee() {{ cat >&3; }}; grep() {{ return 1; }}; {part.script}"
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_every_script_of_the_list_takes_its_flags(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("imagenet.flags.can_compile", lambda: True)
    for part in [*gpu.PROOFS[1:], *gpu.SPEEDS]:
        commands = commands_of(part)
        assert commands, part.name
        for script, *flags in commands:
            if script != "-m":  # pytest
                parse(monkeypatch, script, *flags)


@pytest.mark.slow
def test_a_signal_leaves_no_process_behind():
    process = start("tools/gpu.py", "--rehearse", "rungs", "preflight")
    deadline = time.monotonic() + 120
    below = psutil.Process(process.pid)
    while len(seen := below.children(recursive=True)) < 4:  # bash and Python of both
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finished(process, timeout=120)
    assert code != 0 and gone(seen, seconds=30)
    assert re.search(r"^rungs +\d+ s  stopped$", out, re.M)
