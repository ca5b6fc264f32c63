"""tools/experiments.py: what is run, and what of it is recorded."""

import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from processes import ROOT, finished, start
from rungs import parse

from common.errors import UserError
from tools import experiments, records
from tools.experiments import Machine

LAPTOP = Machine("cpu", 2, "laptop")
ONE_GPU = Machine("cuda", 1, "one-gpu")
BOX = Machine("cuda", 8, "box")


def asked(*given):
    """The flags of tools/experiments.py."""
    sys.argv[1:] = map(str, given)
    return experiments.parse_args()


@pytest.fixture(autouse=True)
def own_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["experiments.py"])
    monkeypatch.setattr(experiments, "slurm_answers", lambda: True)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def commands(name, machine, *given):
    return experiments.plan(name, machine, asked(name, *given))


def counts(name, machine, *given):
    """The numbers of processes in the commands of an experiment."""
    text = " ".join(commands(name, machine, *given))
    return {int(n) for n in re.findall(r"--nproc-per-node[= ](\d+)", text)}


# What is run


def test_every_command_is_one_that_its_script_takes(monkeypatch):
    for name in experiments.EXPERIMENTS:
        for command in commands(name, LAPTOP, "--repeats", 1):
            words = shlex.split(command)
            k = next(k for k, word in enumerate(words) if word.endswith(".py"))
            args = parse(monkeypatch, *words[k:])
            assert args.seed == 0 and args.log_file is None, command


def test_numbers_of_processes_fit_the_machine_or_are_asked_for():
    assert counts("speed", LAPTOP) == {1, 2}
    assert counts("speed", BOX) == {1, 2, 4, 8}
    assert counts("speed", ONE_GPU) == {1}
    assert counts("accuracy", LAPTOP) == {2, 4, 8, 16}, "processes may share cores"
    assert counts("accuracy", BOX) == {2, 4, 8}
    assert counts("speed", LAPTOP, "--processes", 1, 5, 6) == {1, 5, 6}
    with pytest.raises(UserError, match="--processes 16: 8 GPUs here, and each process needs its"):
        commands("speed", BOX, "--processes", 16)
    for name in ("syncbn", "accuracy", "memory"):
        found = rf"{name} needs \d processes or more, found 1 on 1 GPU: .*--processes 1 2 4"
        with pytest.raises(UserError, match=found):
            commands(name, ONE_GPU)
    epochs = re.findall(r"--limit 50000 --epochs (\d+)", " ".join(commands("speed", BOX)))
    assert set(epochs) == {"8", "16", "32", "64"}, "long enough to be measured"


def test_flags_change_the_commands_and_a_dry_run_prints_them(results, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", lambda: ONE_GPU)
    flags = ["--data-dir", results, "--arch", "mnist_net"]
    given = ["syncbn", "speed", "--machine", "mine", "--out", results / "gpu", *flags, "--dry-run"]
    experiments.main(asked(*given))
    out = capsys.readouterr().out
    assert "this machine: mine (1 GPU)" in out
    assert "skipped: syncbn needs 2 processes or more" in out
    assert re.search(r"speed: .*\n   0 of \d+ runs recorded in .*gpu/speed/mine\.jsonl", out)
    planned = commands("speed", ONE_GPU, *flags)
    assert out.splitlines()[-len(planned) :] == planned
    changed = f" --arch mnist_net --dataset folder --data-dir {results} "
    assert all(changed in command for command in planned)
    assert [command for command in planned if command.startswith("srun ")]
    monkeypatch.setattr(experiments, "slurm_answers", lambda: False)
    assert not [command for command in commands("speed", ONE_GPU) if "srun" in command]


# What is recorded


def test_a_damaged_file_is_named_and_the_other_experiments_are_listed(results, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", lambda: ONE_GPU)
    file = results / "speed/mine.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"command": "python')
    given = ["--machine", "mine", "--out", results, "--list"]
    experiments.main(asked(*given))
    out = capsys.readouterr().out
    assert f"skipped: {file}, line 1: " in out and "expected a record as JSON: remove it" in out
    assert re.search(r"0 of \d runs recorded in .*/resnet20/mine\.jsonl", out)
    code, out, err = finished(start("tools/experiments.py", "speed", *given))
    assert code == 2 and f"error: {file}, line 1: " in err and "Traceback" not in err


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_the_tool_but_not_under_nohup(ignored):
    code = "from tools import experiments; import os, signal; experiments.exit_on_signals(); "
    code += "os.kill(os.getpid(), signal.SIGHUP); print('still here')"
    if not ignored:  # though these tests may run under nohup
        code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {code}"
    command = ["nohup"] * ignored + [sys.executable, "-c", code]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (end.returncode, end.stdout) == ((0, "still here\n") if ignored else (143, "")), end


@pytest.mark.slow
def test_a_stopped_experiment_leaves_nothing_behind_and_goes_on(small_folder, tmp_path):
    given = ["tools/experiments.py", "accuracy", "--machine", "tiny", "--processes", 1, 2]
    given += ["--arch", "mnist_net", "--data-dir", small_folder, "--out", tmp_path / "out"]
    process = start(*given)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if any("[2/4] torchrun" in line for line in lines) and "== test: [2/5]" in line:
            break
    else:
        pytest.fail(process.stderr.read())
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopped" in err and "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=300)[1], "all have ended"
    path = tmp_path / "out/accuracy/tiny.jsonl"
    assert {record["script"] for record in records.read(path)} == {"01_snsc.py"}

    code, out, err = finished(start(*given))
    assert code == 0 and "1 of 4 runs recorded" in out and "[3/3] torchrun" in out, err
    last = [record for record in records.read(path) if record["epoch"] == 5]
    settings = [(record["world_size"], record["batch_size"], record["lr"]) for record in last]
    assert settings == [(1, 256, 0.01), (2, 256, 0.02), (2, 256, 0.02), (2, 128, 0.01)]
    assert all(0 < record["launch_seconds"] < 300 for record in last)
    code, out, err = finished(start(*given))
    assert code == 0 and "4 of 4 runs recorded" in out, err


SCRIPT = """\
import json, sys
print("global batch = 8 x 1 = 8 | lr 0.01 -> 0.01", flush=True)
print("   == test: [1/1] | acc: 50.000%")
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as file:
    file.write(json.dumps({"command": "its own", "epoch": 1}) + chr(10))
"""


def test_a_run_is_recorded_and_one_that_fails_says_why_and_leaves_nothing(
    results, tmp_path, capsys
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = f"TWO=2 python {script}"
    (record,) = experiments.execute(command)
    assert 0 < record.pop("launch_seconds") < 300
    assert record == {"command": command, "epoch": 1}
    assert "== test: [1/1]" in capsys.readouterr().out
    script.write_text(f"{SCRIPT}sys.exit('script.py: error: no image\\nthat is all')\n")
    found = rf"exit code 1: script\.py: error: no image; .*runs are kept\. The command: {command}"
    with pytest.raises(UserError, match=found):
        experiments.execute(command)
    assert "that is all" in capsys.readouterr().err
    assert list(results.iterdir()) == []


def test_one_failure_does_not_keep_other_runs_from_the_record(results, monkeypatch, capsys):
    todo = [(results / "a/tiny.jsonl", command) for command in "abcde"]

    def fail_at(*bad):
        def execute(command):
            if command in bad:
                raise UserError(f"{command} does not work")
            return [{"command": command}]

        monkeypatch.setattr(experiments, "execute", execute)

    fail_at("b", "d")
    with pytest.raises(UserError, match="2 of 5 runs failed, the first: b does not work"):
        experiments.run_all(todo)
    with (results / "a/tiny.jsonl").open("a") as file:
        file.write('{"by": "another program"}\n')
    assert experiments.recorded(results / "a/tiny.jsonl") >= {"a", "c", "e"}
    capsys.readouterr()
    fail_at("a", "b", "c")
    # two in a row: something else is wrong
    with pytest.raises(UserError, match=r"^b does not work"):
        experiments.run_all(todo)
    assert "[3/5] c" not in capsys.readouterr().out
