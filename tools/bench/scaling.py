"""Measure all_reduce by size, and a training step and its parts, for the prediction in
notebooks/scaling.ipynb.

    torchrun --nnodes=1 --nproc-per-node=2 tools/bench/scaling.py --batch-size 64

torchrun sets the number of processes.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets
from common.report import synchronize
from common.setup_distributed import cleaned_up, setup_distributed
from ddp.errors import one_line_errors
from tools.bench.measure import (
    WARMUP,
    build_step,
    fields,
    first_batch,
    parse_args,
    step_seconds,
)
from tools.records import append

SIZES = [2**k for k in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB


@cleaned_up()
def main(args):
    d = setup_distributed()
    args.limit = max(2, args.batch_size)
    known = fields(args, d.device) | {
        "world_size": d.world_size,
        "local_world_size": d.local_world_size,
        "backend": d.backend,
        "seed": args.seed,
    }
    for size in SIZES if d.world_size > 1 else []:
        seconds = all_reduce_seconds(size, d.device)
        if d.is_main:
            print(
                f"all_reduce of {size:10} bytes between {d.world_size} processes: "
                f"{1000 * seconds:10.3f} ms",
                flush=True,
            )
            record = {"bench": "all_reduce", "bytes": size, "seconds": seconds}
            append(args.log_file, known | record)
    measured = step_parts(args, d.device)
    if d.is_main:
        buckets = ", ".join(f"{size / 2**20:.1f}" for size in measured["bucket_bytes"])
        whole, compute = 1000 * measured["seconds"], 1000 * measured["compute_seconds"]
        print(
            f"training step: {whole:.1f} ms, without communication {compute:.1f} ms; "
            f"buckets of {buckets} MiB"
        )
        append(args.log_file, known | {"bench": "step"} | measured)


def all_reduce_seconds(size, device):
    """Return the median seconds of an all_reduce of `size` bytes."""
    tensor = torch.zeros(size // 4, device=device)  # the sums of ones would grow to infinity
    return step_seconds({"all_reduce": lambda: dist.all_reduce(tensor)}, device)["all_reduce"]


def step_parts(args, device):
    """Measure a training step with and without communication, and when each bucket of gradients is
    ready.

    Before each time is taken, the device is synchronised, because a GPU works asynchronously.

    Returns:
        dict of seconds, compute_seconds, ready_seconds and bucket_bytes; the times are medians.
    """
    train_set, _ = build_datasets(args)
    batch = first_batch(args, train_set, device)
    ready, buckets = [], []
    marks = []  # of one step: its begin, and when its buckets are ready

    def mark():
        synchronize(device)
        marks.append(time.perf_counter())

    def send_nothing(state, bucket):
        mark()
        buckets.append(bucket.buffer().numel() * bucket.buffer().element_size())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def without_communication(model):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, send_nothing)
        return ddp

    communicating = build_step(args, train_set, device, DistributedDataParallel)
    silent = build_step(args, train_set, device, without_communication)

    def silent_step():
        marks.clear()
        buckets.clear()
        mark()
        silent(*batch)
        ready.append([moment - marks[0] for moment in marks[1:]])

    steps = {"whole": lambda: communicating(*batch), "compute": silent_step}
    seconds = step_seconds(steps, device)
    return {
        "seconds": seconds["whole"],
        "compute_seconds": seconds["compute"],
        "ready_seconds": [statistics.median(times) for times in zip(*ready[WARMUP:], strict=True)],
        "bucket_bytes": list(buckets),
    }


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__))
