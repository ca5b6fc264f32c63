"""Seconds of all_reduce by size, and of a training step and its parts; under torchrun, for as many processes
as that starts. What notebooks/scaling.ipynb fits its model to.

    torchrun --nnodes=1 --nproc-per-node=2 tools/bench/scaling.py --batch-size 64
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
from common.report import environment, synchronize
from tools.bench.measure import build_step, parse_args, write

SIZES = [2**k for k in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB
STEPS, WARMUP = 10, 3


@cleaned_up()
def main(args):
    d = setup_distributed()
    args.limit = max(2, args.batch_size)
    env = environment(d.device) | {"world_size": d.world_size, "local_world_size": d.local_world_size}
    env |= {"backend": d.backend, "seed": args.seed}

    if d.world_size > 1:
        for size in SIZES:
            seconds = all_reduce_seconds(size, d.device)
            if d.is_main:
                print(f"all_reduce of {size:10} bytes between {d.world_size}: {1000 * seconds:10.3f} ms", flush=True)
                write(args, env, bench="all_reduce", bytes=size, seconds=seconds)
    measured = step_parts(args, d)
    if d.is_main:
        buckets = ", ".join(f"{size / 2**20:.1f}" for size in measured["bucket_bytes"])
        print(
            f"step: {1000 * measured['seconds']:.1f} ms, without sending {1000 * measured['compute_seconds']:.1f} ms; "
            f"buckets of {buckets} MiB"
        )
        write(args, env, bench="step", **measured)


def all_reduce_seconds(size, device):
    """The median of some all_reduces of `size` bytes, each begun by all ranks together."""
    tensor, times = torch.ones(size // 4, device=device), []
    for k in range(WARMUP + STEPS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        if k >= WARMUP:
            times.append(time.perf_counter() - begin)
        tensor.fill_(1)  # or the sums grow to infinity
    return statistics.median(times)


def step_parts(args, d):
    """Medians of a step that sends its gradients, of one that does not, and of when in it each bucket was ready.

    The two kinds of step take turns. What the CPU sees is what is timed: on a GPU, where it only hands work on,
    the device is synchronised at every mark.
    """
    train_set, _ = build_datasets(args)
    normalize = build_transforms(train_set, args, d.device)[1]
    images, targets = train_set.__getitems__([i % len(train_set) for i in range(args.batch_size)])
    images, targets = normalize(images.to(d.device)), targets.to(d.device)

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

    def keep_apart(net):
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, send_nothing)
        return ddp

    sending = build_step(args, train_set, d.device, DistributedDataParallel)
    quiet = build_step(args, train_set, d.device, keep_apart)
    whole, parts = [], []
    for k in range(WARMUP + STEPS):
        for step, times in ((sending, whole), (quiet, parts)):
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
