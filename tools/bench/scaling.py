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

from common.data import build_datasets, build_transforms
from common.distributed import cleaned_up, setup_distributed
from common.errors import one_line_errors
from common.records import environment
from common.report import synchronize
from tools.bench.measure import build_step, first_batch, parse_args, write

SIZES = [2**k for k in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB
STEPS, WARMUP = 10, 3


@cleaned_up()
def main(args):
    d = setup_distributed()
    args.limit = max(2, args.batch_size)
    env = environment(d.device) | {
        "world_size": d.world_size,
        "local_world_size": d.local_world_size,
    }
    env |= {"backend": d.backend, "seed": args.seed}

    if d.world_size > 1:
        for size in SIZES:
            seconds = all_reduce_seconds(size, d.device)
            if d.is_main:
                print(
                    (
                        f"all_reduce of {size:10} bytes between {d.world_size} processes: "
                        f"{1000 * seconds:10.3f} ms"
                    ),
                    flush=True,
                )
                write(args, env, bench="all_reduce", bytes=size, seconds=seconds)
    measured = step_parts(args, d)
    if d.is_main:
        buckets = ", ".join(f"{size / 2**20:.1f}" for size in measured["bucket_bytes"])
        whole, compute = 1000 * measured["seconds"], 1000 * measured["compute_seconds"]
        print(
            f"training step: {whole:.1f} ms, without communication {compute:.1f} ms; "
            f"buckets of {buckets} MiB"
        )
        write(args, env, bench="step", **measured)


def all_reduce_seconds(size, device):
    """Return the median seconds of an all_reduce of `size` bytes.

    All ranks start each all_reduce together.
    """
    tensor = torch.ones(size // 4, device=device)
    times = []
    for k in range(WARMUP + STEPS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        if k >= WARMUP:
            times.append(time.perf_counter() - begin)
        tensor.fill_(1)  # otherwise the sums grow to infinity
    return statistics.median(times)


def step_parts(args, d):
    """Measure a training step with and without communication, and when each bucket of gradients is
    ready.

    The two kinds of step take turns. Before each time is taken, the device is synchronised, because
    a GPU works asynchronously.

    Returns:
        dict of seconds, compute_seconds, ready_seconds and bucket_bytes; the times are medians.
    """
    train_set, _ = build_datasets(args)
    normalize = build_transforms(train_set, args, d.device)[1]
    images, targets = first_batch(args, train_set)
    images = normalize(images.to(d.device))
    targets = targets.to(d.device)

    marks, buckets = [], []

    def mark():
        synchronize(d.device)
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

    communicating = build_step(args, train_set, d.device, DistributedDataParallel)
    silent = build_step(args, train_set, d.device, without_communication)
    whole, parts = [], []
    for k in range(WARMUP + STEPS):
        for step, times in ((communicating, whole), (silent, parts)):
            dist.barrier()
            del marks[:], buckets[:]
            mark()
            step(images, targets)
            mark()
            if k >= WARMUP:
                times.append([t - marks[0] for t in marks[1:]])
    *ready, total = (statistics.median(times) for times in zip(*parts, strict=True))
    return {
        "seconds": statistics.median(times[-1] for times in whole),
        "compute_seconds": total,
        "ready_seconds": ready,
        "bucket_bytes": list(buckets),
    }


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__))
