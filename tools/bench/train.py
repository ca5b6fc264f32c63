"""Compare 06 with the bare training step. Each run is a process of its own; they run in turn,
--repeats times:
    bare          forward, backward and optimizer step, always on the same batch
    dummy         06_imagenet.py --dummy: all of the script except reading images
    example       a loop as PyTorch's ImageNet example has it: float32, one batch in pinned memory,
                  loss and accuracy read in each step; only if --runs names it
    example-amp   the same with --amp
Ratios compare runs that follow each other.

    python tools/bench/train.py --runs bare dummy example example-amp --arch resnet50 --amp bf16
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import one_line_errors
from common.flags import Parser
from common.records import peak_memory
from imagenet.flags import (
    AMP_DTYPES,
    add_machine_flags,
    check_machine_flags,
    output_file,
    whole_number,
)
from imagenet.model import build_model
from tools.bench.measure import (
    ROOT,
    fields,
    pick_device,
    run_alone,
    show,
    summary,
    take_turns,
    timed,
)
from tools.records import group, ratios

RUNS = ("bare", "dummy")
EXAMPLES = ("example", "example-amp")


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--arch", default="resnet18", metavar="NAME", help="see 06_imagenet.py --help")
    add("--batch-size", type=whole_number(1), default=256, metavar="N", help="images per step")
    add("--image-size", type=whole_number(16), default=224, metavar="N", help="pixels per side")
    add("--steps", type=whole_number(20), default=40, metavar="N", help="steps of each run")
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="runs of each kind")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per run to FILE")
    text = "the kinds of runs (default: bare and dummy)"
    add("--runs", nargs="+", default=RUNS, choices=(*RUNS, *EXAMPLES), metavar="RUN", help=text)
    add("--inside", choices=("bare", *EXAMPLES), help=argparse.SUPPRESS)  # run it in this process
    add_machine_flags(parser)
    args = parser.parse_args()
    check_machine_flags(parser, args)
    return args


def main(args):
    if args.inside:
        step = (bare_step if args.inside == "bare" else example_step)(args)
        batch = batch_of(args)
        speed = timed([batch] * args.steps, step, pick_device())
        memory = round(peak_memory() / 2**20)
        print(json.dumps({"images_per_second": speed, "peak_memory_mib": memory}))
        return
    names = ("batch_size", "amp", "channels_last", "compile", "image_size", "steps")
    known = fields(args, pick_device(), *names) | {"bench": "train"}
    records = take_turns(
        args,
        known,
        args.runs,
        run=lambda name: [run_one(name, args)],
        line=lambda run: f"{run['run']:12} {run['images_per_second']:9.1f} img/s",
    )
    runs = group(records, "run")
    first = next(iter(runs))
    show(runs, f"{first} = 1", {name: ratios(same, runs[first]) for name, same in runs.items()})
    if "dummy" in runs:
        plain = {name: same for name, same in runs.items() if name in ("bare", *EXAMPLES)}
        print(summary("06", runs["dummy"], plain))


def run_one(name, args):
    """Run one loop in its own process, and return its record."""
    shared = ["--arch", args.arch, "--batch-size", args.batch_size, "--amp", args.amp]
    shared += ["--image-size", args.image_size]
    shared += ["--channels-last"] * args.channels_last + ["--compile"] * args.compile

    def command(folder):
        if name in ("bare", *EXAMPLES):
            inside = ["--inside", name, "--steps", args.steps]
            return [ROOT / "tools/bench/train.py", *inside, *shared]
        outputs = ["--log-file", folder / "log.jsonl", "--checkpoints-path", folder / "checkpoints"]
        script = [ROOT / "06_imagenet.py", *shared, "--eval-every", 0, "--checkpoint-every", 10**6]
        images = ["--dummy", args.steps * args.batch_size, "--epochs", 1, "--workers", 0]
        return [*script, *outputs, *images]

    records, _ = run_alone(f"the run {name!r}", command)
    measured = {key: records[-1][key] for key in ("images_per_second", "peak_memory_mib")}
    return {"run": name} | measured


def bare_step(args):
    """Return the training step of 06 alone: a function of (images, targets)."""
    device = pick_device()
    torch.backends.cudnn.benchmark = True
    model = model_of(args, device)
    if args.compile:
        model.compile()
    criterion = nn.CrossEntropyLoss()
    settings = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-5}
    fused = device.type != "cpu"  # as in 06
    optimizer = torch.optim.SGD(model.parameters(), fused=fused, **settings)
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    def step(images, targets):
        optimizer.zero_grad()
        with autocast:
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def example_step(args):
    """Return a training step as PyTorch's ImageNet example has it (pytorch/examples,
    imagenet/main.py): a function of (images, targets), which are in pinned memory.
    """
    device = pick_device()
    args.channels_last = False
    args.amp = args.amp if args.inside == "example-amp" else "none"
    model = model_of(args, device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def step(images, targets):
        images = images.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        with torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none"):
            outputs = model(images)
            loss = criterion(outputs, targets)
        right = outputs.topk(5).indices == targets[:, None]
        _ = loss.item(), right[:, 0].float().mean().item(), right.float().sum(1).mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def model_of(args, device):
    """Return the model of 06, on the device."""
    torch.manual_seed(0)
    args.deterministic = False  # as in the run of 06
    size = (args.image_size, args.image_size)
    dataset = SimpleNamespace(channels=3, image_size=size, num_classes=1000)
    return build_model(args, dataset).to(device)


def batch_of(args):
    """Return random images (N, 3, size, size) and targets (N,): for the bare step on the device,
    else in pinned memory.
    """
    device = pick_device()
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    targets = torch.randint(1000, (args.batch_size,))
    if args.inside == "bare":
        layout = torch.channels_last if args.channels_last else torch.contiguous_format
        return images.to(device, memory_format=layout), targets.to(device)
    if device.type == "cpu":
        return images, targets
    return images.pin_memory(), targets.pin_memory()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
