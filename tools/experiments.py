"""Record the experiments that the charts are drawn from, on this machine, in results/EXPERIMENT/MACHINE.jsonl.

    python tools/experiments.py --list              what there is, and how much of it is recorded here
    python tools/experiments.py speed --dry-run     the commands that are still to run
    python tools/experiments.py speed syncbn        run them, one after the other
    make charts MACHINE=my-laptop                   draw them; --list says what this machine is called

A run is recorded once it has ended well, so all this can be stopped at any time: the same command goes on with what
is missing. Every second repeat takes the runs in reverse order, so that what drifts on a machine, as its heat does,
weighs on all alike.
"""

import argparse
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
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.distributed import cpu_count
from common.errors import UserError, one_line_errors
from common.flags import whole_number
from common.report import device_name
from tools.measure import pick_device
from tools.records import RESULTS, ROOT, RecordError, read

PUBLISHED_BATCH = 256  # images a process, in the accuracy experiment
SYNCBN_BATCHES = (4, 8, 16, 32)  # images a process, in the syncbn experiment


class Run(NamedTuple):
    """A command as a user would type it, which is also its name in results/, and how many images it trains on."""

    command: str
    images: int


# The experiments. Each is a function (machine, args, repeat) -> list of Run: a repeat of it.


def speed(machine, args, repeat):
    """Images a second, and seconds to start: threads, DataParallel, torchrun, mp.spawn, srun."""
    on_cpu = machine.device == "cpu"
    size = 128 if on_cpu else 256  # images a step of a process
    each = args.limit or 30 * size  # images of a process

    def run(launch, script, batch, images, processes=1, threads=1):
        threads = f"OMP_NUM_THREADS={threads} " if on_cpu else ""
        flags = f"--batch-size {batch} --limit {images} --epochs 1{extra(args)} --seed {repeat}"
        return Run(f"{threads}{launch.format(processes)}{script} {flags}", images)

    most = max(args.processes)
    runs = [
        run("python ", "01_snsc.py", size, each, threads=k) for k in (sorted({1, *args.processes}) if on_cpu else [1])
    ]
    gpus = 1 if on_cpu else most  # DataParallel splits a batch over them
    runs.append(run("python ", "02_snmc_dp.py", gpus * size, gpus * each, threads=most))
    for n in args.processes:
        runs.append(run(TORCHRUN, "03_mnmc_ddp_launch.py", size, n * each, n))
        if n > 1:  # the same global batch for any number of processes
            runs.append(run(TORCHRUN, "03_mnmc_ddp_launch.py", size // n, each, n))
    runs.append(run("python ", f"04_mnmc_ddp_mp.py --nproc-per-node {most}", size, most * each, most))
    if slurm_answers():
        runs.append(run("srun --nodes=1 --ntasks-per-node={} python ", "05_mnmc_ddp_slurm.py", size, most * each, most))
    return runs


def syncbn(machine, args, repeat):
    """Test accuracy with and without synchronised batch norm, by images a process, against one process."""
    images = args.limit or 25000
    flags = (
        f"{real_images(args)} --limit {images} --epochs {args.epochs or 1} --arch {args.arch or 'small_net'} --lr 0.4"
    )
    runs = []
    for n in args.processes:
        for batch in SYNCBN_BATCHES:
            together = f"python 01_snsc.py {flags} --batch-size {n * batch} --seed {repeat}"
            apart = f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {flags} --batch-size {batch} --seed {repeat}"
            runs += [Run(command, images) for command in (together, apart, f"{apart} --sync-bn")]
    return list(dict.fromkeys(runs))  # 2 x 8 and 4 x 4 images are the same to one process


def accuracy(machine, args, repeat):
    """Accuracy by number of processes: as published, with the global batch of one, with a scaled rate and warm-up."""
    limit = f" --limit {args.limit}" if args.limit else ""
    flags = f"{real_images(args)}{limit}"
    epochs = f"--epochs {args.epochs or 5}"
    arch = f" --arch {args.arch}" if args.arch else ""
    images = (args.limit or 50000) * (args.epochs or 5)
    seed = f"--seed {repeat}"
    commands = [f"python 01_snsc.py {flags} {epochs} --lr-scaling none{arch} {seed}"]
    for n in (n for n in args.processes if n > 1):
        start = f"{TORCHRUN.format(n)}03_mnmc_ddp_launch.py {flags} --batch-size"
        commands += [
            f"{start} {PUBLISHED_BATCH} {epochs} --lr 0.02 --lr-scaling none{arch} {seed}",
            f"{start} {PUBLISHED_BATCH} {epochs} --warmup-epochs 3{arch} {seed}",
            f"{start} {PUBLISHED_BATCH // n} {epochs} --lr-scaling none{arch} {seed}",
        ]
    return [Run(command, images) for command in commands]


def scaling(machine, args, repeat):
    """Seconds of all_reduce by size and number of processes, and of a training step and its parts."""
    flags = f"--batch-size 64{extra(args)} --seed {repeat}"
    return [Run(f"OMP_NUM_THREADS=1 {TORCHRUN.format(n)}tools/bench.py scaling {flags}", n) for n in args.processes]


TORCHRUN = "torchrun --nnodes=1 --nproc-per-node={} "
EXPERIMENTS = {  # name -> (function, how many repeats, numbers of processes on CPUs)
    "speed": (speed, 5, None),
    "syncbn": (syncbn, 3, [2, 4]),
    "accuracy": (accuracy, 1, [1, 2, 4, 8, 16]),
    "scaling": (scaling, 3, [1, 2, 3, 4, 6, 8]),
}


def real_images(args):
    """The flags for CIFAR-10, or for the folder that was asked for."""
    if args.data_dir or (ROOT / "data/cifar10/train").is_dir():
        return f"--dataset folder --data-dir {shlex.quote(args.data_dir or 'data/cifar10')}"
    return "--dataset cifar10 --download"


def extra(args):
    """The flags for a network or for images that were asked for, where the usual ones are the scripts' own."""
    arch = f" --arch {args.arch}" if args.arch else ""
    return arch + (f" --dataset folder --data-dir {shlex.quote(args.data_dir)}" if args.data_dir else "")


def slurm_answers():
    """Whether srun can start something from here."""
    if not shutil.which("sinfo"):
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(["sinfo"], capture_output=True, timeout=10).returncode == 0
    return False


# The machine


class Machine(NamedTuple):
    device: str
    devices: int  # GPUs, or cores if there are none
    name: str

    @classmethod
    def here(cls):
        """This machine. Its name is that of its device, and how many there are."""
        device = pick_device()
        if device.type == "cpu":
            devices, count = cpu_count(), f"{cpu_count()} cores"
        else:
            devices = torch.accelerator.device_count()
            count = f"x {devices}" if devices > 1 else ""
        name = re.sub(r"[^a-z0-9]+", "-", f"{device_name(device)} {count}".lower()).strip("-")
        return cls(device.type, devices, name)

    def process_counts(self, on_cpus):
        """How many processes an experiment takes: powers of two, of what is here; CPUs may be shared."""
        if self.device == "cpu" and on_cpus:
            return on_cpus
        return [2**k for k in range(self.devices.bit_length()) if 2**k <= self.devices]


# Running


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help=f"one or more of {', '.join(EXPERIMENTS)}")
    add("--list", action="store_true", help="say what there is and what is recorded, and run nothing")
    add("--dry-run", action="store_true", help="print the commands that are still to run, and run nothing")
    add("--machine", metavar="NAME", help="what to call this machine; automatic: after its device")
    add("--processes", nargs="+", type=whole_number(1), metavar="N", help="numbers of processes; automatic: as fits")
    add(
        "--repeats",
        type=whole_number(1),
        metavar="N",
        help="runs of each, with seeds 0 to N - 1; automatic: by experiment",
    )
    add("--data-dir", metavar="DIR", help="a folder of images instead of the experiment's own")
    add("--arch", metavar="NAME", help="another network than the experiment's own")
    add("--limit", type=whole_number(1), metavar="N", help="fewer training images, for a quick try")
    add("--epochs", type=whole_number(1), metavar="N", help="epochs, where accuracy is what is measured")
    args = parser.parse_args()
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"{name}: no such experiment, expected one or more of {', '.join(EXPERIMENTS)}")
    if not args.experiments and not args.list:
        parser.error(f"name one or more of {', '.join(EXPERIMENTS)}, or see --list")
    return args


def plan(name, machine, args):
    """All runs of an experiment in their order."""
    function, repeats, on_cpus = EXPERIMENTS[name]
    here = argparse.Namespace(**vars(args))
    here.processes = sorted(set(args.processes or machine.process_counts(on_cpus)))
    if machine.device != "cpu" and max(here.processes) > machine.devices:
        raise UserError(f"--processes {max(here.processes)}: {machine.devices} GPUs here; each process needs its own")
    if name == "syncbn":
        here.processes = [n for n in here.processes if n > 1]
        if not here.processes:
            raise UserError(
                "syncbn needs two processes or more, and there is one GPU: hide it with CUDA_VISIBLE_DEVICES="
            )
    runs = []
    for repeat in range(args.repeats or repeats):
        runs += function(machine, here, repeat)[:: -1 if repeat % 2 else 1]
    return runs


def recorded(path):
    """The commands that a file of results holds runs of, without where they logged."""
    with contextlib.suppress(FileNotFoundError):
        return {re.sub(r" --log(-file)? \S+", "", record.get("command", "")) for record in read(path)}
    return set()


def main(args):
    os.chdir(ROOT)
    machine = Machine.here()
    devices = "cores" if machine.device == "cpu" else "GPUs"
    print(f"this machine: {args.machine or machine.name} ({machine.devices} {devices})")
    todo = []
    for name in args.experiments or EXPERIMENTS:
        path = RESULTS / name / f"{args.machine or machine.name}.jsonl"
        runs, done = plan(name, machine, args), recorded(path)
        missing = [run for run in runs if run.command not in done]
        print(f"\n{name}: {EXPERIMENTS[name][0].__doc__}")
        print(f"   {len(runs) - len(missing)} of {len(runs)} runs recorded in {os.path.relpath(path, ROOT)}")
        todo += [(path, run) for run in missing]
    if args.list:
        return
    if args.dry_run:
        print("\n".join(run.command for _, run in todo))
        return

    begin, images = time.monotonic(), sum(run.images for _, run in todo)
    did = 0
    for k, (path, run) in enumerate(todo):
        print(f"\n[{k + 1}/{len(todo)}] {run.command}", flush=True)
        records = execute(run.command)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        did += run.images
        passed = time.monotonic() - begin
        print(f"   recorded; {clock(passed)} passed, about {clock(passed * (images - did) / did)} left", flush=True)


def execute(command):
    """Run a command to its end and return its records, with the seconds that it took to start.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "errors"), "w+") as errors:
        log = Path(folder, "log.jsonl")
        words = shlex.split(command)
        env = os.environ | dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
        given = [part for word in words if not re.match(r"[A-Z_]+=", word) for part in programs.get(word, [word])]
        begin, started = time.monotonic(), None
        options = {"env": env, "stdout": subprocess.PIPE, "stderr": errors, "text": True, "start_new_session": True}
        with subprocess.Popen([*given, "--log-file", str(log)], **options) as process:
            try:
                for line in process.stdout:
                    if line.startswith("global batch ="):  # the last line before the first step
                        started = time.monotonic() - begin
                    if line.startswith(("   == test", "   ==  ")):
                        print(line, end="", flush=True)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun and srun hand it on
                raise
        if process.returncode != 0 or not log.exists():
            errors.seek(0)
            said = next((line for line in errors.read().splitlines() if "error:" in line), "it said nothing")
            raise UserError(
                f"exit code {process.returncode}: {said.strip()}; what is recorded stays. It was: {command}"
            )
        records = read(log)
    for record in records:
        record |= {"command": command, "launch_seconds": started and round(started, 2)}
    return records


def clock(seconds):
    """Hours, minutes and seconds, as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


if __name__ == "__main__":
    with one_line_errors():
        try:
            main(parse_args())
        except RecordError as error:
            raise UserError(str(error)) from None
