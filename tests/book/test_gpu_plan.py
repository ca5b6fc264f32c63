"""make gpu: its list without a GPU; how parts run, end and are recorded."""

import importlib.metadata
import json
import math
import os
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
from on_accelerator import Accelerator, built
from processes import ROOT, STARTED, finished, gone, start
from rungs import parse

from common.errors import UserError
from tools import gpu
from tools.book import book, gpu_figures, tables
from tools.book.phrases import Phrases
from tools.lab import parts
from tools.lab.parts import Part, Runner

# What the list may use beside the packages of requirements.txt: its tests need these.
OF_TESTS = ("pytest", "psutil")


@pytest.fixture
def runner(tmp_path):
    """A function that makes a Runner, with records in tmp_path/out."""

    def runner(minutes=math.inf, limit=600, tar=None):
        return Runner(
            name="machine",
            out=tmp_path / "out",
            fields={"torch": "2"},
            variables={"SHARED": str(tmp_path), "IMAGES": "data/none"},
            minutes=minutes,
            limit=lambda part: limit,
            tar=tar,
        )

    return runner


def verdicts(runner):
    return {name: verdict for name, (_, verdict) in runner.rows.items()}


MEET = "touch $SHARED/{0}; until [ -e $SHARED/{1} ]; do sleep 0.05; done"
ALONE = "mkdir $SHARED/lock; sleep {0}; rmdir $SHARED/lock"


def test_proofs_run_side_by_side_and_speeds_alone(runner):
    both = runner(limit=60)
    both.run([Part("a", 1, "", MEET.format("a", "b")), Part("b", 1, "", MEET.format("b", "a"))], 2)
    both.run([Part(name, 1, "", ALONE.format(0.3)) for name in ("c", "d")], 1)
    assert verdicts(both) == dict.fromkeys("abcd", "passed: no output")
    together = runner()
    together.run([Part(name, 1, "", ALONE.format(5)) for name in ("c", "d")], 2)
    assert len(together.failed) == 1, "which is how the line above would fail"


def test_what_a_part_said_is_recorded_and_packed(runner, tmp_path, capsys):
    one = runner(tar=tmp_path / "all.tgz")
    script = "python -c 'print(1 + 1)' | tee $DIR/log\n! grep 3 $DIR/log\nls $DIR"
    bad = "python -c 'print(7); raise SystemExit(3)' | cat\npython -c 'print(8)'"
    skips = "echo '2 skipped in 0.1s'"
    listed = [Part("good", 1, "", script), Part("bad", 1, "", bad), Part("skips", 1, "", skips)]
    one.run(listed, 1)
    assert one.passed() == {"good"} and runner().passed() == {"good"}, "also in the next run"
    assert verdicts(one) == {
        "good": "passed: log",
        "bad": "FAILED: 7",
        "skips": "no answer: 2 skipped in 0.1s",
    }
    records = [json.loads(line) for line in (tmp_path / "out/gpu/machine.jsonl").open()]
    assert [record["output"] for record in records] == [["2", "log"], ["7"], ["2 skipped in 0.1s"]]
    assert records[0]["script"] == script and records[0]["torch"] == "2"
    with tarfile.open(tmp_path / "all.tgz") as tar:
        packed = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert list(packed) == [
        f"gpu/machine{end}" for end in ("-bad.log", "-good.log", "-skips.log", ".jsonl")
    ]
    assert (
        len(packed["gpu/machine.jsonl"].splitlines()) == 3
        and packed["gpu/machine-good.log"] == b"2\nlog\n"
    )
    capsys.readouterr()
    one.show(listed)
    head, *last = capsys.readouterr().out.strip().split("\n\n")
    assert head == "bad:\n7", "the last lines of what failed"
    assert re.sub(r" +\d+ s  ", "  ", last[0]).splitlines()[1:] == [
        "good  passed: log",
        "bad  FAILED: 7",
        "skips  no answer: 2 skipped in 0.1s",
    ]


def test_no_part_begins_that_does_not_fit_into_the_time_or_lacks_its_images(runner):
    one = runner(minutes=1)
    lacks = Part("lacks", 1, "", "exit 1", "IMAGES")
    one.run([Part("long", 70, "", "exit 1"), lacks, Part("short", 50, "", "true")], 1)
    assert verdicts(one) == {
        "long": "not run: no time",
        "lacks": "not run: no data/none; see --data",
        "short": "passed: no output",
    }
    assert not one.failed


LOST = (
    "setsid sh -c 'while true; do echo x >> $SHARED/beats; sleep 0.1; done' & "  # its own session
)


def still_grows(file):
    """Whether something still writes to a file."""
    size = file.stat().st_size
    time.sleep(0.5)
    return file.stat().st_size > size


@pytest.mark.parametrize(
    ("command", "options", "verdict"),
    [
        ("sleep 60", {"limit": 2}, r"FAILED: not done after \d+ s; begun"),
        ("sleep 60", {"minutes": 1 / 30}, r"FAILED: not done after \d+ s; begun"),
        ("sleep 1", {}, "passed: begun"),
    ],
)
def test_no_process_of_a_part_outlives_it(runner, tmp_path, command, options, verdict):
    one = runner(**options)
    one.run([Part("part", 1, "", f"echo begun; {LOST}{command}")], 1)
    assert re.fullmatch(verdict, verdicts(one)["part"])
    assert not still_grows(tmp_path / "beats")


def of_parts():
    """The processes of all parts on this machine."""
    found = []
    for process in psutil.process_iter():
        try:
            if parts.MARK in process.environ():
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_behind(number):
    process = start("tools/gpu.py", "--rehearse", "rungs", "preflight")
    deadline = time.monotonic() + 120
    while len(of_parts()) < 4:  # bash and Python of both
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    seen = of_parts()
    process.send_signal(number)
    code, out, _ = finished(process, timeout=120)
    assert code != 0 and gone(seen, seconds=30)
    assert re.search(r"^rungs +\d+ s  stopped$", out, re.M)


def test_the_minutes_are_those_of_the_whole_list(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--minutes", "0.2", "speed", "rungs"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    gpu.main(gpu.parse_args())
    begun, table = capsys.readouterr().out.split("\n\n")
    rows = ["rungs         0 s  not run: no time", "speed         0 s  not run: no time"]
    assert begun.splitlines() == rows and table.splitlines()[1:] == rows


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["rung"], "no part 'rung': expected one or more of data, shared, rungs"),
        (["--data", "none.tar"], "--data none.tar: no such file; expected a tar file of images"),
    ],
)
def test_a_mistake_is_named_before_a_part_begins(monkeypatch, flags, message):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", *flags])
    with pytest.raises(UserError, match=re.escape(message)):
        gpu.main(gpu.parse_args())


def test_the_list_says_what_has_passed(monkeypatch, capsys, tmp_path):
    file = tmp_path / f"gpu/{gpu.Machine.here().name}.jsonl"
    file.parent.mkdir()
    file.write_text('{"part": "rungs", "passed": true}\n{"part": "shards", "passed": false}\n')
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--list", "--out", str(tmp_path)])
    gpu.main(gpu.parse_args())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("passed")] == ["rungs"]
    listed = [line.split()[0] for line in lines if line.startswith("   ")]
    assert listed == [part.name for part in gpu.PROOFS + gpu.SPEEDS]


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
    taken = []
    for part in [*gpu.PROOFS[1:], *gpu.SPEEDS]:
        for script, *flags in commands_of(part):
            if script != "-m":  # pytest
                parse(monkeypatch, script, *flags)
                taken.append(part.name)
    assert len(taken) == 5 + 3 + 1 + 6, "01 to 05, 07 three times, preflight, and the speeds"


BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_blocked = name.partition(".")[0] in {blocked}
        return None if is_blocked else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def needed_by(*names):
    """The distributions that these need, and they themselves."""
    found = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", waiting.pop())[0]).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        found.add(name)
        waiting += [need for need in needs if "extra ==" not in need]
    return found


@pytest.fixture
def without_other_packages(tmp_path):
    """The environment of a machine with requirements.txt, without jupyter, and OF_TESTS."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = [line for line in lines if line[0] != "#" and not line.startswith("jupyter")]
    allowed = needed_by(*required, *OF_TESTS)
    blocked = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & allowed
    }
    assert {"nbclient", "libcst"} <= blocked and not {"torch", "PIL", "numpy"} & blocked
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker/sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    # pytest loads the plugins of all packages
    return {"PYTHONPATH": str(tmp_path / "blocker"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


IMPORT = "import runpy, sys; [runpy.run_path(s, run_name='imported') for s in sys.argv[1:]]"


@pytest.mark.slow
def test_no_program_of_the_list_needs_another_package(without_other_packages):
    env = os.environ | without_other_packages
    commands = [words for part in gpu.PROOFS + gpu.SPEEDS for words in commands_of(part)]
    scripts = {"tools/gpu.py"} | {words[0] for words in commands if words[0].endswith(".py")}
    assert {"06_imagenet.py", "launch/preflight.py", "tools/bench/memory.py"} < scripts
    tests = {word for words in commands for word in words if word.startswith("tests/")}
    for command in (
        ["-c", IMPORT, *scripts],
        ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *tests],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_rehearsal_on_a_pretend_accelerator(without_other_packages, tmp_path):
    """Without the packages that are not needed, and without the parts that this accelerator cannot
    run: 07, and what torch.compile compiles.
    """
    accelerator = Accelerator(built(), tmp_path / "report.jsonl")
    env = accelerator.environment(1)
    env["PYTHONPATH"] += f":{without_other_packages.pop('PYTHONPATH')}"
    names = ["cifar10", "input", "resnet50", "preflight", "waits", "rungs"]
    flags = ["--rehearse", "--out", tmp_path / "out", "--tar", tmp_path / "tgz"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "tools/gpu.py", *map(str, flags), *names]
    options = {"cwd": ROOT, "env": env | without_other_packages, "start_new_session": True}
    STARTED.append(subprocess.Popen(command, **pipes, **options))
    code, out, err = finished(STARTED[-1], timeout=2300)
    assert code == 0, out + err
    begun, table = out.rsplit("\n\n", 1)
    head, *rows = table.splitlines()
    assert head.startswith("pretend-accelerator, torch")
    assert sorted(rows) == sorted(begun.strip().splitlines()), "a line after each part"
    said = {row.split()[0]: row.split(maxsplit=3)[3] for row in rows}
    assert list(said) == ["rungs", "waits", "preflight", "resnet50", "input", "cifar10"]
    speeds = begun.strip().splitlines()[3:]
    assert [row.split()[0] for row in speeds] == list(said)[3:], "in order, after the proofs"
    assert said["rungs"].startswith("passed: done: test accuracy")
    assert said["waits"].startswith("no answer: 3 skipped"), "they need a GPU"
    ratio = r"\d+\.\d+ of"
    found = said["resnet50"]
    assert re.search(rf"06: \d+ img/s, {ratio} bare, {ratio} example, {ratio} example-amp", found)
    assert re.search(rf"01: \d+ img/s, {ratio} classic, memory, {ratio} limit", said["input"])
    assert said["cifar10"].startswith("passed: done: top-1")
    with tarfile.open(tmp_path / "tgz") as tar:
        packed = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}
    assert [name for name in packed if not name.startswith("gpu/")] == [
        f"{folder}/pretend-accelerator.jsonl" for folder in ("imagenet", "input", "train")
    ]
    assert packed["gpu/pretend-accelerator-rungs.log"].count("device: pretend") == 5
    measured = map(json.loads, packed["train/pretend-accelerator.jsonl"].splitlines())
    assert {record["device"] for record in measured} == {"pretend"}


def test_packed_images_are_unpacked_where_there_are_none(runner, tmp_path):
    (tmp_path / "cifar10/train").mkdir(parents=True)
    with tarfile.open(tmp_path / "images.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "cifar10", "cifar10")
    data = Part("data", 1, "", gpu.PROOFS[0].script.replace("data/unpacked", "$SHARED/unpacked"))
    one = runner()
    one.variables |= {"DATA": str(tmp_path / "images.tar.xz"), "IMAGES": str(tmp_path / "images")}
    for content in ([], ["new"]):
        one.run([data], 1)
        assert one.passed() == {"data"}
        assert [path.name for path in (tmp_path / "images/train").iterdir()] == content
        (tmp_path / "images/train/new").touch()
    assert not (tmp_path / "unpacked").exists()


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
    assert "PYTHON=/path/to/python make gpu" in line and "--rehearse" in line


# Where the figures go


def write_record(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "machine.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_the_figures_of_a_gpu_appear_beside_published_ones_once_they_are_recorded(tmp_path):
    assert tables.gpu(tmp_path) == "", "nothing is recorded"
    gpu_of = {"device": "cuda", "device_name": "NVIDIA X1", "torch": "2.11", "model": "resnet50"}
    gpu_of |= {"amp": "bf16", "channels_last": True, "compile": False, "batch_size": 256}
    for run, speed in (("dummy", 2900), ("example", 1200), ("dummy", 3100), ("bare", 3000)):
        write_record(tmp_path / "train", **gpu_of, run=run, images_per_second=speed)
    of_06 = {"started": "1", "dataset": "data/cifar10", "image_size": 128, "device": "cuda"}
    for epoch, accuracy in ((1, 50.0), (2, 91.25)):
        epoch_fields = {"epoch": epoch, "seconds": 3.5, "test_acc": accuracy}
        write_record(tmp_path / "imagenet", **gpu_of | of_06 | epoch_fields)
    text = tables.gpu(tmp_path)
    for line in (
        "| NVIDIA X1 | 3,000 (2,900 to 3,100) | `06`, bf16, channels_last, batch 256, torch 2.11, "
        "runs: 2 | here |",
        "| NVIDIA X1 | 1,200 (1,200 to 1,200) | plain loop, float32, batch 256, torch 2.11, "
        "runs: 1 | here |",
        "| NVIDIA X1 | 7 | 91.2 | `06`, resnet50, 128x128, epochs: 2, torch 2.11 | here |",
        "| NVIDIA H100 SXM5 | 2,616 | fp16 | Lambda |",
        "| 8 x NVIDIA H100 SXM5 | 20,728 | fp16 | Lambda |",
    ):
        assert line in text.splitlines()
    chinese = book.translated(text)
    assert "](../figures/zh/gpu.png)" in chinese and "| NVIDIA X1 | 3,000" in chinese
    fig = gpu_figures.draw(tmp_path)
    labels = [label.get_text() for label in fig.axes[0].get_yticklabels()]
    bars = dict(zip(labels, (bar.get_width() for bar in fig.axes[0].patches), strict=True))
    assert bars["NVIDIA X1: 06, bf16, channels_last, batch 256, torch 2.11, runs: 2"] == 3000
    assert bars["NVIDIA H100 SXM5: fp16 (Lambda)"] == 2616
    words = Phrases(gpu_figures.LABELS)
    assert all(words.translate(label) for label in [*labels, fig.get_suptitle()])
