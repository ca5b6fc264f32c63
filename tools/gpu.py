"""Prove on NVIDIA GPUs what this project promises, and record how fast it is there.

    make gpu                         everything that is not done yet, most valuable first
    python tools/gpu.py --list       the parts of the plan, and which are done
    python tools/gpu.py sync peer    some parts, again
    python tools/gpu.py --minutes 9 --out gpu    only what fits in 9 minutes, recorded in gpu/

A part takes eight minutes at most, and the plan about 40 minutes on one GPU. A part that has passed
is not run again, so a plan that was stopped continues where it was. No process of a part is left on
the GPU when the part ends, is stopped, or takes too long.

results/gpu/MACHINE.jsonl says which commands ran and how they ended. Speeds are recorded beside
those of other machines, and make charts MACHINE=... draws them. On a machine that is lent for a
while, --out names one folder for all of this, with the subfolders of results/. Take it with you,
and give it to the next run: the plan continues. cp -rn gpu/. results/ takes it into the project,
unless this machine has records there already.
"""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from common.errors import UserError, one_line_errors
from common.flags import Parser, number
from common.records import environment
from tools.bench.measure import pick_device
from tools.experiments import STOP_SIGNALS, Machine
from tools.records import RESULTS

PART_SECONDS = 480
LINES = 12  # of output to record, the last ones
MARK = "MAKE_GPU_PART"  # the processes of a part have this variable
DUMMY = (
    "06_imagenet.py --dummy 12800 --arch resnet18 --batch-size 256 --eval-every 0 "
    "--workers 0 --print-every 10"
)
EXACT = (
    "--arch resnet18 --image-size 64 --batch-size 64 --deterministic --ema 0.9 "
    "--workers 0 --eval-every 0"
)
# What srun tells the only task of a step.
ONE_TASK = (
    "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=1 "
    "SLURM_STEP_NODELIST=localhost CUDA_VISIBLE_DEVICES=0"
)
BF16 = "--batch-size 256 --amp bf16 --channels-last --image-size 224 --repeats 3"


class Part(NamedTuple):
    """A part of the plan. Its commands run one after the other, and each must exit with 0."""

    name: str
    minutes: int  # that it takes, about
    what: str
    commands: list  # of str; {tmp} is an empty folder, {train} and the like are files for records


def plan(machine, has_data=lambda folder: (ROOT / folder).is_dir()):
    """Return the parts for a machine, most valuable first.

    Args:
        machine: tools.experiments.Machine, with GPUs.
        has_data: function from a folder, as data/cifar10, to whether it is there.
    """
    n = min(machine.devices, 8)
    parts = [tests(), rungs(n), preflight(n), sync(), fp16(), resume(), shards(n)]
    if n > 1:
        parts += [ddp(n), memory(n)]
    parts += [beside_bare_step("resnet50", 150, minutes=5), peer()]
    if has_data("data/cifar10"):
        parts.append(input_of_01())
    parts += [compiled(), speed(n)]
    if has_data("data/cifar10"):
        parts.append(cifar10(n))
    parts.append(beside_bare_step("resnet18", 400, minutes=4))
    if has_data("data/imagenet-mini"):
        parts.append(loaders(n))
    return parts


def tests():
    commands = ["python -m pytest -q -m gpu", "python -m pytest -q tests/test_gpus.py"]
    return Part("tests", 3, "the tests that need a GPU", commands)


def sync():
    """An epoch has 50 steps, and five of them print a line, which waits."""
    script = "python tools/lab/sync_warnings.py --most 25"
    commands = [
        f"{script} {DUMMY} --epochs 1 --checkpoints-path {{tmp}}/{k} {flags}"
        for k, flags in enumerate(("", "--ema 0.9 --clip-grad 1", "--amp fp16"))
    ]
    what = "no line of 06 waits for the GPU in each step: plain, with averaged weights, with fp16"
    return Part("sync", 2, what, commands)


def fp16():
    """In fp16 the first steps overflow, since the scale of the loss begins high."""
    commands = []
    for name, flags in (
        ("fresh", "--epochs 1 --amp fp16"),
        ("fp32", "--epochs 1"),
        ("fp32", "--epochs 2 --amp fp16 --resume"),
    ):
        run = f"python {DUMMY} {flags} --checkpoints-path {{tmp}}/{name}"
        commands += [f"{run} | tee {{tmp}}/log", '! grep "loss: *nan" {tmp}/log']
    what = "fp16 from the first step, and from a run without mixed precision, without a loss of nan"
    return Part("fp16", 2, what, commands)


def resume():
    run = f"python 06_imagenet.py --dummy 6400 {EXACT} --epochs 2"
    killed = "--checkpoints-path {tmp}/killed"
    kill = "python tools/lab/kill_after.py '{tmp}/killed/step-*.pt'"
    commands = [
        f"{run} --checkpoints-path {{tmp}}/whole",
        f"{kill} {run} --checkpoint-every 5 {killed}",
        f"{run} --resume {killed} | tee {{tmp}}/log",
        'grep "resumed from" {tmp}/log',
        "python tools/lab/same_bits.py {tmp}/whole {tmp}/killed",
    ]
    what = "a killed run that is resumed has the bits of one that was not killed"
    return Part("resume", 2, what, commands)


def shards(n):
    run = (
        f"torchrun --nproc-per-node={n} 07_fsdp.py --limit 16000 --checkpoints-path {{tmp}}/shards"
    )
    vit = f"torchrun --nproc-per-node={n} 07_fsdp.py --arch vit_b_16 --limit 16000 --epochs 1"
    commands = [
        f"{run} --epochs 1",
        f"{run} --epochs 2 --sync-bn --save {{tmp}}/whole.pt | tee {{tmp}}/log",
        '! grep -F "[1/2]" {tmp}/log',  # its first epoch was loaded
        f"{vit} --amp bf16 --clip-grad 1 --checkpoint-activations",
        f"{vit} --amp bf16 --no-reshard-after-forward",
        f"torchrun --nproc-per-node={n} tools/bench/checkpoint.py --log-file {{shards}}",
    ]
    return Part("shards", 3, "07: saved and loaded, in bf16, and what a checkpoint costs", commands)


def memory(n):
    command = f"python tools/bench/memory.py --arch vit_b_16 --batch-size 64 --processes 1 {n}"
    command += " --steps 20 --repeats 3 --log-file {memory}"
    return Part("memory", 6, "memory and speed of DDP and FSDP", [command])


def ddp(n):
    command = f"python tools/bench/ddp.py --batch-size 256 --launches {n} --log-file {{ddp}}"
    return Part("ddp", 5, "what DistributedDataParallel costs", [command])


def beside_bare_step(arch, steps, minutes):
    command = f"python tools/bench/train.py --arch {arch} --steps {steps} {BF16} --data-dir none"
    title = arch.replace("resnet", "ResNet-")
    what = f"06 beside the bare training step: {title}"
    return Part(arch, minutes, what, [f"{command} --log-file {{train}}"])


def compiled():
    command = f"python tools/bench/train.py --arch resnet50 --steps 100 {BF16} --repeats 1"
    command += " --compile --data-dir none --log-file {train}"
    return Part("compile", 6, "the same with --compile: ResNet-50", [command])


def input_of_01():
    command = "python tools/bench/input.py --dataset folder --data-dir data/cifar10 --limit 50000"
    command += " --epochs 10 --repeats 3 --log-file {input}"
    return Part("input", 6, "the input of 01 beside a classic loop and its limit", [command])


def peer():
    command = "python tools/bench/peer.py --arch resnet50 --batch-size 256 --steps 150"
    commands = [f"{command} {flags}--log-file {{peer}}" for flags in ("", "--amp bf16 ")]
    return Part(
        "peer", 3, "a plain training loop, for images per second beside those of 06", commands
    )


def loaders(n):
    workers = max(1, (os.cpu_count() or 1) // n - 2)
    command = "python tools/bench/train.py --arch resnet18 --batch-size 128 --amp bf16"
    command += f" --channels-last --image-size 224 --workers {workers}"
    command += " --data-dir data/imagenet-mini --log-file {train}"
    return Part("loaders", 4, "06 on photographs beside the bare training step", [command])


def cifar10(n):
    """The recipe of a known result, 94 %, which the smaller steps of 06 on CPUs cannot show."""
    command = f"torchrun --nproc-per-node={n} 06_imagenet.py data/cifar10 --arch resnet18"
    command += " --image-size 64 --epochs 30 --batch-size 512 --lr 0.4 --warmup-epochs 2"
    command += " --weight-decay 5e-4 --label-smoothing 0.1 --amp bf16 --channels-last"
    command += " --eval-every 5 --checkpoints-path {tmp}/checkpoints"
    return Part("cifar10", 6, "06 on CIFAR-10: how far 30 epochs come, in seconds", [command])


def rungs(n):
    quick = "--limit 16000 --epochs 2"
    commands = [
        f"python 01_snsc.py {quick}",
        f"python 02_snmc_dp.py {quick}",
        f"torchrun --nproc-per-node={n} 03_mnmc_ddp_launch.py {quick} --sync-bn",
        f"python 04_mnmc_ddp_mp.py {quick}",
        f"env {ONE_TASK} python 05_mnmc_ddp_slurm.py {quick}",
    ]
    return Part("rungs", 3, "01 to 05, with as many processes as GPUs", commands)


def preflight(n):
    command = f"torchrun --nproc-per-node={n} launch/preflight.py"
    return Part("preflight", 1, "preflight on this machine", [command])


def speed(n):
    processes = " ".join(str(count) for count in sorted({1, n}))
    command = f"python tools/experiments.py speed --repeats 2 --processes {processes} --out {{out}}"
    return Part("speed", 6, "images per second of 01 to 05", [command])


def run(part, machine, out, seconds):
    """Run the commands of a part, until one fails. Return a record of how it ended.

    Args:
        part: Part.
        machine: tools.experiments.Machine.
        out: Path of the folder for records.
        seconds: float, after which the part is ended.
    """
    logs = {}
    for name in ("train", "input", "ddp", "peer", "shards", "memory"):
        logs[name] = out / name / f"{machine.name}.jsonl"
        logs[name].parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        # those of this Python
        for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
            program = Path(folder, name)
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module}"$@"\n')
            program.chmod(0o755)
        for command in part.commands:
            print(f"\n$ {command}", flush=True)
            left = max(1, seconds - (time.monotonic() - start))
            code, output = execute(command.format(tmp=folder, out=out, **logs), left, folder)
            ended.append({"command": command, "code": code, "output": output})
            if code:
                break
    record = {
        "part": part.name,
        "passed": not ended[-1]["code"],
        "seconds": round(time.monotonic() - start, 1),
    }
    return record | {"ended": ended} | environment(pick_device())


def execute(command, seconds, folder):
    """Run a command of bash, with the programs in a folder first.

    It fails if any program in a pipe does. When it ends, or after so many seconds, or when this
    process is stopped, the processes that it has started are killed.

    Returns:
        (exit code, its last lines of output). The code is 124 if the time was over.
    """
    mark = str(uuid.uuid4())
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", MARK: mark}
    file = Path(folder, "output")
    script = f"set -o pipefail; ({command}) 2>&1 | tee {shlex.quote(str(file))}"
    script += "; exit ${PIPESTATUS[0]}"
    process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=env, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = 124
    finally:
        kill_all(f"{MARK}={mark}".encode())
        process.wait()
    return code, file.read_text(errors="replace").splitlines()[-LINES:]


def kill_all(mark, patience=30):
    """Kill every process whose environment holds a mark, for `patience` seconds at most.

    torchrun's workers have sessions of their own, and when it is killed they belong to nobody: to
    kill a process group, or a tree of processes, would miss them.
    """
    deadline = time.monotonic() + patience
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    found = True
        time.sleep(0.05)


def passed(path):
    """Return the names of the parts that have passed."""
    if not path.exists():
        return set()
    return {
        record["part"]
        for record in map(json.loads, path.read_text().splitlines())
        if record["passed"]
    }


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="parts to run again; all that are not done if none is named",
    )
    parser.add_argument("--list", action="store_true", help="list the parts; run nothing")
    parser.add_argument(
        "--minutes",
        type=number(above=0),
        default=math.inf,
        metavar="X",
        help="begin no part that would not end within this time (default: no limit)",
    )
    parser.add_argument(
        "--out", default=RESULTS, metavar="DIR", help="folder of the records (default: results)"
    )
    return parser.parse_args()


def main(args):
    deadline = time.monotonic() + 60 * args.minutes
    if not torch.cuda.is_available():
        raise UserError(
            "found no NVIDIA GPU that torch can use: expected one or more, and a torch built for "
            "CUDA; see nvidia-smi, or name another Python: PYTHON=/path/to/python make gpu"
        )
    machine = Machine.here()
    out = Path(args.out).resolve()
    path = out / f"gpu/{machine.name}.jsonl"
    parts = plan(machine)
    names = [part.name for part in parts]
    if unknown := [name for name in args.parts if name not in names]:
        raise UserError(
            f"no part {unknown[0]!r} on this machine: expected one or more of {', '.join(names)}"
        )
    done = passed(path)
    if args.list:
        print(f"{machine.name}: {sum(part.minutes for part in parts)} minutes in all")
        for part in parts:
            state = "done" if part.name in done else ""
            print(f"{state:5} {part.name:10} {part.minutes} min  {part.what}")
        return
    for stop_signal in STOP_SIGNALS:
        # exit through execute(), which leaves no process behind
        signal.signal(stop_signal, lambda *_: sys.exit(143))
    chosen = [part for part in parts if part.name in (args.parts or set(names) - done)]
    failed = []
    postponed = []
    for part in chosen:
        left = deadline - time.monotonic()
        if 60 * part.minutes > left:
            postponed.append(part.name)
            continue
        record = run(part, machine, out, min(PART_SECONDS, left))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        verdict = "passed" if record["passed"] else "FAILED"
        print(f"\n== {part.name}: {verdict} after {record['seconds']:.0f} s", flush=True)
        if not record["passed"]:
            failed.append(part.name)
    print(f"\nrecorded in {path}")
    again = "python tools/gpu.py"
    if out == RESULTS:
        print(f"to draw: make charts MACHINE={machine.name}")
    else:
        again += f" --out {shlex.quote(str(args.out))}"
    if postponed:
        print(f"no time for {', '.join(postponed)}; to continue: {again}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; run again: {again} {' '.join(failed)}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
