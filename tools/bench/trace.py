"""Record a profiler trace of one DDP training step: when it computes, and when it sends gradients.

    torchrun --nproc-per-node=2 tools/bench/trace.py

Writes trace.json on rank 0, which https://ui.perfetto.dev shows. Without GPUs, it also prints how
much of the communication the backward pass hides, and --log-file appends the times to a file, which
tools/book/pictures.py draws.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.distributed import cleaned_up, setup_distributed
from common.errors import one_line_errors
from common.flags import output_file, whole_number
from common.records import environment
from common.report import synchronize
from tools.records import append

PARTS = ("forward", "backward", "optimizer")
WARMUP = 3


def train_step(ddp, optimizer, images, targets):
    """Make one training step whose parts have names in the trace."""
    with record_function("forward"):
        loss = torch.nn.functional.cross_entropy(ddp(images), targets)
    optimizer.zero_grad()
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()


def spans(events):
    """Return {part: its times [begin, end], in ms from the start of the forward pass}, with the
    part "all_reduce".

    The backward pass ends with its last operation: loss.backward() then waits for the all-reduces
    that are not done.
    """
    found = {name: [] for name in (*PARTS, "all_reduce")}
    operations = []
    for event in events:
        if event.name in PARTS:
            found[event.name].append(event.time_range)
        elif event.name == "gloo:all_reduce":
            found["all_reduce"].append(event.time_range)
        elif event.name.startswith("autograd::engine::evaluate_function"):
            operations.append(event.time_range.end)
    start = found["forward"][0].start
    times = {
        name: sorted([(time.start - start) / 1000, (time.end - start) / 1000] for time in ranges)
        for name, ranges in found.items()
    }
    times["backward"][0][1] = (max(operations) - start) / 1000
    return times


def hidden_share(found):
    """Return the share of the all-reduces' time in which the backward pass computes."""
    begin, end = found["backward"][0]
    hidden = sum(max(0, min(b, end) - max(a, begin)) for a, b in found["all_reduce"])
    return hidden / sum(b - a for a, b in found["all_reduce"])


@cleaned_up()
def main(args):
    import torchvision

    d = setup_distributed()
    model = torchvision.models.resnet18(num_classes=10).to(d.device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(args.batch_size, 3, 64, 64, device=d.device)
    targets = torch.randint(10, (args.batch_size,), device=d.device)
    for _ in range(WARMUP):
        train_step(ddp, optimizer, batch, targets)
    synchronize(d.device)
    dist.barrier()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (d.device.type == "cuda")
    with profile(activities=activities) as profiler:
        train_step(ddp, optimizer, batch, targets)
        synchronize(d.device)
    if d.is_main:
        profiler.export_chrome_trace(args.trace)
    # the operations of a GPU run later than the CPU starts them
    if d.is_main and d.device.type == "cpu":
        found = spans(profiler.events())
        for name, times in found.items():
            print(f"{name:10} " + ", ".join(f"{begin:.0f} to {end:.0f} ms" for begin, end in times))
        print(
            f"{hidden_share(found):.0%} of the all-reduces' time is hidden behind the "
            f"backward pass | {args.trace}"
        )
        record = {"world_size": d.world_size, "batch_size": args.batch_size, "spans": found}
        append(args.log_file, record | environment(d.device))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--trace", default="trace.json", metavar="FILE", help="where to write the trace"
    )
    parser.add_argument(
        "--batch-size", type=whole_number(1), default=8, metavar="N", help="images per process"
    )
    parser.add_argument(
        "--log-file",
        type=output_file,
        metavar="FILE",
        help="append the times to FILE as a JSON line",
    )
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
