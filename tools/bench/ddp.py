"""Measure the cost and the speedup of DistributedDataParallel.

    python tools/bench/ddp.py --batch-size 128

Three launches take turns, --repeats times:

    1 process, 1 thread       plain PyTorch
    2 processes, 1 thread     DistributedDataParallel. Its variants take turns step by step:
                              no communication (no_sync), other bucket sizes, gradients as views
                              of the buckets, gradients sent as bf16. On GPUs a turn is 20 training
                              steps, because a wait after each would slow them down
    1 process, 2 threads      plain PyTorch, with as many cores as the two processes together

With GPUs: one process on one GPU, and one process per GPU. Efficiency is images per second, divided
by the number of processes and threads and by the speed of one process with one thread. Exposed
communication is the fraction of a training step that no_sync saves. The last part measures the
seconds from torchrun to the first training step of 03, by number of processes.
"""

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets
from common.distributed import cleaned_up, setup_distributed
from common.errors import UserError, one_line_errors
from common.flags import whole_number
from tools.bench.measure import (
    ROOT,
    build_step,
    command_line,
    fields,
    first_batch,
    parse_args,
    pick_device,
    run_ranks,
    step_seconds,
    take_turns,
    torchrun,
    write_images,
)
from tools.records import append, group, ratios, spread

GPU_STEPS = 20  # training steps per turn on GPUs; on CPUs 1


def bf16(model):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return ddp


VARIANTS = {
    "ddp": DistributedDataParallel,
    "no_sync": DistributedDataParallel,
    "bucket cap 1 MiB": lambda model: DistributedDataParallel(model, bucket_cap_mb=1),
    "bucket cap 100 MiB": lambda model: DistributedDataParallel(model, bucket_cap_mb=100),
    "gradient as bucket view": lambda model: DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
    "bf16 hook": bf16,
}


def add_flags(parser):
    counts = [1, 2, 4, 8, 16]  # on CPUs processes may share cores, but two cannot share a GPU
    counts = [n for n in counts if n <= (torch.cuda.device_count() or 16)]
    sizes = {"nargs": "*", "type": whole_number(1), "default": counts, "metavar": "N"}
    parser.add_argument("--launches", **sizes, help="numbers of processes whose launch is timed")
    parser.add_argument(
        "--inside", action="store_true", help="run as one of the measured processes (internal)"
    )


def main(args):
    if args.inside:
        measure(args)
        return
    device = pick_device()
    worlds = [(1, 1), (2, 1), (1, 2)]  # processes, threads per process
    if device.type == "cuda":
        worlds = [(1, 1), (torch.cuda.device_count(), 1)]
    known = fields(args, device)
    records = take_turns(
        args,
        known | {"bench": "ddp"},
        worlds,
        run=lambda world: launch(args, *world),
        line=lambda run: (
            f"{run['world_size']} x {run['threads']} {run['images_per_second']:8.0f} img/s "
            f"({run['variant']})"
        ),
    )
    print(
        f"\n{'processes x threads':36} {'img/s, median (range)':>24} "
        f"{'efficiency':>20} {'exposed':>20}"
    )
    for world, variant, speed, efficiency, exposed in rows(records):
        print(f"{world + ' ' + variant:36} {speed:>24} {efficiency:>20} {exposed:>20}")
    print("\nseconds from torchrun to the first training step of 03:")
    for processes in args.launches:
        times = [launch_seconds(processes) for _ in range(args.repeats)]
        for repeat, seconds in enumerate(times):
            record = {"bench": "launch", "world_size": processes, "repeat": repeat}
            append(args.log_file, known | record | {"seconds": seconds})
        print(f"{processes:3} processes {spread(times, '.1f'):>24}", flush=True)


def rows(records):
    """Return the rows of the table of variants: processes x threads, variant, images per second,
    efficiency, exposed communication.
    """
    runs = group(records, "world_size", "threads", "variant")
    table = []
    for (processes, threads, variant), same in runs.items():
        speeds = [run["images_per_second"] for run in same]
        efficiency = [r / processes / threads for r in ratios(same, runs[1, 1, "plain"])]
        exposed = ""
        no_sync = runs.get((processes, threads, "no_sync"))
        if no_sync and variant != "no_sync":
            exposed = spread([1 - r for r in ratios(same, no_sync)], ".2f")
        cells = (spread(speeds, ".0f"), spread(efficiency, ".2f"), exposed)
        table.append((f"{processes} x {threads}", variant, *cells))
    return table


def launch(args, processes, threads):
    """Run measure() in processes under torchrun. Return a record for each variant."""
    flags = ["--inside", *command_line(args)]
    seconds_per_step = run_ranks("torchrun", processes, threads, __file__, *flags)
    return [
        {
            "variant": variant,
            "world_size": processes,
            "threads": threads,
            "seconds_per_step": seconds,
            "images_per_second": processes * args.batch_size / seconds,
        }
        for variant, seconds in seconds_per_step.items()
    ]


@cleaned_up()
def measure(args):
    """Time the variants, which take turns step by step.

    Rank 0 prints {variant: seconds per step} as JSON.
    """
    d = setup_distributed()
    args.limit = max(2, args.batch_size)
    train_set, _ = build_datasets(args)
    batch = first_batch(args, train_set, d.device)
    steps = {}
    for name, wrap in (VARIANTS if d.world_size > 1 else {"plain": lambda model: model}).items():
        step = build_step(args, train_set, d.device, wrap)
        steps[name] = functools.partial(step, *batch, synced=name != "no_sync")
    per_turn = GPU_STEPS if d.device.type == "cuda" else 1
    seconds = step_seconds(steps, d.device, per_turn)
    if d.is_main:
        print(json.dumps(seconds))


def launch_seconds(processes):
    """Return the seconds from the start of torchrun to the line of 03's first training step."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(folder, train=4 * processes, test=2)
        command = torchrun(processes, ROOT / "03_mnmc_ddp_launch.py", "--dataset", "folder")
        command += ["--data-dir", folder, "--batch-size", "4", "--epochs", "1"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begin = time.perf_counter()
        seconds = None
        with subprocess.Popen(command, **options) as process:
            for line in process.stdout:
                if "== step: [  1/1]" in line:
                    seconds = time.perf_counter() - begin
                    break
            _, errors = process.communicate()
    if seconds is None or process.returncode != 0:
        raise UserError(
            f"03 with {processes} processes printed no training step: {errors.strip()[-300:]}"
        )
    return seconds


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__, add_flags))
