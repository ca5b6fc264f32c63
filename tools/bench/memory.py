"""Measure memory, bytes sent and speed of DDP, ZeroRedundancyOptimizer and FSDP.

    python tools/bench/memory.py --arch vit_b_32 --batch-size 8
    python tools/bench/memory.py --arch resnet18 --image-size 32 --batch-size 64

Each variant is a launch of its own with torchrun; the variants take turns, --repeats times, every
second time in reverse order. Rank 0 measures:

    held       bytes between two training steps: weights, gradients, optimizer state, and the rest,
               which are DDP's buckets, the images, and the statistics of batch norm
    peak       the most bytes of tensors at a moment of a training step. On CPUs this leaves out
               what an operation allocates and frees inside, as oneDNN does in a convolution, and
               the copies that gloo sends; on GPUs it is torch.cuda.max_memory_allocated()
    computed   the same peak, computed by tools/fit.py
    sent       bytes that a rank sends per training step, from the sizes of the collectives: with a
               ring of N ranks, (N - 1) / N of the size, and twice this for an all-reduce
    images/s   of all processes together; on CPUs, they share the cores

The training step is that of 03, with SGD and momentum in float32. Images are random numbers. The
last line compares the measured with the computed peak.
"""

import argparse
import collections
import functools
import json
import os
import statistics
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.flags import Parser, output_file, whole_number
from common.records import environment
from common.report import synchronize
from common.setup_distributed import cleaned_up, setup_distributed
from ddp.errors import one_line_errors
from fsdp import sharded
from tools import fit
from tools.bench.measure import pick_device, run_ranks
from tools.planning.layers import build as build_model
from tools.records import append

SETTLED = 2  # training steps until optimizer state and buckets are allocated
CLASSES = 1000


def variants(counts):
    """Return {name: (number of processes, fit.Setting)}: one process, a few, and the most.

    With one process only, there is nothing to divide or to send, but DDP still copies gradients
    into buckets, and FSDP the weights of a block.
    """
    few = min((n for n in counts if n > 1), default=1)
    most = max(counts)
    rows = [
        (1, fit.Setting("1 process", "plain")),
        (few, fit.Setting("DDP", "ddp", few)),
        (few, fit.Setting("DDP, checkpointing", "ddp", few, checkpointed=True)),
        (few, fit.Setting("DDP, ZeroRedundancyOptimizer", "zero1", few)),
        (few, fit.Setting("FSDP, no resharding", "fsdp", few, reshard=False)),
        (few, fit.Setting("FSDP", "fsdp", few)),
        (few, fit.Setting("FSDP, checkpointing", "fsdp", few, checkpointed=True)),
    ]
    if few == 1:
        del rows[2:5]  # like DDP, and like FSDP
    if most > few:
        rows.append((most, fit.Setting("FSDP", "fsdp", most)))
    if most > few and most % 2 == 0:
        rows.append((most, fit.Setting(f"HSDP {most // 2} x 2", "fsdp", 2)))
    return {row[1].name if row[0] == 1 else f"{row[1].name}, {row[0]} ranks": row for row in rows}


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--arch", default="vit_b_32", metavar="NAME", help="a torchvision model")
    add("--image-size", type=whole_number(1), default=224, metavar="N", help="pixels per side")
    add("--batch-size", type=whole_number(2), default=8, metavar="N", help="images per process")
    gpus = torch.cuda.device_count()
    counts = sorted({n for n in (1, 2, gpus) if n <= gpus}) if gpus else [1, 2, 4]
    processes = {"nargs": "+", "type": whole_number(1), "default": counts, "metavar": "N"}
    add("--processes", **processes, help="1, and numbers of processes; on GPUs, each needs its own")
    add("--steps", type=whole_number(1), default=3, metavar="N", help="training steps to time")
    add("--repeats", type=whole_number(1), default=1, metavar="N", help="launches per variant")
    add("--seed", type=whole_number(0), default=0, metavar="N", help="for weights; odd: reversed")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per launch")
    add("--inside", help=argparse.SUPPRESS)  # the variant, in one of the measured processes
    return parser.parse_args()


def main(args):
    if args.inside:
        _, setting = variants(args.processes)[args.inside]
        measure(args, setting)
        return
    env = environment(pick_device())
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | {args.arch}, "
        f"{args.batch_size} images per process",
        flush=True,
    )
    model = fit.count_arch(args.arch, args.image_size, args.batch_size)
    first = {}  # {variant: its first record}
    for repeat in range(args.seed, args.seed + args.repeats):
        in_order = list(enumerate(variants(args.processes).items()))
        for row, (name, (processes, setting)) in in_order[:: -1 if repeat % 2 else 1]:
            record = {"bench": "memory", "model": args.arch, "image_size": args.image_size}
            record |= {"batch_size": args.batch_size, "seed": args.seed, "repeat": repeat}
            record |= {"row": row, "variant": name}
            record |= {"world_size": processes, **setting._asdict()}
            flags = [*sys.argv[1:], "--inside", name]
            threads = os.environ.get("OMP_NUM_THREADS", 1)
            record |= run_ranks(f"{name}: torchrun", processes, threads, __file__, *flags)
            foreach = env["device"] != "cpu"  # torch's default
            computed = fit.peak(model, setting, "momentum", foreach)
            record |= {"computed_peak_bytes": round(computed.total)}
            append(args.log_file, env | record)
            print(
                f"   run {repeat + 1}: {name:38} peak {record['peak_bytes'] / 1e6:7.0f} MB, "
                f"computed {computed.total / 1e6:7.0f} MB, sent {record['sent_bytes'] / 1e6:6.0f} "
                f"MB, {record['images_per_second']:7.1f} img/s",
                flush=True,
            )
            first.setdefault(name, record)
    peaks = [
        f"{record['variant']} {record['peak_bytes'] / 1e6:.0f} MB "
        f"({100 * (record['computed_peak_bytes'] / record['peak_bytes'] - 1):+.1f} %)"
        for record in sorted(first.values(), key=lambda record: record["row"])
        if record["name"] in ("DDP", "FSDP")
    ]
    print(f"peak, and how far the computed peak is off: {', '.join(peaks)}")


# One variant


class Watch(TorchDispatchMode):
    """While entered, add up the bytes of the tensors that exist, and the bytes that are sent.

    It sees every operation of torch and the tensors that it returns, but not what an operation
    allocates and frees inside. A storage counts once, however many tensors use it.
    """

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()
        self.peak = 0
        self.messages = []  # (collective, bytes) of each
        self.is_counting = False  # adding up takes time, so only in the measured training step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls us again for the tensors that this rank holds
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.storages.add(tensor.untyped_storage())
        if self.is_counting:
            self.peak = max(self.peak, self.now())
            self.messages += bytes_sent(func, args)
        return result

    def now(self):
        """Return the bytes of all storages that exist now. FSDP resizes storages."""
        return sum(storage.nbytes() for storage in self.storages)


# Of the operation of each collective: its name, the index of the argument that holds the full
# tensors, the index of the process group, and how often the tensors go around the ring.
COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0, 1, 2),
    "c10d::broadcast_": ("broadcast", 0, 1, 1),
    "c10d::_allgather_base_": ("all_gather", 0, 2, 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2, 1),
}


def bytes_sent(func, args):
    """Return [(collective, bytes that a rank sends with a ring)], empty for other operations."""
    if func.name() not in COLLECTIVES:
        return []
    name, tensors, group, rounds = COLLECTIVES[func.name()]
    full = tree_leaves(args[tensors])
    size = sum(tensor.numel() * tensor.element_size() for tensor in full)
    ranks = dist.ProcessGroup.unbox(args[group]).size()
    return [(name, size * rounds * (ranks - 1) / ranks)]


@cleaned_up()
def measure(args, setting):
    """Build one variant and train for a few steps. Rank 0 prints what it measured as JSON."""
    d = setup_distributed()
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    with Watch() as watch:
        torch.manual_seed(args.seed)
        images = torch.randn(shape, device=d.device)
        targets = torch.randint(CLASSES, (args.batch_size,), device=d.device)
        model, optimizer = build(args, setting, d)
        step = functools.partial(training_step, model, optimizer, images, targets)
        for _ in range(SETTLED):
            step()
        if d.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        watch.is_counting = True
        step()
        watch.is_counting = False
    peak, now = watch.peak, watch.now()
    if d.device.type == "cuda":
        peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    seconds = []
    for _ in range(args.steps):
        dist.barrier()
        synchronize(d.device)
        begin = time.perf_counter()
        step()
        dist.barrier()  # the slowest rank counts
        synchronize(d.device)
        seconds.append(time.perf_counter() - begin)
    held = held_bytes(model, optimizer)
    held["other"] = now - sum(held.values())
    sent = collections.Counter()  # {collective: bytes}
    for name, size in watch.messages:
        sent[name] += size
    if d.is_main:
        measured = {
            "peak_bytes": peak,
            "held_bytes": held,
            "sent_bytes": round(sent.total()),
            "sent_by_collective": {name: round(size) for name, size in sent.items()},
            "seconds_per_step": statistics.median(seconds),
            "images_per_second": d.world_size * args.batch_size / statistics.median(seconds),
        }
        print(json.dumps(measured))


def held_bytes(model, optimizer):
    """Return {kind: bytes} of what this rank holds between two training steps."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim  # holds the state of this rank's tensors
    weights = list(model.parameters())
    state = tree_leaves([list(values.values()) for values in optimizer.state.values()])
    tensors = {
        "weights": weights,
        "gradients": [weight.grad for weight in weights],
        "optimizer": [value for value in state if isinstance(value, torch.Tensor)],
    }
    return {name: sum(map(sharded.local_bytes, parts)) for name, parts in tensors.items()}


def build(args, setting, d):
    """Return the model and the optimizer of a variant."""
    model = build_model(args.arch, args.image_size).to(d.device)
    if setting.checkpointed:
        model = sharded.checkpoint_activations(model)
    if setting.way in ("ddp", "zero1"):
        model = DistributedDataParallel(model)
    elif setting.way == "fsdp":
        shape = (d.world_size // setting.shards, setting.shards)
        mesh = init_device_mesh(d.device.type, shape, mesh_dim_names=("copies", "shards"))
        for module in [*sharded.blocks(model), model]:
            fully_shard(module, mesh=mesh)
        model.set_reshard_after_forward(setting.reshard)
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    if setting.way == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), SGD, **options)
    return model, SGD(model.parameters(), **options)


def training_step(model, optimizer, images, targets):
    """Run a training step in the order of 03."""
    loss = nn.functional.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
