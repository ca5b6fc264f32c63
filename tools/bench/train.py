"""Compare 06 with the bare training step. Each run is a process of its own; they run in turn,
--repeats times:
    bare          forward, backward and optimizer step, always on the same batch
    dummy         06_imagenet.py --dummy: all of the script except reading images
    checkpoints   the same, with a checkpoint every --every steps
    files         06_imagenet.py on the photographs of --data-dir
    example       a loop as PyTorch's ImageNet example has it: float32, one batch in pinned memory,
                  loss and accuracy read in each step; only if --runs names it
    example-amp   the same with --amp
Ratios compare runs that follow each other. The cost of a checkpoint is what it adds to the run, for
one checkpoint every 100 steps. At the end: the loader alone with one worker, compared with PIL
images transformed one by one.

    python tools/bench/train.py --data-dir data/imagenet-mini --batch-size 32 --image-size 224
    python tools/bench/train.py --runs bare dummy example example-amp --arch resnet50 --amp bf16
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import UserError, one_line_errors
from common.images import MEAN, STD
from common.records import environment, peak_memory
from common.report import synchronize, warmup_steps
from imagenet.datasets import Images
from imagenet.flags import (
    AMP_DTYPES,
    Parser,
    add_machine_flags,
    check_machine_flags,
    output_file,
    whole_number,
)
from imagenet.loader import build_loader
from imagenet.model import build_model
from imagenet.sampler import GlobalBatchSampler
from tools.bench.measure import ROOT, pick_device
from tools.records import append, checkpoint_cost, ratios, spread

RUNS = ("bare", "dummy", "checkpoints", "files")
EXAMPLES = ("example", "example-amp")


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--data-dir",
        default="data",
        metavar="DIR",
        help="photographs, as train/CLASS/*.jpg; without them no files run",
    )
    add("--arch", default="resnet18", metavar="NAME", help="see 06_imagenet.py --help")
    add("--batch-size", type=whole_number(1), default=256, metavar="N", help="images per step")
    add("--image-size", type=whole_number(16), default=224, metavar="N", help="pixels per side")
    add(
        "--workers",
        type=whole_number(0),
        metavar="N",
        help="loader processes of the files run; 2 if not given",
    )
    add("--steps", type=whole_number(20), default=40, metavar="N", help="steps of each run")
    add("--every", type=whole_number(1), default=10, metavar="N", help="steps between checkpoints")
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="runs of each kind")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per run to FILE")
    add(
        "--runs",
        nargs="+",
        choices=(*RUNS, *EXAMPLES),
        metavar="RUN",
        help="the kinds of runs (default: bare, dummy, checkpoints and, with photographs, files)",
    )
    add("--inside", choices=("bare", *EXAMPLES), help=argparse.SUPPRESS)  # run it in this process
    add_machine_flags(parser)
    args = parser.parse_args()
    check_machine_flags(parser, args)
    return args


def main(args):
    if args.inside:
        loop = bare_loop if args.inside == "bare" else example_loop
        speed = timed(loop(args), args)
        print(
            json.dumps(
                {"images_per_second": speed, "peak_memory_mib": round(peak_memory() / 2**20)}
            )
        )
        return
    env = environment(pick_device())
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | "
        f"{args.repeats} runs of each, in turn"
    )
    has_files = os.path.isdir(os.path.join(args.data_dir, "train"))
    names = args.runs or [name for name in RUNS if has_files or name != "files"]
    runs = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in runs:
            run = run_one(name, args)
            runs[name].append(run)
            write(args, env, run=name, repeat=repeat, **run)
            print(
                f"   run {repeat + 1}: {name:12} {run['images_per_second']:9.1f} img/s", flush=True
            )

    print(f"\n{'run':12} {'img/s, median (range)':>28} {'peak memory':>12}   {names[0]} = 1")
    for name, measured in runs.items():
        memory = max(run["peak_memory_mib"] for run in measured)
        speeds = [run["images_per_second"] for run in measured]
        ratio = spread(ratios(measured, runs[names[0]]), ".3f")
        print(f"{name:12} {spread(speeds, '.1f'):>28} {memory:8} MiB   {ratio}")
    if "checkpoints" in names and "dummy" in names:
        pairs = zip(runs["dummy"], runs["checkpoints"], strict=True)
        costs = [
            checkpoint_cost(*(run["images_per_second"] for run in pair), vars(args))
            for pair in pairs
        ]
        print(
            "a checkpoint every 100 steps costs "
            f"{spread([100 * cost for cost in costs], '.2f')} % of the time"
        )
    if "files" in names:
        compare_loaders(args, env)
    if "dummy" in names:
        speed = statistics.median(run["images_per_second"] for run in runs["dummy"])
        others = [
            f"{statistics.median(ratios(runs['dummy'], runs[name])):.2f} of {name}"
            for name in names
            if name in ("bare", *EXAMPLES)
        ]
        print(", ".join([f"06: {speed:.0f} img/s", *others]))


def work_of(name, args):
    """Return the flags of 06 that say what a run trains on, and how many workers load it."""
    if name != "files":
        return ["--dummy", args.steps * args.batch_size, "--epochs", 1, "--workers", 0]
    images = len(Images(os.path.join(args.data_dir, "train"), args.image_size))
    epochs = max(1, round(args.steps * args.batch_size / images))
    workers = 2 if args.workers is None else args.workers
    return [args.data_dir, "--epochs", epochs, "--workers", workers]


def run_one(name, args):
    """Run one loop in a process of its own. Return its images per second and its peak memory."""
    shared = ["--arch", args.arch, "--batch-size", args.batch_size, "--amp", args.amp]
    shared += ["--image-size", args.image_size]
    shared += ["--channels-last"] * args.channels_last + ["--compile"] * args.compile
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        if name in ("bare", *EXAMPLES):
            command = [ROOT / "tools/bench/train.py", "--inside", name, *shared]
            command += ["--steps", args.steps]
        else:
            command = [ROOT / "06_imagenet.py", *shared, "--eval-every", 0, "--log-file", log]
            command += ["--checkpoints-path", Path(folder, "checkpoints")]
            command += ["--checkpoint-every", args.every if name == "checkpoints" else 10**6]
            command += work_of(name, args)
        done = subprocess.run(
            [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise UserError(
                f"the run {name!r} ended with exit code {done.returncode}; its message is above"
            )
        last = (log.read_text() if log.exists() else done.stdout).splitlines()[-1]
    record = json.loads(last)
    return {key: record[key] for key in ("images_per_second", "peak_memory_mib")}


def bare_loop(args):
    """Repeat the step of 06 alone, on one batch that is on the device. Yields after each step."""
    device = pick_device()
    torch.backends.cudnn.benchmark = True
    model = model_of(args, device)
    if args.compile:
        model.compile()
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    images, targets = (tensor.to(device) for tensor in batch_of(args))
    images = images.to(memory_format=layout)
    criterion = nn.CrossEntropyLoss()
    settings = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-5}
    fused = device.type != "cpu"  # as in 06
    optimizer = torch.optim.SGD(model.parameters(), fused=fused, **settings)
    autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    while True:
        optimizer.zero_grad()
        with autocast:
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


def example_loop(args):
    """Train as PyTorch's ImageNet example does (pytorch/examples, imagenet/main.py), without its
    loader. Yields after each step.
    """
    device = pick_device()
    args.channels_last = False
    args.amp = args.amp if args.inside == "example-amp" else "none"
    model = model_of(args, device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    batch = batch_of(args)
    if device.type != "cpu":
        batch = [tensor.pin_memory() for tensor in batch]
    while True:
        images, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none"):
            outputs = model(images)
            loss = criterion(outputs, targets)
        right = outputs.topk(5).indices == targets[:, None]
        _ = loss.item(), right[:, 0].float().mean().item(), right.float().sum(1).mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def model_of(args, device):
    """Return the model of 06, on the device."""
    torch.manual_seed(0)
    args.deterministic = False  # as in the run of 06
    size = (args.image_size, args.image_size)
    dataset = SimpleNamespace(channels=3, image_size=size, num_classes=1000)
    return build_model(args, dataset).to(device)


def batch_of(args):
    """Return float images (N, 3, size, size) and int64 targets (N,), all random."""
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    return images, torch.randint(1000, (args.batch_size,))


def timed(loop, args):
    """Return the images per second of --steps steps. The first ones do not count."""
    device = pick_device()
    warmup = warmup_steps(args.steps)
    for _ in range(warmup):
        next(loop)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(args.steps - warmup):
        next(loop)
    synchronize(device)
    return (args.steps - warmup) * args.batch_size / (time.perf_counter() - begin)


def compare_loaders(args, env):
    """Print the speed of one loader worker, ours and the classic pipeline's, without training."""
    ours = Images(os.path.join(args.data_dir, "train"), args.image_size, seed=0)
    steps = max(1, min(len(ours), args.steps * args.batch_size) // args.batch_size)
    images = steps * args.batch_size
    mean, std = ([level / 255 for level in levels] for levels in (MEAN, STD))
    crop = [
        T.RandomResizedCrop(args.image_size),
        T.RandomHorizontalFlip(),
        T.ToTensor(),
        T.Normalize(mean, std),
    ]
    folder = torchvision.datasets.ImageFolder(os.path.join(args.data_dir, "train"), T.Compose(crop))
    batches = GlobalBatchSampler(images, args.batch_size, 0, 1)
    classic = DataLoader(
        Subset(folder, range(images)), args.batch_size, num_workers=1, persistent_workers=True
    )
    loaders = {
        "classic loader": classic,
        "our loader": build_loader(ours, batches, 1, torch.device("cpu")),
    }
    speeds = {name: [] for name in loaders}
    for repeat in range(args.repeats + 1):
        for name, loader in loaders.items():
            begin = time.perf_counter()
            done = sum(len(batch[1]) for batch in loader)
            if repeat > 0:  # the first pass starts the worker and fills the cache of files
                speeds[name].append(done / (time.perf_counter() - begin))
                speed = speeds[name][-1]
                write(args, env, run=name, repeat=repeat - 1, images_per_second=speed)
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    classic = statistics.median(speeds["classic loader"])
    ours = statistics.median(speeds["our loader"])
    ratio = spread(ratios, ".2f")
    print(
        f"\nloaders alone, one worker: classic {classic:.0f} img/s, ours {ours:.0f}, ratio {ratio}"
    )


def write(args, env, **measured):
    """Append one line to --log-file."""
    names = (
        "data_dir",
        "batch_size",
        "amp",
        "channels_last",
        "compile",
        "image_size",
        "steps",
        "every",
        "workers",
    )
    settings = {name: getattr(args, name) for name in names}
    append(args.log_file, {"model": args.arch} | settings | env | {"bench": "train"} | measured)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
