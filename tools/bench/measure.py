"""Functions shared by the benchmarks: runs in turn that are timed, shown and recorded."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

from common.errors import UserError
from common.machine import cores_per_process
from common.records import device_name, environment
from common.report import synchronize, warmup_steps
from tools.records import append, ratios, spread

ROOT = Path(__file__).resolve().parents[2]


def pick_device():
    return (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )


def timed(batches, step, device):
    """Return the images per second of a loop over batches, without its first training steps."""
    if len(batches) < 10:
        raise UserError(
            f"{len(batches)} steps are too few to time, expected 10 or more: lower --batch-size"
        )
    done = 0
    warmup = warmup_steps(len(batches))
    for k, (images, targets) in enumerate(batches, start=1):
        step(images, targets)
        done += len(targets)
        if k == warmup:
            synchronize(device)
            done = 0
            begin = time.perf_counter()
    synchronize(device)
    return done / (time.perf_counter() - begin)


def machine_name():
    """Return a name for this machine, of its device and the number of devices."""
    device = pick_device()
    count = f"{cores_per_process(1)} cores"
    if device.type != "cpu":
        devices = torch.accelerator.device_count()
        count = f"x {devices}" if devices > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{device_name(device)} {count}".lower()).strip("-")


def run_alone(what, make_command):
    """Run a program of this repository in its own process.

    Args:
        what: str, names it in a message.
        make_command: function of an empty folder that returns the program and its arguments.

    Returns:
        its records, of FOLDER/log.jsonl or else of its output, and the peak memory in MiB of its
        process and its children.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *map(str, make_command(Path(folder)))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.returncode is None:
            try:
                output, _ = process.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                peak = max(peak, memory_of(process.pid) // 1024)
        if process.returncode != 0:
            raise UserError(f"{what} exited with code {process.returncode}; see its message above")
        log = Path(folder, "log.jsonl")
        lines = (log.read_text() if log.exists() else output).splitlines()
    return [json.loads(line) for line in lines], peak


def run_ranks(what, processes, threads, script, *flags):
    """Run a script under torchrun, with so many threads per process. Return the last line of its
    output, which is JSON.

    Raises:
        UserError: it failed. `what` names it.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += map(str, (script, *flags))
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        raise UserError(f"{what} exited with code {process.returncode}; see its message above")
    return json.loads(process.stdout.splitlines()[-1])


def write_images(folder, **counts):
    """Write an ImageFolder tree of two classes: so many random images of 32x32 per split."""
    for split, count in counts.items():
        for label in ("cat", "dog"):
            path = Path(folder, split, label)
            path.mkdir(parents=True)
            for k in range(count // 2):
                image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
                torchvision.io.write_jpeg(image, str(path / f"{k}.jpg"))


def memory_of(pid):
    """Return the memory of a process and its children in KiB: 0 without /proc, or at its end.

    Shared memory is counted once: each process counts with its proportional share (PSS).
    """
    process = Path(f"/proc/{pid}")
    try:
        total = int(re.search(r"^Pss: *(\d+)", (process / "smaps_rollup").read_text(), re.M)[1])
        for children in process.glob("task/*/children"):
            total += sum(map(memory_of, children.read_text().split()))
    except OSError:  # it has just exited
        return 0
    return total


def fields(args, device, *names):
    """Return the fields of all records of a run: its settings, the hardware, and the versions."""
    names = names or ("dataset", "data_dir", "limit", "batch_size")
    settings = {name: getattr(args, name) for name in names}
    return {"model": args.arch} | settings | environment(device)


def take_turns(args, known, variants, run, line):
    """Run each variant --repeats times, in turn. Print and record each run.

    Args:
        args: Namespace with repeats and log_file.
        known: dict, the fields of all records.
        variants: list, what to run.
        run: function of a variant that runs it; returns a list of dict, what it measured.
        line: function of the last of these records that returns the text to print.

    Returns:
        list of dict, all records.
    """
    print(
        f"{known['device_name']}, {known['cores']} cores | torch {known['torch']} | "
        f"{args.repeats} runs of each, in turn"
    )
    records = []
    for repeat in range(args.repeats):
        for variant in variants:
            new = [known | {"repeat": repeat} | measured for measured in run(variant)]
            for record in new:
                append(args.log_file, record)
            print(f"   run {repeat + 1}: {line(new[-1])}", flush=True)
            records += new
    return records


def show(runs, head, column):
    """Print the speed and memory of each kind of run, and a column of ratios: {kind: list}."""
    print(f"\n{'run':16} {'img/s, median (range)':>28} {'peak memory':>12}   {head}")
    for kind, same in runs.items():
        speeds = spread([run["images_per_second"] for run in same], ".1f")
        memory = max(run["peak_memory_mib"] for run in same)
        ratio = spread(column[kind], ".3f") if kind in column else ""
        print(f"{kind:16} {speeds:>28} {memory:8} MiB   {ratio}")


def summary(script, ours, others):
    """Return the speed of a script and its median ratio to other loops, {name: runs}, as a line."""
    speed = statistics.median(run["images_per_second"] for run in ours)
    texts = [f"{statistics.median(ratios(ours, same)):.2f} of {n}" for n, same in others.items()]
    return ", ".join([f"{script}: {speed:.0f} img/s", *texts])
