"""Run the commands of recorded runs on this machine, and record them in
results/EXPERIMENT/MACHINE.jsonl.

    python tools/experiments.py speed --dry-run               print the commands that are missing
    python tools/experiments.py speed --machine my-laptop     run them, one after the other
    python tools/experiments.py speed --like nvidia-h200      run what that machine has run
    make charts MACHINE=my-laptop                             draw the charts

A run is recorded after it has succeeded, so you can stop at any time: the same command continues
with the missing runs.
"""

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

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import UserError, one_line_errors
from common.flags import Parser
from common.machine import cores_per_process
from common.records import device_name
from tools.bench.measure import pick_device
from tools.records import RESULTS, ROOT, RecordError, read, to_run

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
EXPERIMENTS = ("speed", "syncbn", "accuracy", "resnet20", "memory")
OURS = "amd-epyc-2-cores"


def machine_name():
    """Return a name for this machine, of its device and the number of devices."""
    device = pick_device()
    count = f"{cores_per_process(1)} cores"
    if device.type != "cpu":
        devices = torch.accelerator.device_count()
        count = f"x {devices}" if devices > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{device_name(device)} {count}".lower()).strip("-")


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    add("--like", default=OURS, metavar="MACHINE", help=f"whose commands to run (default: {OURS})")
    text = "a file with a command per line to run instead; - for the standard input"
    add("--commands", metavar="FILE", help=text)
    add("--dry-run", action="store_true", help="print the commands that are not recorded yet")
    add("--machine", metavar="NAME", help="name of this machine; by default of its device")
    add("--out", metavar="DIR", help="folder of the records (default: results)")
    return parser.parse_args()


def commands(args):
    """Return the commands to run here, in their order. Those for srun need it."""
    if args.commands == "-":
        found = sys.stdin.read().splitlines()
    elif args.commands:
        found = Path(args.commands).read_text().splitlines()
    else:
        path = RESULTS / args.experiment / f"{args.like}.jsonl"
        if not path.exists():
            machines = ", ".join(sorted(other.stem for other in path.parent.glob("*.jsonl")))
            raise UserError(f"--like {args.like}: expected one of {machines}")
        found = [record["command"] for record in read(path)]
    if not shutil.which("srun"):
        found = [command for command in found if "srun" not in shlex.split(command)]
    return list(dict.fromkeys(map(with_images, found)))


def with_images(command):
    """Return a command with the images that are here: CIFAR-10 in a folder, or downloaded."""
    folder = re.search(r"--dataset folder --data-dir (data/cifar10\S*)", command)
    if folder and not (ROOT / folder[1]).is_dir():
        return command.replace(folder[0], "--dataset cifar10 --download")
    return command


def recorded(path):
    """Return the commands of the runs in a file, which holds only runs that have succeeded."""
    return {record.get("command") for record in read(path)} if path.exists() else set()


def main(args):
    path = Path(args.out or RESULTS).absolute() / args.experiment
    path /= f"{args.machine or machine_name()}.jsonl"
    every = commands(args)
    os.chdir(ROOT)
    done = recorded(path)
    missing = [command for command in every if command not in done]
    shown = os.path.relpath(path, ROOT)
    print(f"{len(every) - len(missing)} of {len(every)} runs recorded in {shown}", flush=True)
    if args.dry_run:
        print("\n".join(missing))
        return
    exit_on_signals()  # through execute(), which stops the run
    run_all(path, missing)


def exit_on_signals():
    """Exit by an exception on SIGTERM and SIGHUP, unless nohup has told us to ignore it."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(143))


def run_all(path, missing):
    """Run and record the missing runs.

    Raises:
        UserError: two runs in a row have failed, or, after all runs, at least one.
    """
    failed = {}  # number of a run: its error
    for k, command in enumerate(missing, start=1):
        print(f"\n[{k}/{len(missing)}] {command}", flush=True)
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
        raise UserError(f"{len(failed)} of {len(missing)} runs failed, the first: {first}")


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
