"""Measure what a checkpoint costs: one file beside shards, written at once or in the background.

    torchrun --nproc-per-node=2 tools/bench/checkpoint.py --arch resnet50

The model has the optimizer state of a training with momentum. Four ways to save it take turns:

    06           one file with a checksum, written by rank 0 in the background; every rank has the
                 whole model, as with DDP
    gathered     one file, written by rank 0, which first collects the shards of all ranks
    shards       torch.distributed.checkpoint.save: every rank writes its shards, as in 07
    async        torch.distributed.checkpoint.async_save: the same in the background

`waits` is the time after which training can continue, `complete` until the checkpoint is on the
disk. Every file is synchronized with the disk.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torchvision.models import get_model

from common import sharded
from common.distributed import setup_distributed
from common.errors import one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from imagenet.checkpoint import Checkpoints
from tools.records import append


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--arch", default="resnet50", metavar="NAME", help="a model of torchvision")
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="number of saves per way")
    add("--folder", metavar="DIR", help="where to save; without it, a temporary folder")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per way to FILE")
    return parser.parse_args()


def trained(args, device, shard):
    """Return a model and its optimizer after one training step, so that the optimizer has state."""
    torch.manual_seed(0)
    model = get_model(args.arch).to(device)
    if shard:
        for module in [*sharded.blocks(model), model]:
            fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model(torch.randn(2, 3, 224, 224, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer, **options):
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": state, "step": 1}


class Ways:
    """The ways to save. Each is a method (folder) -> function that waits until it is complete."""

    def __init__(self, args, d):
        self.rank = d.rank
        self.d = d
        self.group = dist.new_group(backend="gloo")  # of the background's messages
        self.whole = trained(args, d.device, shard=False)
        self.sharded = trained(args, d.device, shard=True)

    def as_06(self, folder):
        model, optimizer = self.whole
        checkpoints = Checkpoints(folder, self.d, self.group, keep=1, patience=600)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        checkpoints.save(state)
        return checkpoints.finish

    def gathered(self, folder):
        state = state_of(*self.sharded, full_state_dict=True, cpu_offload=True)
        if self.rank == 0:
            path = f"{folder}/whole.pt"
            torch.save(state, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        dist.barrier()
        return lambda: None

    def shards(self, folder):
        dcp.save(state_of(*self.sharded), checkpoint_id=folder)
        return lambda: None

    def in_background(self, folder):
        future = dcp.async_save(
            state_of(*self.sharded), checkpoint_id=folder, process_group=self.group
        )
        return future.result


def measure(way, folder):
    """Return (seconds until training can continue, seconds until the checkpoint is complete)."""
    dist.barrier()
    start = time.perf_counter()
    finish = way(folder)
    waits = time.perf_counter() - start
    finish()
    dist.barrier()  # complete means on every rank
    return waits, time.perf_counter() - start


@one_line_errors()
def main(args):
    d = setup_distributed()
    env = environment(d.device) | {"world_size": d.world_size, "model": args.arch}
    ways = Ways(args, d)
    methods = {
        "06": ways.as_06,
        "gathered": ways.gathered,
        "shards": ways.shards,
        "async": ways.in_background,
    }
    seconds = {name: [] for name in methods}
    sizes = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as base:
        bases = [base]
        dist.broadcast_object_list(bases)  # the folder of rank 0
        for repeat in range(args.repeats + 1):  # the first one warms up
            for name, way in methods.items():
                folder = f"{bases[0]}/{name}-{repeat}"
                if d.is_main:
                    os.mkdir(folder)
                times = measure(way, folder)
                files = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
                sizes[name] = sum(files), len(files)
                dist.barrier()  # all have looked
                if d.is_main:
                    shutil.rmtree(folder)
                if repeat:
                    seconds[name].append(times)
        dist.barrier()  # rank 0 deletes its folder last
    if d.is_main:
        show(args, env, seconds, sizes)
    dist.destroy_process_group()


def show(args, env, seconds, sizes):
    """Print one line per way, with ratios to 06, and append the records."""
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in seconds.items()
    }
    print(f"{args.arch} on {env['world_size']} ranks, {args.repeats} saves of each")
    print(f"{'way':10} {'waits':>9} {'to 06':>6} {'complete':>9} {'to 06':>6} {'MB':>7} files")
    for name, (waits, complete) in medians.items():
        size, files = sizes[name]
        print(
            f"{name:10} {waits:7.2f} s {waits / medians['06'][0]:6.2f} {complete:7.2f} s "
            f"{complete / medians['06'][1]:6.2f} {size / 1e6:7.1f} {files:5}"
        )
        record = {"bench": "checkpoint", "way": name, "bytes": size, "files": files}
        record |= {"repeats": args.repeats, "folder": args.folder}
        record |= {
            "waits_seconds": [round(times[0], 4) for times in seconds[name]],
            "complete_seconds": [round(times[1], 4) for times in seconds[name]],
        }
        append(args.log_file, env | record)


if __name__ == "__main__":
    main(parse_args())
