"""Measure the DDP classes and the sharded optimizer of the exercises, beside torch's DDP.

    torchrun --nnodes=1 --nproc-per-node=2 tools/bench/my_ddp.py --batch-size 32

The variants take turns training step by training step, every second time in reverse order. Their
classes are those of the solutions, unchanged, with buckets as large as those of torch's DDP. All
use SGD with momentum. For each variant, the table shows

    ms per step    the slowest rank counts; median (range) of --repeats medians
    exposed        communication for which the ranks wait, as a fraction of the training step: what
                   is saved if each rank trains alone. On CPUs, this includes the work of sending
    messages       collectives per training step
    MB sent        by a rank per training step, from the sizes of the collectives: with a ring of
                   N ranks, (N - 1) / N of the size, and twice this for an all-reduce
    state          bytes of optimizer state, of each rank

torch's DDP also broadcasts the statistics of batch norm, which the solutions do not. This benchmark
has not run on a GPU yet.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets
from common.errors import UserError
from common.models import build_model
from common.setup_distributed import cleaned_up, setup_distributed
from ddp.errors import one_line_errors
from exercises import patch
from exercises.texts import FOLDERS
from tools.bench.measure import WARMUP, fields, first_batch, parse_args, step_seconds
from tools.bench.memory import Watch
from tools.records import append, group, spread

BUCKET_SIZE = 25 * 2**20  # bytes: the default of torch's DDP
ALONE = "no communication"
TORCHS = "torch's DDP"
HEAD = (
    "variant",
    "ms per step, median (range)",
    "divided by torch's DDP",
    "exposed communication",
    "messages",
    "MB sent",
    "state, MB per rank",
)


class Variant(NamedTuple):
    """How to train a model."""

    wrap: Callable = lambda model: model
    finish: str = ""  # the method to call after the backward pass; torch's DDP has none
    optimizer: Callable = torch.optim.SGD


def variants():
    """Return {name: Variant}. A number is the number of a solution."""
    return {
        ALONE: Variant(),
        "19: after the backward pass": Variant(solution(19)["MyDDP"], "average_gradients"),
        "20: gradient by gradient": Variant(solution(20)["MyDDP"], "finish_gradients"),
        "21: in buckets": Variant(solution(21)["MyDDP"], "finish_gradients"),
        TORCHS: Variant(DistributedDataParallel),
        "22: torch's DDP, sharded SGD": Variant(
            DistributedDataParallel, optimizer=solution(22)["ShardedSGD"]
        ),
    }


def solution(number):
    """Return {name: value} of what a solution defines before it starts to train."""
    program = FOLDERS[number] / "program.py"
    solved = patch.apply((FOLDERS[number] / "solution.patch").read_text(), program.read_text())
    definitions, _ = solved.split("\ndist.init_process_group(")
    defined = {}
    exec(compile(definitions, program, "exec"), defined)
    if "BUCKET_SIZE" in defined:
        defined["BUCKET_SIZE"] = BUCKET_SIZE  # that of the exercise is for a much smaller model
    return defined


@cleaned_up()
def main(args):
    d = setup_distributed()
    if d.world_size < 2:
        raise UserError(
            "1 process given, expected two or more: "
            "torchrun --nnodes=1 --nproc-per-node=2 tools/bench/my_ddp.py"
        )
    args.limit = max(2, args.batch_size)
    train_set, _ = build_datasets(args)
    batch = first_batch(args, train_set, d.device)

    steps = {}
    counted = {}  # what is the same in each training step
    for name, variant in variants().items():
        step, optimizer = build_step(args, train_set, d.device, variant)
        for _ in range(WARMUP):
            step(*batch)
        with Watch() as watch:
            watch.is_counting = True
            step(*batch)
        counted[name] = {
            "messages": len(watch.messages),
            "sent_bytes": round(sum(size for _, size in watch.messages)),
            "state_bytes": of_all_ranks(state_bytes(optimizer)),
        }
        steps[name] = functools.partial(slowest, step, batch)
    known = fields(args, d.device) | {"world_size": d.world_size, "backend": d.backend}
    records = []
    for repeat in range(args.repeats):
        for name, seconds in step_seconds(steps, d.device).items():
            record = {"variant": name, "seed": args.seed, "repeat": repeat, **counted[name]}
            records.append(record | {"seconds_per_step": seconds})
    if d.is_main:
        for record in records:
            append(args.log_file, known | {"bench": "my_ddp"} | record)
        show(rows(records))


def build_step(args, train_set, device, variant):
    """Return a function that runs one training step of a variant, and its optimizer."""
    torch.manual_seed(args.seed)
    model = variant.wrap(build_model(args, train_set).to(device))
    optimizer = variant.optimizer(model.parameters(), lr=args.lr, momentum=0.9)

    def step(images, targets):
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        if variant.finish:
            getattr(model, variant.finish)()
        optimizer.step()

    return step, optimizer


def state_bytes(optimizer):
    """Return the bytes of momentum that this rank holds."""
    sgd = getattr(optimizer, "optimizer", optimizer)  # the sharded optimizer holds one
    return sum(state["momentum_buffer"].nbytes for state in sgd.state.values())


def of_all_ranks(value):
    """Return the values of all ranks, in a list."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(step, batch):
    """Run a training step until the slowest rank has ended it."""
    step(*batch)
    dist.barrier()


def rows(records):
    """Return the rows of the table below HEAD. Ratios are those of the same repeat."""
    variants = group(records, "variant")
    seconds = {name: [r["seconds_per_step"] for r in same] for name, same in variants.items()}
    table = []
    for name, same in variants.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[TORCHS], strict=True)]
        exposed = [1 - a / b for a, b in zip(seconds[ALONE], seconds[name], strict=True)]
        cells = (
            name,
            spread([1000 * s for s in seconds[name]], ".0f"),
            spread(ratios, ".2f"),
            spread(exposed, ".2f") if name != ALONE else "",
            same[0]["messages"],
            f"{same[0]['sent_bytes'] / 1e6:.1f}",
            " + ".join(f"{size / 1e6:.1f}" for size in same[0]["state_bytes"]),
        )
        table.append(cells)
    return table


def show(table):
    """Print the table, with each column as wide as its widest cell."""
    lines = [HEAD, *table]
    widths = [max(len(str(cell)) for cell in column) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([f"{first:{widths[0]}}", *cells]))


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__))
