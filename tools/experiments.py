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

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.distributed import cores_per_process
from common.errors import UserError, one_line_errors
from common.flags import whole_number
from common.records import device_name
from tools.bench.measure import pick_device
from tools.records import RESULTS, ROOT, RecordError, read

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
# bytes: ResNet-18 with 256 images per training step and CIFAR-10 in memory
PROCESS_MEMORY = 1.4 * 2**30
PUBLISHED_BATCH = 256  # images per process in the accuracy experiment
GLUON_BATCH = 128  # images per training step in the resnet20 experiment
SYNCBN_BATCHES = (4, 8, 16, 32)  # images per process in the syncbn experiment
GPU_IMAGES, GPU_EPOCHS = 50000, 8  # of the speed experiment on GPUs; times the number of processes


class Run(NamedTuple):
    command: str  # as a user would type it; it also identifies the run in results/
    images: int  # the number of images it trains on, to estimate the remaining time


# The experiments. Each is a function (machine, args, repeat) -> list of Run, for one repeat.


def speed(machine, args, repeat):
    """Images per second, and seconds to start, by threads, DataParallel and launchers."""
    on_cpu = machine.device == "cpu"
    size = 128 if on_cpu else 256  # images per process and training step
    images_per_process = args.limit or 30 * size  # on CPUs

    def run(launch, script, batch, images, processes=1, threads=1, gpus=""):
        setting = f"OMP_NUM_THREADS={threads} " if on_cpu else gpus
        epochs = 1
        # the whole data set several times, or a run would take less than ten seconds
        if not on_cpu:
            epochs = args.epochs or GPU_EPOCHS * processes
            images = args.limit or GPU_IMAGES
        flags = (
            f"--batch-size {batch} --limit {images} --epochs {epochs}{extra(args)} --seed {repeat}"
        )
        return Run(f"{setting}{launch.format(processes)}{script} {flags}", epochs * images)

    most = max(args.processes)
    thread_counts = sorted({1, *args.processes}) if on_cpu else [1]
    runs = [
        run("python ", "01_snsc.py", size, images_per_process, threads=k) for k in thread_counts
    ]
    split = 1 if on_cpu else most  # DataParallel splits each batch over all visible GPUs
    visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(most)))} "
    runs.append(
        run(
            "python ",
            "02_snmc_dp.py",
            split * size,
            split * images_per_process,
            threads=most,
            gpus=visible,
        )
    )
    for n in args.processes:
        runs.append(run(TORCHRUN, "03_mnmc_ddp_launch.py", size, n * images_per_process, n))
        if n > 1:  # keep the global batch size of one process
            runs.append(run(TORCHRUN, "03_mnmc_ddp_launch.py", size // n, images_per_process, n))
    runs.append(
        run(
            "python ",
            f"04_mnmc_ddp_mp.py --nproc-per-node {most}",
            size,
            most * images_per_process,
            most,
        )
    )
    if slurm_answers():
        srun = (
            "srun --nodes=1 --ntasks-per-node={} "
            + ("" if on_cpu else f"--gpus-per-node={most} ")
            + "python "
        )
        runs.append(run(srun, "05_mnmc_ddp_slurm.py", size, most * images_per_process, most))
    return runs


def syncbn(machine, args, repeat):
    """Test accuracy with and without SyncBN, by images per process, beside one process."""
    images = args.limit or 12800
    flags = (
        f"{real_images(args)} --limit {images} --epochs {args.epochs or 1} --arch "
        f"{args.arch or 'small_net'} --lr 0.4"
    )
    runs = []
    for n in args.processes:
        for batch in SYNCBN_BATCHES:
            one_process = f"python 01_snsc.py {flags} --batch-size {n * batch} --seed {repeat}"
            processes = (
                f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {flags} --batch-size "
                f"{batch} --seed {repeat}"
            )
            runs += [
                Run(command, images)
                for command in (one_process, processes, f"{processes} --sync-bn")
            ]
    return list(dict.fromkeys(runs))  # 2 x 8 and 4 x 4 images give the same command for one process


def accuracy(machine, args, repeat):
    """Accuracy by number of processes: as published, with one global batch, with warm-up."""
    limit = f" --limit {args.limit}" if args.limit else ""
    flags = f"{real_images(args)}{limit}"
    epochs = f"--epochs {args.epochs or 5}"
    arch = arch_flag(args)
    images = (args.limit or 50000) * (args.epochs or 5)
    seed = f"--seed {repeat}"
    commands = [f"python 01_snsc.py {flags} {epochs} --lr-scaling none{arch} {seed}"]
    for n in (n for n in args.processes if n > 1):
        start = f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {flags} --batch-size"
        warmup = max(1, n.bit_length() - 2)  # 1, 1, 2, 3 epochs for 2, 4, 8, 16 processes
        commands += [
            f"{start} {PUBLISHED_BATCH} {epochs} --lr 0.02 --lr-scaling none{arch} {seed}",
            f"{start} {PUBLISHED_BATCH} {epochs} --warmup-epochs {warmup}{arch} {seed}",
            f"{start} {PUBLISHED_BATCH // n} {epochs} --lr-scaling none{arch} {seed}",
        ]
    return [Run(command, images) for command in commands]


def resnet20(machine, args, repeat):
    """Accuracy of ResNet-20 on CIFAR-10 in its first ten epochs, with one and with two processes.

    Batch size and learning rate are those of GluonCV's published log.
    """
    limit = f" --limit {args.limit}" if args.limit else ""
    epochs = args.epochs or 10
    flags = (
        f"{real_images(args)}{limit} --epochs {epochs} --arch {args.arch or 'cifar_resnet20'} "
        f"--lr 0.1 --lr-scaling none"
    )
    runs = []
    for n in args.processes:
        start = "python 01_snsc.py" if n == 1 else f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py"
        command = f"{start} {flags} --batch-size {GLUON_BATCH // n} --seed {repeat}"
        runs.append(Run(command, (args.limit or 50000) * epochs))
    return runs


def scaling(machine, args, repeat):
    """Seconds of all_reduce by size and number of processes; of a training step and its parts."""
    flags = f"--batch-size 64{extra(args)} --seed {repeat}"
    return [
        Run(f"OMP_NUM_THREADS=1 {TORCHRUN.format(n)}tools/bench/scaling.py {flags}", 5000 * n)
        for n in args.processes
    ]


def memory(machine, args, repeat):
    """Memory, bytes sent and images per second of DDP, ZeroRedundancyOptimizer and FSDP."""
    size, steps = (4, 3) if machine.device == "cpu" else (64, 20)
    flags = {
        args.arch or "vit_b_32": f"--batch-size {size}",
        "resnet18": f"--image-size 32 --batch-size {16 * size}",
    }
    processes = " ".join(str(n) for n in sorted({1, *args.processes}))
    runs = []
    for arch, of_model in flags.items():
        command = (
            f"python tools/bench/memory.py --arch {arch} {of_model} --steps {steps} "
            f"--processes {processes} --seed {repeat}"
        )
        runs.append(Run(command, 3000 if arch != "resnet18" else 1000))
    return runs


def my_ddp(machine, args, repeat):
    """Time, messages and bytes of a training step with the DDP of the exercises and torch's."""
    flags = f"--batch-size 32 --repeats 3{extra(args)} --seed {repeat}"
    return [
        Run(f"OMP_NUM_THREADS=1 {TORCHRUN.format(n)}tools/bench/my_ddp.py {flags}", 6000 * n)
        for n in args.processes
    ]


TORCHRUN = "torchrun --nnodes=1 --nproc-per-node={} "
# name: (function, repeats, numbers of processes on CPUs, how many numbers it needs at least)
EXPERIMENTS = {
    "speed": (speed, 3, None, 1),
    "syncbn": (syncbn, 3, [2, 4], 1),
    "resnet20": (resnet20, 1, [1, 2], 1),
    "accuracy": (accuracy, 1, [1, 2, 4, 8, 16], 2),
    "scaling": (scaling, 3, [1, 2, 3, 4, 6, 8], 3),
    "memory": (memory, 2, [1, 2, 4], 2),
    "my_ddp": (my_ddp, 3, [2], 1),
}


def real_images(args):
    """Return the flags for CIFAR-10, or for the folder in --data-dir."""
    if args.data_dir or (ROOT / "data/cifar10/train").is_dir():
        return f"--dataset folder --data-dir {shlex.quote(args.data_dir or 'data/cifar10')}"
    return "--dataset cifar10 --download"


def arch_flag(args):
    """Return the flag for the model in --arch, if there is one."""
    return f" --arch {args.arch}" if args.arch else ""


def extra(args):
    """Return the flags for --arch and --data-dir, if they are given."""
    return arch_flag(args) + (
        f" --dataset folder --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else ""
    )


def slurm_answers():
    """Return whether srun can start a task now."""
    if not shutil.which("srun"):
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        return (
            subprocess.run(
                ["srun", "--immediate=10", "true"], capture_output=True, timeout=30
            ).returncode
            == 0
        )
    return False


# The machine


class Machine(NamedTuple):
    device: str
    devices: int  # GPUs, or cores if there are none
    name: str
    memory: float = math.inf  # bytes

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
        return cls(
            device.type, devices, name, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )

    def process_counts(self, on_cpus):
        """Return the numbers of processes for an experiment.

        Processes may share cores, but their memory must fit.
        """
        if self.device == "cpu" and on_cpus:
            return [n for n in on_cpus if n * PROCESS_MEMORY <= self.memory] or on_cpus[:1]
        return [2**k for k in range(self.devices.bit_length()) if 2**k <= self.devices]


# Running


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "experiments",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"one or more of {', '.join(EXPERIMENTS)}",
    )
    add(
        "--list",
        action="store_true",
        help="list the experiments and the recorded runs; run nothing",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the commands that are not recorded yet; run nothing",
    )
    add(
        "--machine",
        type=file_name,
        metavar="NAME",
        help="name of this machine (default: made from its device)",
    )
    add(
        "--processes",
        nargs="+",
        type=whole_number(1),
        metavar="N",
        help="numbers of processes (default: by machine)",
    )
    add(
        "--repeats",
        type=whole_number(1),
        metavar="N",
        help="runs per command, seeds 0 to N - 1 (default: 1 or 3)",
    )
    add("--out", default=RESULTS, metavar="DIR", help="folder of the records (default: results)")
    add("--data-dir", metavar="DIR", help="folder of images to use instead of the experiment's")
    add("--arch", metavar="NAME", help="model to use instead of the experiment's")
    add(
        "--limit",
        type=whole_number(1),
        metavar="N",
        help="training images; speed without GPUs: per process; not for scaling, memory, my_ddp",
    )
    add(
        "--epochs",
        type=whole_number(1),
        metavar="N",
        help="number of epochs; speed without GPUs uses 1; not for scaling, memory, my_ddp",
    )
    args = parser.parse_args()
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(
                f"{name}: no such experiment, expected one or more of {', '.join(EXPERIMENTS)}"
            )
    if not args.experiments and not args.list:
        parser.error(f"name one or more of {', '.join(EXPERIMENTS)}, or see --list")
    return args


def file_name(text):
    """Parse a flag that names a file in results/."""
    if not re.fullmatch(r"[A-Za-z0-9][-\w.]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} given, expected letters, digits, hyphens and dots, as in my-laptop"
        )
    return text


def plan(name, machine, args):
    """Return all runs of an experiment, in order.

    Raises:
        UserError: the experiment cannot run on this machine, or with these numbers of processes.
    """
    function, repeats, on_cpus, least = EXPERIMENTS[name]
    run_args = argparse.Namespace(**vars(args))
    counts = sorted(set(args.processes or machine.process_counts(on_cpus)))
    # syncbn always compares with one process; my_ddp needs several
    run_args.processes = [n for n in counts if n > 1 or name not in ("syncbn", "my_ddp")]
    if machine.device != "cpu" and counts[-1] > machine.devices:
        raise UserError(
            f"--processes {counts[-1]}: {machine.devices} GPUs here, and each process needs its own"
        )
    if len(run_args.processes) < least:
        needs = {
            "syncbn": "two processes or more",
            "accuracy": "one process and more",
            "scaling": "1, 2 and more processes",
            "memory": "one process and more",
            "my_ddp": "two processes or more",
        }
        raise UserError(
            f"{name} needs {needs[name]}, "
            f"found {' '.join(map(str, counts))} on {machine.devices} {machine.kind}: set "
            "--processes 1 2 4 if there are enough; without GPUs (CUDA_VISIBLE_DEVICES=) "
            "processes share the cores"
        )
    runs = []
    for repeat in range(args.repeats or repeats):
        runs += function(machine, run_args, repeat)[:: -1 if repeat % 2 else 1]
    return runs


def recorded(path):
    """Return the commands of the complete runs in a file, without their --log-file flags."""
    last = {}
    with contextlib.suppress(FileNotFoundError):
        for record in read(path):
            command = re.sub(r" --log(-file)? \S+", "", record.get("command", ""))
            last[command] = max(last.get(command, 0), record.get("epoch", math.inf))
    epochs = {command: re.search(r" --epochs (\d+)", command) for command in last}
    return {
        command
        for command in last
        if not epochs[command] or last[command] >= int(epochs[command][1])
    }


def main(args):
    args.data_dir = args.data_dir and os.path.abspath(args.data_dir)
    args.out = os.path.abspath(args.out)
    os.chdir(ROOT)
    machine = Machine.here()
    print(f"this machine: {args.machine or machine.name} ({machine.devices} {machine.kind})")
    names = args.experiments or list(EXPERIMENTS)
    todo = []
    for name in names:
        path = Path(args.out, name, f"{args.machine or machine.name}.jsonl")
        print(f"\n{name}: {EXPERIMENTS[name][0].__doc__}")
        try:
            runs = plan(name, machine, args)
            done = recorded(path)
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"   skipped: {error}")
            continue
        missing = [run for run in runs if run.command not in done]
        print(
            f"   {len(runs) - len(missing)} of {len(runs)} runs recorded in "
            f"{os.path.relpath(path, ROOT)}"
        )
        todo += [(path, run) for run in missing]
    if args.dry_run and not args.list:
        print("\n".join(run.command for _, run in todo))
    elif not args.list:
        for number in STOP_SIGNALS:
            # exit through execute(), which stops the run
            signal.signal(number, lambda *_: sys.exit(143))
        run_all(todo)


def run_all(todo):
    """Run and record the missing runs, a list of (path, Run).

    Raises:
        UserError: two runs in a row have failed, or, after all runs, at least one.
    """
    begin = time.monotonic()
    total = sum(run.images for _, run in todo)
    done = 0
    failed = []
    for k, (path, run) in enumerate(todo, start=1):
        print(f"\n[{k}/{len(todo)}] {run.command}", flush=True)
        done += run.images
        try:
            records = execute(run.command)
        except UserError as error:
            failed.append((k, error))
            if [k - 1, k] == [number for number, _ in failed[-2:]]:
                raise
            print(f"   {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        passed = time.monotonic() - begin
        print(
            (
                f"   recorded; {clock(passed)} passed, about "
                f"{clock(passed * (total - done) / done)} left"
            ),
            flush=True,
        )
    if failed:
        raise UserError(f"{len(failed)} of {len(todo)} runs failed, the first: {failed[0][1]}")


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
        words = shlex.split(command)
        # they precede the program
        settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
        env = os.environ | dict(word.split("=", 1) for word in settings)
        programs = {
            "python": [sys.executable],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }
        arguments = [part for word in words[len(settings) :] for part in programs.get(word, [word])]
        begin = time.monotonic()
        started = None
        options = {
            "env": env,
            "stdout": subprocess.PIPE,
            "stderr": errors,
            "text": True,
            "start_new_session": True,
        }
        with subprocess.Popen([*arguments, "--log-file", str(log)], **options) as process:
            try:
                for line in process.stdout:
                    # part of the header, printed before the first training step
                    if line.startswith("global batch ="):
                        started = time.monotonic() - begin
                    if line.startswith("   == test"):
                        print(line, end="", flush=True)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun and srun forward it
                raise
        errors.seek(0)
        messages = [line.strip() for line in errors if line.strip()]
        if process.returncode != 0 or not log.exists():
            last = messages[-1] if messages else "no error message"
            reason = next((line for line in messages if "error" in line.lower()), last)
            print(*messages[-20:], sep="\n", file=sys.stderr)
            raise UserError(
                f"exit code {process.returncode}: {reason}; "
                f"recorded runs are kept. The command: {command}"
            )
        records = read(log)
    for record in records:
        record |= {"command": command, "launch_seconds": started and round(started, 2)}
    return records


def clock(seconds):
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


if __name__ == "__main__":
    with one_line_errors():
        try:
            main(parse_args())
        except RecordError as error:
            raise UserError(str(error)) from None
