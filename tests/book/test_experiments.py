"""tools/experiments.py: what is run, in which order, and what of it is recorded."""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from images import write_images
from processes import ROOT, start
from rungs import parse

from common.errors import UserError
from tools import experiments, records
from tools.experiments import Machine, slurm_answers

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


def commands(name, machine, *given):
    return [run.command for run in experiments.plan(name, machine, asked(name, *given))]


def counts(found):
    """The numbers of processes in commands."""
    return {int(n) for command in found for n in re.findall(r"--nproc-per-node[= ](\d+)", command)}


# What is run


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_command_is_one_that_its_script_takes(name, monkeypatch):
    for command in commands(name, LAPTOP):
        words = shlex.split(command)
        k = next(k for k, word in enumerate(words) if word.endswith(".py"))
        args = parse(monkeypatch, *words[k:])
        assert args.seed in range(5) and args.log_file is None


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_the_recorded_runs_are_those_of_todays_experiments(name):
    recorded = experiments.recorded(ROOT / f"results/{name}/amd-epyc-2-cores.jsonl")
    images = {"resnet20": "data/cifar10-png"}.get(name, "data/cifar10")
    given = [] if name in ("speed", "scaling", "memory", "my_ddp") else ["--data-dir", images]
    assert set(commands(name, LAPTOP, *given)) <= recorded


def test_on_gpus_a_run_trains_long_enough_to_be_measured():
    flags = {
        re.search(r"--limit (\d+) --epochs (\d+)", command).groups()
        for command in commands("speed", BOX)
    }
    assert flags == {("50000", str(8 * n)) for n in (1, 2, 4, 8)}
    assert all(" --epochs 1 " in command for command in commands("speed", LAPTOP))


def test_flags_stand_in_the_commands_that_they_change(monkeypatch, capsys, tmp_path):
    wanted = {"--data-dir": tmp_path, "--arch": "mnist_net", "--limit": 77, "--epochs": 3}
    given = [part for flag in wanted.items() for part in flag]
    # How many of these flags change each command of an experiment
    taken = {"accuracy": 4, "syncbn": 4, "speed": 2, "scaling": 2, "resnet20": 4, "memory": 0}
    taken["my_ddp"] = 2
    for name in experiments.EXPERIMENTS:
        changed = [f" {flag} {value} " for flag, value in list(wanted.items())[: taken[name]]]
        for command in commands(name, LAPTOP):
            assert not [part for part in changed if part in f"{command} "], command
        for command in commands(name, LAPTOP, *given):
            assert not [part for part in changed if part not in f"{command} "], command
            assert "cifar10" not in command
    large, small = commands("memory", LAPTOP, "--repeats", 1, *given)
    assert " --arch mnist_net " in large and " --arch resnet18 " in small
    speed = commands("speed", LAPTOP, *given)
    limits = {re.search(r"--limit (\d+) --epochs 1 ", command)[1] for command in speed}
    assert limits == {"77", "154"}, "for each of one and two processes"
    assert all(" --limit 77 --epochs 3 " in command for command in commands("speed", BOX, *given))

    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(Machine, "here", lambda: LAPTOP)
    monkeypatch.setattr(experiments, "execute", None)
    experiments.main(asked("accuracy", "--machine", "mine", "--dry-run"))
    out = capsys.readouterr().out
    assert "this machine: mine (2 cores)" in out and "accuracy/mine.jsonl" in out
    assert out.splitlines()[-1] == commands("accuracy", LAPTOP)[-1]


def test_numbers_of_processes_fit_the_machine_or_are_asked_for():
    assert counts(commands("speed", LAPTOP)) == {1, 2} and counts(commands("speed", BOX)) == {
        1,
        2,
        4,
        8,
    }
    assert counts(commands("speed", ONE_GPU)) == {1}
    assert counts(commands("accuracy", LAPTOP)) == {2, 4, 8, 16} and counts(
        commands("accuracy", BOX)
    ) == {2, 4, 8}
    assert counts(commands("accuracy", LAPTOP._replace(memory=8 * 2**30))) == {2, 4}
    assert counts(commands("syncbn", LAPTOP)) == {2, 4}
    assert counts(commands("scaling", LAPTOP)) == {1, 2, 3, 4, 6, 8} and counts(
        commands("scaling", BOX)
    ) == {
        1,
        2,
        4,
        8,
    }
    assert counts(commands("scaling", LAPTOP, "--processes", 1, 5, 6)) == {1, 5, 6}
    with pytest.raises(
        UserError, match="--processes 16: 8 GPUs here, and each process needs its own"
    ):
        commands("speed", BOX, "--processes", 16)
    for name, needs in (
        ("syncbn", "two processes"),
        ("accuracy", "one process and more"),
        ("scaling", "1, 2 and more"),
        ("memory", "one process and more"),
    ):
        with pytest.raises(
            UserError, match=rf"{name} needs {needs}.*, found 1 on 1 GPU: .*--processes 1 2 4"
        ):
            commands(name, ONE_GPU)
    assert counts(commands("my_ddp", LAPTOP)) == {2}
    assert counts(commands("my_ddp", BOX)) == {2, 4, 8}
    for name in ("syncbn", "my_ddp"):
        with pytest.raises(
            UserError, match=f"{name} needs two processes or more, found 1 on 2 cores"
        ):
            commands(name, LAPTOP, "--processes", 1)


def test_a_list_goes_on_after_what_this_machine_cannot_do(monkeypatch, capsys, tmp_path):
    """A list goes on after an experiment that this machine cannot do."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    monkeypatch.setattr(Machine, "here", lambda: ONE_GPU)
    experiments.main(asked("--list"))
    out = capsys.readouterr().out
    assert "this machine: one-gpu (1 GPU)" in out and out.count("skipped: ") == 5
    assert re.search(r"speed: .*\n   0 of \d+ runs recorded in .*speed/one-gpu.jsonl", out)
    experiments.main(asked("syncbn", "speed", "--dry-run"))
    assert "skipped: syncbn needs" in (out := capsys.readouterr().out) and " 02_snmc_dp.py" in out


def test_memory_is_measured_with_more_images_on_gpus():
    on_cpus, on_gpus = (commands("memory", m, "--repeats", 1) for m in (LAPTOP, BOX))
    assert [re.search(r"--batch-size (\d+)", c)[1] for c in on_cpus] == ["4", "64"]
    assert [re.search(r"--batch-size (\d+)", c)[1] for c in on_gpus] == ["64", "1024"]
    assert all(" --processes 1 2 4 --seed 0" in command for command in on_cpus)
    assert all(" --processes 1 2 4 8 --seed 0" in command for command in on_gpus)


def test_threads_are_set_on_cpus_and_left_alone_on_gpus():
    on_cpus = commands("speed", LAPTOP, "--repeats", 1)
    assert {c.split()[0] for c in on_cpus} == {"OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"}
    assert [c for c in on_cpus if "01_snsc" in c and c.startswith("OMP_NUM_THREADS=2")]
    assert not [c for c in commands("speed", BOX) if "OMP_NUM_THREADS" in c]


def test_resnet20_has_one_global_batch_on_any_number_of_processes():
    one, two = commands("resnet20", LAPTOP)
    assert one.startswith("python 01_snsc.py ") and " --batch-size 128 " in one
    assert "03_mnmc_ddp_launch.py " in two and " --batch-size 64 " in two
    assert all(" --lr 0.1 --lr-scaling none " in command for command in (one, two))


def test_the_ladders_of_accuracy_differ_in_what_they_are_about():
    plan = commands("accuracy", LAPTOP, "--processes", 1, 16)
    one, published, scaled, same = plan
    assert one.startswith("python 01_snsc.py") and "--batch-size" not in one
    assert "--batch-size 256 --epochs 5 --lr 0.02 --lr-scaling none" in published
    assert "--batch-size 256 --epochs 5 --warmup-epochs 3" in scaled and "--lr" not in scaled
    assert "--batch-size 16 --epochs 5 --lr-scaling none" in same
    assert "--warmup-epochs 1 " in commands("accuracy", LAPTOP, "--processes", 1, 2)[2]
    assert all("--nproc-per-node=16 " in command for command in plan[1:])


def test_sync_bn_is_compared_on_the_same_images_in_a_step():
    """Synchronised batch norm is compared on the same images in a step."""
    plan = commands("syncbn", LAPTOP, "--repeats", 1)
    synced = [command for command in plan if command.endswith(" --sync-bn")]
    assert len(synced) == 8
    for command in synced:
        assert command.removesuffix(" --sync-bn") in plan
        n, batch = (
            int(re.search(rf"{flag}[= ](\d+)", command)[1])
            for flag in ("--nproc-per-node", "--batch-size")
        )
        alone = [
            c
            for c in plan
            if c.startswith("python 01_snsc.py") and f"--batch-size {n * batch} " in c
        ]
        assert len(alone) == 1, "one process with the same global batch, once"


def test_every_second_repeat_runs_in_reverse_order():
    plan = [
        re.sub(r" --seed \d+", "", command) for command in commands("speed", LAPTOP, "--repeats", 3)
    ]
    third = len(plan) // 3
    first = plan[:third]
    second = plan[third : 2 * third]
    last = plan[2 * third :]
    assert first == last == second[::-1] != second


def test_srun_is_left_out_where_it_does_not_answer(monkeypatch):
    assert [c for c in commands("speed", LAPTOP) if "srun " in c]
    monkeypatch.setattr(experiments, "slurm_answers", lambda: False)
    assert not [c for c in commands("speed", LAPTOP) if "srun " in c]


def test_the_commands_of_the_readme_and_the_notebooks_are_taken():
    texts = [
        (ROOT / name).read_text()
        for name in ("docs/performance.md", "results/README.md", "tools/experiments.py")
    ]
    texts += [path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb")]
    found = {
        m
        for text in texts
        for m in re.findall(
            r"python tools/experiments\.py((?: (?:--list|--dry-run|[a-z]+))+)", text
        )
    }
    assert {" --list", " speed", " syncbn", " accuracy", " scaling"} <= {
        re.sub(r" --dry-run$", "", m) for m in found
    }
    for given in found:
        assert asked(*given.split())


def test_a_wrong_name_is_answered_with_those_that_will_do(capsys):
    """A name that will not do is answered with those that will."""
    for given, expected in (
        (
            ["sped"],
            "sped: no such experiment, expected one or more of speed, syncbn, "
            "resnet20, accuracy, scaling, memory, my_ddp",
        ),
        (
            [],
            "name one or more of speed, syncbn, resnet20, accuracy, scaling, memory, my_ddp, "
            "or see --list",
        ),
        (
            ["speed", "--machine", "../mine"],
            "argument --machine: '../mine' given, expected letters, digits",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            asked(*given)
        assert end.value.code == 2 and expected in capsys.readouterr().err


# What is recorded


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


TINY = ["--machine", "tiny", "--processes", 1, 2, "--arch", "mnist_net", "--epochs", 1]
TINY += ["--data-dir"]


@pytest.mark.slow
def test_a_stopped_experiment_goes_on_with_what_is_missing(
    results, small_folder, monkeypatch, capsys
):
    given = ["accuracy", *TINY, small_folder]
    execute = experiments.execute
    calls = []

    def stop_at_the_third(command):
        calls.append(command)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(command)

    monkeypatch.setattr(experiments, "execute", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        experiments.main(asked(*given))
    path = results / "accuracy/tiny.jsonl"
    assert [r["command"] for r in records.read(path)] == calls[:2]

    seen = capsys.readouterr().out
    assert (
        "[1/4] python 01_snsc.py" in seen and "[2/4] torchrun" in seen and "== test: [1/1]" in seen
    )
    assert re.search(r"recorded; 0:00:\d\d passed, about 0:00:\d\d left", seen)

    experiments.main(asked(*given, "--dry-run"))
    missing = capsys.readouterr().out.splitlines()
    assert missing[-2:] == [
        c for c in commands(*given[:1], LAPTOP, *given[1:]) if c not in calls[:2]
    ]
    experiments.main(asked(*given))
    one, *several = records.read(path)
    assert len(several) == 3 and len({r["command"] for r in several}) == 3
    assert (one["world_size"], one["script"], one["lr"]) == (1, "01_snsc.py", 0.01)
    assert {(r["world_size"], r["batch_size"]) for r in several} == {(2, 256), (2, 128)}
    assert all(0 < r["launch_seconds"] < 300 for r in (one, *several))
    experiments.main(asked(*given))
    assert "4 of 4 runs recorded" in capsys.readouterr().out and len(records.read(path)) == 4


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_leaves_nothing(results, small_folder, capsys):
    (small_folder / "train/cat/000.png").write_bytes(b"no image")
    one = experiments.plan("accuracy", LAPTOP, asked("accuracy", *TINY, small_folder))[0]
    with pytest.raises(
        UserError, match=r"exit code 2: 01_snsc\.py: error: .*000\.png.*runs are kept\. The command"
    ):
        experiments.execute(one.command)
    assert list(results.iterdir()) == []


def test_one_failure_does_not_keep_other_runs_from_the_record(results, monkeypatch, capsys):
    """One failure does not keep the other runs from being recorded."""
    todo = [(results / "a/tiny.jsonl", experiments.Run(command, 10)) for command in "abcde"]

    def fail_at(*bad):
        def execute(command):
            if command in bad:
                raise UserError(f"{command} does not work")
            return [{"command": command}]

        monkeypatch.setattr(experiments, "execute", execute)

    fail_at("b", "d")
    with pytest.raises(UserError, match="2 of 5 runs failed, the first: b does not work"):
        experiments.run_all(todo)
    assert experiments.recorded(results / "a/tiny.jsonl") == {"a", "c", "e"}
    capsys.readouterr()
    fail_at("a", "b", "c")
    # two in a row: something else is wrong
    with pytest.raises(UserError, match=r"^b does not work"):
        experiments.run_all(todo)
    assert "[3/5] c" not in capsys.readouterr().out


HEADER_AND_RECORD = """\
import json, sys
print("01_snsc.py | started by python")
print("global batch = 8 x 1 = 8 | lr 0.01 -> 0.01", flush=True)
print("   == test: [1/1] | acc: 50.000%")
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as file:
    file.write(json.dumps({"command": "its own", "epoch": 1, "test_acc": 50.0}) + chr(10))
"""


def test_launch_seconds_end_where_the_header_is_printed(results, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(HEADER_AND_RECORD)
    times = {"global batch": 107.254, "   == test: ": 300.0}  # by the line that is read

    now = 100.0

    class Popen(subprocess.Popen):
        """A process whose lines of output set the clock when they are read."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.stdout = self.read(self.stdout)

        def read(self, lines):
            nonlocal now
            for line in lines:
                now = times.get(line[:12], 100.0)
                yield line

    monkeypatch.setattr(experiments.subprocess, "Popen", Popen)
    monkeypatch.setattr(experiments.time, "monotonic", lambda: now)
    command = f"python {tmp_path / 'script.py'}"
    record = {"command": command, "epoch": 1, "test_acc": 50.0, "launch_seconds": 7.25}
    assert experiments.execute(command) == [record]


def test_the_time_left_is_in_proportion_to_the_images(results, monkeypatch, capsys):
    """100 images take 20 s, so 800 take 160 s. Then 700 take 180 s, so 200 take 51 s."""
    todo = [
        (results / "a/tiny.jsonl", experiments.Run(str(images), images))
        for images in (100, 600, 200)
    ]
    now = 0

    def execute(command):
        nonlocal now
        now += {"100": 20, "600": 160, "200": 3500}[command]
        return [{"command": command}]

    monkeypatch.setattr(experiments, "execute", execute)
    monkeypatch.setattr(experiments.time, "monotonic", lambda: now)
    experiments.run_all(todo)
    told = re.findall(r"recorded; ([\d:]+) passed, about ([\d:]+) left", capsys.readouterr().out)
    assert told == [("0:00:20", "0:02:40"), ("0:03:00", "0:00:51"), ("1:01:20", "0:00:00")]


def test_a_spread_is_the_median_with_least_and_greatest():
    assert records.spread([3.0, 1.0, 2.26, 9.0], ".1f") == "2.6 (1.0 to 9.0)"
    assert records.spread([7, 5, 6], "d") == "6 (5 to 7)"


def test_half_a_run_counts_as_none(results):
    path = results / "tiny.jsonl"
    path.parent.mkdir()
    lines = [{"command": f"a --epochs 3 --log-file {path}", "epoch": k} for k in (1, 2)] + [
        {"command": "bench"}
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert experiments.recorded(path) == {"bench"}
    with path.open("a") as file:
        file.write(json.dumps(lines[0] | {"epoch": 3}) + "\n")
    assert experiments.recorded(path) == {"bench", "a --epochs 3"}


def test_a_file_without_records_is_named_before_anything_runs(results, capsys):
    """A file that holds no records is named before anything runs."""
    (results / "speed").mkdir(parents=True)
    (results / "speed/tiny.jsonl").write_text('{"command": "a"}\nhello\n')
    with pytest.raises(
        records.RecordError, match=r"tiny\.jsonl, line 2: 'hello' given, expected a record as JSON"
    ):
        experiments.main(asked("speed", "--machine", "tiny"))


def test_records_may_lie_in_another_folder(tmp_path):
    path = tmp_path / "carried/speed/tiny.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("hello\n")
    with pytest.raises(records.RecordError, match=r"carried/speed/tiny\.jsonl, line 1"):
        experiments.main(asked("speed", "--machine", "tiny", "--out", tmp_path / "carried"))


@pytest.mark.slow
def test_ctrl_c_leaves_neither_processes_nor_half_a_record(tmp_path):
    """Ctrl c stops the run and leaves neither processes nor half a record."""
    write_images(tmp_path, "train", (32, 32))
    write_images(tmp_path, "test", (32, 32))
    code = (
        "import sys; from pathlib import Path; sys.argv[0] = 'tools/experiments.py'; "
        "from tools import experiments; "
    )
    code += (
        f"experiments.RESULTS = Path({str(tmp_path / 'results')!r}); "
        "from common.errors import one_line_errors\n"
    )
    # begin with torchrun
    code += "plan = experiments.plan; experiments.plan = lambda *given: plan(*given)[1:]\n"
    code += "with one_line_errors(): experiments.main(experiments.parse_args())"
    given = ["accuracy", "--machine", "tiny", "--processes", "1", "2", "--data-dir", tmp_path]
    given += ["--epochs", "100000"]
    process = start("-c", code, *given)
    for line in process.stdout:
        if "== test: [2/" in line:
            break
    else:
        pytest.fail(process.stderr.read())
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "stopped" in err and "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=300)[1], "all have ended"
    assert not (tmp_path / "results/accuracy/tiny.jsonl").exists()


def test_records_on_the_way_to_a_chart_are_checked(tmp_path):
    line = {
        "device": "cpu",
        "device_name": "a",
        "cores": 2,
        "torch": "2",
        "torchvision": "0",
        "started": "now",
        "command": "c",
        "x": 1.5,
    }
    path = tmp_path / "speed/me.jsonl"
    path.parent.mkdir()

    def load(record, columns):
        path.write_text(json.dumps(record) + "\n")
        return records.load("speed", "me", columns, results=tmp_path)

    assert load(line, {"x": float}) == [line] and load(line | {"x": 1}, {"x": float})
    for value, kind in (
        (1.5, int),
        ("1", float),
        (True, int),
        (True, float),
        (1, bool),
        (float("nan"), float),
        (1, list),
    ):
        with pytest.raises(
            records.RecordError, match=r"me\.jsonl, line 1: x is .*, expected a value of type"
        ):
            load(line | {"x": value}, {"x": kind})
    with pytest.raises(
        records.RecordError,
        match=r"line 1: no column 'y', but device, .*experiments.py speed --machine me",
    ):
        load(line, {"y": int})
    with pytest.raises(
        records.RecordError, match=r"no .*you\.jsonl, expected one of me \(make charts MACHINE=me\)"
    ):
        records.load("speed", "you", {}, results=tmp_path)
    with pytest.raises(
        records.RecordError,
        match=r"no .*me\.jsonl; record some: python tools/experiments.py scaling",
    ):
        records.load("scaling", "me", {}, results=tmp_path)


def test_the_name_of_a_machine_is_that_of_its_device(monkeypatch):
    monkeypatch.setattr(experiments, "device_name", lambda device: "AMD EPYC (TM) 7-Core")
    monkeypatch.setattr(experiments, "cores_per_process", lambda _: 4)
    monkeypatch.setattr(experiments, "pick_device", lambda: argparse.Namespace(type="cpu"))
    assert Machine.here()[:3] == ("cpu", 4, "amd-epyc-tm-7-core-4-cores")
    monkeypatch.setattr(experiments, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(experiments, "pick_device", lambda: argparse.Namespace(type="cuda"))
    monkeypatch.setattr(experiments.torch.accelerator, "device_count", lambda: 8)
    assert Machine.here()[:3] == ("cuda", 8, "nvidia-h200-x-8")
    assert 2**30 < Machine.here().memory < 2**50


def test_one_of_everything_is_enough(monkeypatch):
    given = ["--processes", "1", "--repeats", "1", "--limit", "1", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["experiments.py", "speed", *given])
    args = experiments.parse_args()
    assert (args.processes, args.repeats, args.limit, args.epochs) == ([1], 1, 1, 1)


def test_a_record_without_its_environment_is_refused(tmp_path):
    path = tmp_path / "speed/me.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"command": "python x.py"}) + "\n")
    with pytest.raises(records.RecordError, match=r"line 1: no column 'device', but command; "):
        records.load("speed", "me", {}, results=tmp_path)


@pytest.mark.parametrize(("code", "answers"), [(0, True), (1, False)])
def test_slurm_answers_if_srun_starts_a_task(code, answers, tmp_path, monkeypatch):
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm_answers() is answers
