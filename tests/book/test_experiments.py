"""tools/experiments.py: what is run, and what of it is recorded."""

import json
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


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """A function of flags that returns the lines that a dry run prints: a head, and commands."""

    def dry_run(*given):
        monkeypatch.setattr(sys, "argv", ["experiments.py", *map(str, given), "--dry-run"])
        monkeypatch.chdir(ROOT)
        experiments.main(experiments.parse_args())
        return capsys.readouterr().out.splitlines()

    return dry_run


# What is run


def test_every_command_is_one_that_its_script_takes(monkeypatch, dry_run, tmp_path):
    for name in experiments.EXPERIMENTS:
        head, *commands = dry_run(name, "--out", tmp_path)
        assert head.startswith(f"0 of {len(commands)} runs recorded in ") and len(commands) > 1
        for command in commands:
            words = shlex.split(command)
            k = next(k for k, word in enumerate(words) if word.endswith(".py"))
            assert parse(monkeypatch, *words[k:]).log_file is None, command


def test_commands_are_those_of_another_machine_or_given_and_not_yet_recorded(
    dry_run, results, monkeypatch
):
    given = ["python 01_snsc.py --seed 0", "srun python 05_mnmc_ddp_slurm.py"]
    given += ["python 01_snsc.py --dataset folder --data-dir data/cifar10-none --seed 0"]
    (results / "speed").mkdir(parents=True)
    for machine in ("mine", "box"):
        lines = [json.dumps({"command": command}) + "\n" for command in given + given]
        (results / f"speed/{machine}.jsonl").write_text("".join(lines))
        given.append("python 01_snsc.py --seed 1")
    monkeypatch.setattr(experiments.shutil, "which", lambda program: None)
    shown = ["1 of 3 runs recorded in", "python 01_snsc.py --dataset cifar10 --download --seed 0"]
    shown.append("python 01_snsc.py --seed 1")
    first, *others = dry_run("speed", "--like", "box", "--machine", "mine")
    assert first.startswith(shown[0]) and others == shown[1:]
    (results / "commands").write_text("python 01_snsc.py --seed 1\n")
    flags = ["speed", "--commands", results / "commands", "--machine", "mine"]
    assert dry_run(*flags)[1:] == ["python 01_snsc.py --seed 1"]
    with pytest.raises(UserError, match="--like laptop: expected one of box, mine"):
        dry_run("speed", "--like", "laptop")


# What is recorded


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "speed/mine.jsonl"
    file.parent.mkdir()
    file.write_text('{"command": "python')
    given = ["speed", "--machine", "mine", "--out", tmp_path]
    code, _, err = finished(start("tools/experiments.py", *given))
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
    flags = f"--dataset folder --data-dir {small_folder} --arch mnist_net --seed 0 --epochs"
    commands = [f"python 01_snsc.py {flags} 1"]
    commands.append(f"torchrun --nnodes=1 --nproc-per-node=2 03_mnmc_ddp_launch.py {flags} 40")
    file = tmp_path / "commands"
    file.write_text("\n".join(commands))
    given = ["tools/experiments.py", "speed", "--machine", "tiny", "--out", tmp_path / "out"]
    process = start(*given, "--commands", file)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if any("[2/2] torchrun" in line for line in lines) and "== test: [2/40]" in line:
            break
    else:
        pytest.fail(process.stderr.read())
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopped" in err and "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=300)[1], "all have ended"
    path = tmp_path / "out/speed/tiny.jsonl"
    assert [record["command"] for record in records.read(path)] == commands[:1]

    file.write_text("\n".join(commands).replace(" 40", " 2"))
    code, out, err = finished(start(*given, "--commands", file))
    assert code == 0 and "1 of 2 runs recorded" in out and "[1/1] torchrun" in out, err
    runs = [(record["world_size"], record["epoch"]) for record in records.read(path)]
    assert runs == [(1, 1), (2, 1), (2, 2)]
    assert all(0 < record["launch_seconds"] < 300 for record in records.read(path))


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
    path = results / "a/tiny.jsonl"

    def fail_at(*bad):
        def execute(command):
            if command in bad:
                raise UserError(f"{command} does not work")
            return [{"command": command}]

        monkeypatch.setattr(experiments, "execute", execute)

    fail_at("b", "d")
    with pytest.raises(UserError, match="2 of 5 runs failed, the first: b does not work"):
        experiments.run_all(path, "abcde")
    with path.open("a") as file:
        file.write('{"by": "another program"}\n')
    assert experiments.recorded(path) >= {"a", "c", "e"}
    capsys.readouterr()
    fail_at("a", "b", "c")
    # two in a row: something else is wrong
    with pytest.raises(UserError, match=r"^b does not work"):
        experiments.run_all(path, "abcde")
    assert "[3/5] c" not in capsys.readouterr().out
