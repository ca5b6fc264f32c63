"""Run the experiments behind the charts on this machine, and record them in
results/EXPERIMENT/MACHINE.jsonl.

    python tools/experiments.py --list              list the experiments and their recorded runs
    python tools/experiments.py speed --dry-run     print the commands that are not recorded yet
    python tools/experiments.py speed syncbn        run them, one after the other
    make charts MACHINE=my-laptop                   draw the charts; --list prints the name to use

A run is recorded after it has succeeded, so you can stop at any time: the same command continues
with the missing runs. Every second repeat runs in reverse order, so that slow changes of the
machine, such as its temperature, affect all runs equally.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import UserError, one_line_errors
from common.flags import Parser, whole_number
from common.machine import cores_per_process
from common.records import device_name
from tools.bench.measure import pick_device
from tools.records import RESULTS, ROOT, RecordError, read, to_run

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
TORCHRUN = "torchrun --nnodes=1 --nproc-per-node={} "
PUBLISHED_BATCH = 256  # images per process in the accuracy experiment
GLUON_BATCH = 128  # images per training step in the resnet20 experiment
SYNCBN_BATCHES = (4, 8, 16, 32)  # images per process in the syncbn experiment
GPU_IMAGES, GPU_EPOCHS = 50000, 8  # of the speed experiment on GPUs; times the number of processes


# The experiments. Each is a function (machine, args, repeat) that returns the commands of one
# repeat, as a user would type them. A command also identifies its run in results/.


def speed(machine, args, repeat):
    """Images per second, and seconds to start, by threads, DataParallel and launchers."""
    on_cpu = machine.device == "cpu"
    size = 128 if on_cpu else 256  # images per process and training step
    most = max(args.processes)

    def command(start, batch, shares=1, processes=1):
        images = shares * 30 * size
        epochs = 1
        if not on_cpu:
            # the whole data set several times, or a run would take less than ten seconds
            images = GPU_IMAGES
            epochs = GPU_EPOCHS * processes
        flags = f"--batch-size {batch} --limit {images} --epochs {epochs}{extra(args)}"
        return f"{start} {flags} --seed {repeat}"

    def threads(count):
        return f"OMP_NUM_THREADS={count} " if on_cpu else ""

    commands = [
        command(f"{threads(count)}python 01_snsc.py", size)
        for count in (sorted({1, *args.processes}) if on_cpu else [1])
    ]
    split = 1 if on_cpu else most  # DataParallel splits each batch over all visible GPUs
    gpus = "" if on_cpu else f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(most)))} "
    start = f"{threads(most)}{gpus}python 02_snmc_dp.py"
    commands.append(command(start, split * size, split))
    for n in args.processes:
        start = f"{threads(1)}{TORCHRUN.format(n)}03_mnmc_ddp_launch.py"
        commands.append(command(start, n * size, n, n))
        if n > 1:  # keep the global batch size of one process
            commands.append(command(start, shared(size, n), 1, n))
    start = f"{threads(1)}python 04_mnmc_ddp_mp.py --nproc-per-node {most}"
    commands.append(command(start, most * size, most, most))
    if slurm_answers():
        gpus = "" if on_cpu else f"--gpus-per-node={most} "
        srun = f"srun --nodes=1 --ntasks-per-node={most} {gpus}"
        start = f"{threads(1)}{srun}python 05_mnmc_ddp_slurm.py"
        commands.append(command(start, most * size, most, most))
    return commands


def syncbn(machine, args, repeat):
    """Test accuracy with and without SyncBN, by images per process, beside one process."""
    flags = (
        f"{real_images(args)} --limit 12800 --epochs 1 --arch {args.arch or 'small_net'} "
        "--lr 0.4 --batch-size"
    )
    commands = []
    for n in several(args):
        for batch in SYNCBN_BATCHES:
            end = f"{flags} {n * batch} --seed {repeat}"
            pair = f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {end}"
            commands += [
                f"python 01_snsc.py {end}",
                pair,
                f"{pair} --sync-bn",
            ]
    # 2 x 8 and 4 x 4 images give the same command for one process
    return list(dict.fromkeys(commands))


def accuracy(machine, args, repeat):
    """Accuracy by number of processes: as published, with one global batch, with warm-up."""
    flags = real_images(args)
    last = f"{arch(args)} --seed {repeat}"
    commands = [f"python 01_snsc.py {flags} --epochs 5 --lr-scaling none{last}"]
    for n in several(args):
        start = f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {flags} --batch-size"
        warmup = max(1, n.bit_length() - 2)  # 1, 1, 2, 3 epochs for 2, 4, 8, 16 processes
        commands += [
            f"{start} {PUBLISHED_BATCH * n} --epochs 5 --lr 0.02 --lr-scaling none{last}",
            f"{start} {PUBLISHED_BATCH * n} --epochs 5 --warmup-epochs {warmup}{last}",
            f"{start} {shared(PUBLISHED_BATCH, n)} --epochs 5 --lr-scaling none{last}",
        ]
    return commands


def resnet20(machine, args, repeat):
    """Accuracy of ResNet-20 on CIFAR-10 in its first ten epochs, with one and with two processes.

    Batch size and learning rate are those of GluonCV's published log.
    """
    flags = (
        f"{real_images(args)} --epochs 10 --arch {args.arch or 'cifar_resnet20'} --lr 0.1 "
        "--lr-scaling none"
    )
    commands = []
    for n in args.processes:
        start = "python 01_snsc.py" if n == 1 else f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py"
        commands.append(f"{start} {flags} --batch-size {shared(GLUON_BATCH, n)} --seed {repeat}")
    return commands


def memory(machine, args, repeat):
    """Memory, bytes sent and images per second of DDP, ZeroRedundancyOptimizer and FSDP."""
    size, steps = (4, 3) if machine.device == "cpu" else (64, 20)
    processes = " ".join(str(n) for n in sorted({1, *args.processes}))
    return [
        f"python tools/bench/memory.py --arch {model} --steps {steps} "
        f"--processes {processes} --seed {repeat}"
        for model in (
            f"{args.arch or 'vit_b_32'} --batch-size {size}",
            f"resnet18 --image-size 32 --batch-size {16 * size}",
        )
    ]


class Experiment(NamedTuple):
    commands: Callable
    repeats: int
    on_cpus: list | None  # the numbers of processes on CPUs; None: as on GPUs
    least: int  # processes that its largest run needs


EXPERIMENTS = {
    "speed": Experiment(speed, 3, None, 1),
    "syncbn": Experiment(syncbn, 3, [2, 4], 2),
    "resnet20": Experiment(resnet20, 1, [1, 2], 1),
    "accuracy": Experiment(accuracy, 1, [1, 2, 4, 8, 16], 2),
    "memory": Experiment(memory, 2, [1, 2, 4], 2),
}


def shared(batch, n):
    """Return the largest batch up to this one that n processes can share equally."""
    return batch // n * n


def several(args):
    """Return the numbers of processes without 1."""
    return [n for n in args.processes if n > 1]


def real_images(args):
    """Return the flags for CIFAR-10, or for the folder in --data-dir."""
    if args.data_dir or (ROOT / "data/cifar10/train").is_dir():
        return f"--dataset folder --data-dir {shlex.quote(args.data_dir or 'data/cifar10')}"
    return "--dataset cifar10 --download"


def arch(args):
    return f" --arch {args.arch}" if args.arch else ""


def extra(args):
    """Return the flags for --arch and --data-dir, if they are given."""
    images = f" --dataset folder --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else ""
    return f"{arch(args)}{images}"


def slurm_answers():
    """Return whether srun can start a task now."""
    if not shutil.which("srun"):
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        srun = ["srun", "--immediate=10", "true"]
        return subprocess.run(srun, capture_output=True, timeout=30).returncode == 0
    return False


# The machine


class Machine(NamedTuple):
    device: str
    devices: int  # GPUs, or cores if there are none
    name: str

    @property
    def kind(self):
        return ("core" if self.device == "cpu" else "GPU") + "s" * (self.devices != 1)

    @classmethod
    def here(cls):
        """Return this machine.

        Its name is made from the device's name and the number of devices.
        """
        device = pick_device()
        if device.type == "cpu":
            devices = cores_per_process(1)
            count = f"{devices} cores"
        else:
            devices = torch.accelerator.device_count()
            count = f"x {devices}" if devices > 1 else ""
        name = re.sub(r"[^a-z0-9]+", "-", f"{device_name(device)} {count}".lower()).strip("-")
        return cls(device.type, devices, name)

    def process_counts(self, on_cpus):
        """Return the numbers of processes for an experiment. Processes may share cores."""
        if self.device == "cpu" and on_cpus:
            return on_cpus
        return [2**k for k in range(self.devices.bit_length()) if 2**k <= self.devices]


# Running


def parse_args():
    parser = Parser(__doc__)
    names = ", ".join(EXPERIMENTS)
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help=f"one or more of {names}")
    add("--list", action="store_true", help="list experiments and recorded runs; run nothing")
    add("--dry-run", action="store_true", help="print the commands that are not recorded yet")
    add("--machine", metavar="NAME", help="name of this machine; by default of its device")
    number = {"type": whole_number(1), "metavar": "N"}
    add("--processes", nargs="+", **number, help="numbers of processes; by default by machine")
    add("--repeats", **number, help="runs per command, with seeds 0 to N - 1")
    add("--out", metavar="DIR", help="folder of the records (default: results)")
    add("--data-dir", metavar="DIR", help="folder of images to use instead of the experiment's")
    add("--arch", metavar="NAME", help="model to use instead of the experiment's")
    args = parser.parse_args()
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"{name}: no such experiment, expected one or more of {names}")
    if not args.experiments and not args.list:
        parser.error(f"name one or more of {names}, or see --list")
    return args


def plan(name, machine, args):
    """Return all commands of an experiment, in order.

    Raises:
        UserError: the experiment cannot run on this machine, or with these numbers of processes.
    """
    experiment = EXPERIMENTS[name]
    counts = sorted(set(args.processes or machine.process_counts(experiment.on_cpus)))
    if machine.device != "cpu" and counts[-1] > machine.devices:
        raise UserError(
            f"--processes {counts[-1]}: {machine.devices} GPUs here, and each process needs its own"
        )
    if counts[-1] < experiment.least:
        raise UserError(
            f"{name} needs {experiment.least} processes or more, "
            f"found {counts[-1]} on {machine.devices} {machine.kind}: set --processes 1 2 4 if "
            "there are enough; without GPUs (CUDA_VISIBLE_DEVICES=) processes share the cores"
        )
    args = SimpleNamespace(**vars(args) | {"processes": counts})
    commands = []
    for repeat in range(args.repeats or experiment.repeats):
        commands += experiment.commands(machine, args, repeat)[:: -1 if repeat % 2 else 1]
    return commands


def recorded(path):
    """Return the commands of the runs in a file, which holds only runs that have succeeded."""
    return {record.get("command") for record in read(path)} if path.exists() else set()


def main(args):
    args.data_dir = args.data_dir and os.path.abspath(args.data_dir)
    args.out = os.path.abspath(args.out or RESULTS)
    os.chdir(ROOT)
    machine = Machine.here()
    machine_name = args.machine or machine.name
    print(f"this machine: {machine_name} ({machine.devices} {machine.kind})")
    names = args.experiments or list(EXPERIMENTS)
    todo = []
    for name in names:
        path = Path(args.out, name, f"{machine_name}.jsonl")
        print(f"\n{name}: {EXPERIMENTS[name].commands.__doc__}")
        try:
            commands = plan(name, machine, args)
            done = recorded(path)
        except (UserError, RecordError) as error:
            if len(names) == 1:
                raise
            print(f"   skipped: {error}")
            continue
        missing = [command for command in commands if command not in done]
        print(
            f"   {len(commands) - len(missing)} of {len(commands)} runs recorded in "
            f"{os.path.relpath(path, ROOT)}"
        )
        todo += [(path, command) for command in missing]
    if args.list:
        return
    if args.dry_run:
        print("\n".join(command for _, command in todo))
        return
    exit_on_signals()  # through execute(), which stops the run
    run_all(todo)


def exit_on_signals():
    """Exit by an exception on SIGTERM and SIGHUP, unless nohup has told us to ignore it."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(143))


def run_all(todo):
    """Run and record the missing runs, a list of (path, command).

    Raises:
        UserError: two runs in a row have failed, or, after all runs, at least one.
    """
    failed = {}  # number of a run: its error
    for k, (path, command) in enumerate(todo, start=1):
        print(f"\n[{k}/{len(todo)}] {command}", flush=True)
        try:
            records = execute(command)
        except UserError as error:
            failed[k] = error
            if k - 1 in failed:
                raise
            print(f"   {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        print("   recorded", flush=True)
    if failed:
        first = next(iter(failed.values()))
        raise UserError(f"{len(failed)} of {len(todo)} runs failed, the first: {first}")


def execute(command):
    """Run a command and return its records, with the seconds that it took to start.

    Raises:
        UserError: the command failed.
    """
    # for the log: a machine on which srun runs the script may share only this folder
    RESULTS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".run-", dir=RESULTS) as folder,
        open(Path(folder, "errors"), "w+") as errors,
    ):
        log = Path(folder, "log.jsonl")
        exit_code, seconds = run(f"{command} --log-file {shlex.quote(str(log))}", errors)
        if exit_code != 0 or not log.exists():
            errors.seek(0)
            messages = [line.strip() for line in errors if line.strip()] or ["no error message"]
            reasons = [line for line in messages if "error" in line.lower()] or messages[-1:]
            print(*messages[-20:], sep="\n", file=sys.stderr)
            raise UserError(
                f"exit code {exit_code}: {reasons[0]}; "
                f"recorded runs are kept. The command: {command}"
            )
        return [record | {"command": command, "launch_seconds": seconds} for record in read(log)]


def run(command, errors):
    """Run a command, with its error messages in a file. Print the results of its tests.

    Returns:
        its exit code, and the seconds until its header, which precedes the first training step.
    """
    arguments, variables = to_run(command)
    pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "start_new_session": True}
    begin = time.monotonic()
    seconds = None
    with subprocess.Popen(arguments, env=os.environ | variables, **pipes) as process:
        try:
            for line in process.stdout:
                if line.startswith("global batch ="):
                    seconds = round(time.monotonic() - begin, 2)
                if line.startswith("   == test"):
                    print(line, end="", flush=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun and srun forward it
            raise
    return process.returncode, seconds


if __name__ == "__main__":
    with one_line_errors():
        try:
            main(parse_args())
        except RecordError as error:
            raise UserError(str(error)) from None
