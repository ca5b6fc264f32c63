"""Measure the cost of loading images.

    python tools/bench/input.py --dataset folder --data-dir data/cifar10
    python tools/bench/input.py --dataset folder --data-dir data/imagenet-mini --batch-size 32

Four loops train the same model on the same images. Each loop runs in its own process; they take
turns, --repeats times:

    classic, files    reads PIL images from files in each epoch; RandomCrop, Flip, ToTensor and
                      Normalize per image (RandomResizedCrop for large images); 4 loader workers;
                      .item() in each training step
    classic, memory   the same, with the decoded images in memory (small images only)
    01                01_snsc.py
    limit             the training step alone, on one batch that is already on the device

--loops chooses some. On a GPU, 01 and the limit need --epochs N, so that they run for ten seconds
or more; the classic loops run one epoch. A ratio compares runs of the same repeat. Memory is the
sum over a loop's processes, with shared pages counted once. For large images, the loaders are also
compared without training, in images per second for one worker.
"""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets, build_loader, build_transforms
from common.errors import UserError, one_line_errors
from common.records import environment
from common.report import synchronize, warmup_steps
from tools.bench.measure import (
    ROOT,
    build_step,
    command_line,
    first_batch,
    parse_args,
    pick_device,
    write,
)
from tools.records import spread

CLASSIC_WORKERS = 4


def add_flags(parser):
    functions = [loop for loop in LOOPS if LOOPS[loop]]
    parser.add_argument(
        "--loops", nargs="+", choices=LOOPS, help="the loops to run (default: all that can)"
    )
    parser.add_argument(
        "--loop",
        choices=functions,
        help="run this loop in this process, print its speed as JSON (internal)",
    )


def main(args):
    if args.loop:
        print(json.dumps({"images_per_second": LOOPS[args.loop](args)}))
        return
    train_set, _ = build_datasets(args)
    env = environment(pick_device())
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | "
        f"{args.repeats} runs of each, in turn"
    )

    in_memory = train_set.in_memory
    cannot = {"classic, files": args.dataset != "folder", "classic, memory": not in_memory}
    loops = [loop for loop in args.loops or LOOPS if not cannot.get(loop)]
    runs = {loop: [] for loop in loops}
    for repeat in range(args.repeats):
        for loop in loops:
            run = run_loop(loop, args)
            runs[loop].append(run)
            write(args, env, bench="input", loop=loop, repeat=repeat, **run)
            print(
                f"   run {repeat + 1}: {loop:16} {run['images_per_second']:8.0f} img/s", flush=True
            )

    print(
        f"\n{'loop':16} {'img/s, median (range)':>28} {'peak memory':>12}   01 / "
        "loop, median (range)"
    )
    medians = {}  # of the ratios
    for loop in loops:
        speeds = [run["images_per_second"] for run in runs[loop]]
        memory = max(run["peak_memory_mib"] for run in runs[loop])
        ratios = [
            ours["images_per_second"] / speed
            for ours, speed in zip(runs.get("01", []), speeds, strict=False)
        ]
        medians[loop] = statistics.median(ratios) if ratios else math.nan
        ratio = spread(ratios, ".2f") if ratios else ""
        print(f"{loop:16} {spread(speeds, '.0f'):>28} {memory:8} MiB   {ratio}")
    if not in_memory:
        compare_loaders(args, env)
    if "01" in loops:
        speed = statistics.median(run["images_per_second"] for run in runs["01"])
        others = [f"{medians[loop]:.2f} of {loop}" for loop in loops if loop != "01"]
        print(", ".join([f"01: {speed:.0f} img/s", *others]))


def run_loop(loop, args):
    """Run one loop in its own process; return a dict of images_per_second and peak_memory_mib."""
    flags = command_line(args)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        if loop == "01":
            command = [ROOT / "01_snsc.py", *flags, "--epochs", args.epochs, "--log-file", log]
        else:
            command = [ROOT / "tools/bench/input.py", *flags, "--loop", loop]
            command += ["--epochs", args.epochs]
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True
        )
        with PeakMemory(process.pid) as peak:
            output = process.communicate()[0]
        if process.returncode != 0:
            raise UserError(
                f"the loop {loop!r} exited with code {process.returncode}; see its message above"
            )
        records = [
            json.loads(line) for line in (log.read_text() if loop == "01" else output).splitlines()
        ]
    # not the first of several
    speeds = [record["images_per_second"] for record in records[1:] or records]
    return {"images_per_second": statistics.mean(speeds), "peak_memory_mib": peak.mib}


class PeakMemory:
    """Measure the peak memory of a process and its children, once per second.

    Shared memory is counted once: each process counts with its proportional share (PSS).
    """

    def __init__(self, pid):
        self.pid = pid
        self.mib = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _watch(self):
        while not self._end.wait(1):
            self.mib = max(self.mib, memory_of(self.pid) // 1024)


def memory_of(pid):
    """Return the memory of a process and its children in KiB: 0 without /proc, or at its end."""
    process = Path(f"/proc/{pid}")
    try:
        total = int(re.search(r"^Pss: *(\d+)", (process / "smaps_rollup").read_text(), re.M)[1])
        for children in process.glob("task/*/children"):
            total += sum(map(memory_of, children.read_text().split()))
    except OSError:  # it has just exited
        return 0
    return total


def timed(batches, step, device):
    """Return the images per second of a loop over batches, without its first training steps."""
    if len(batches) < 10:
        raise UserError(
            f"{len(batches)} steps are too few to time, expected 10 or more: lower --batch-size"
        )
    done = 0
    warmup = warmup_steps(len(batches))
    for k, (images, targets) in enumerate(batches, start=1):
        step(images, targets)
        done += len(targets)
        if k == warmup:
            synchronize(device)
            done = 0
            begin = time.perf_counter()
    synchronize(device)
    return done / (time.perf_counter() - begin)


def limit_loop(args):
    """Time the training step alone, always on the same batch."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    step = build_step(args, train_set, device)
    images, targets = first_batch(args, train_set)
    images = build_transforms(train_set, args, device)[1](images.to(device))
    targets = targets.to(device)
    return timed(
        [(images, targets)] * (args.epochs * len(train_set) // args.batch_size), step, device
    )


def classic_loop(args, in_memory):
    """Time the loop that most tutorials use."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    train_step = build_step(args, train_set, device)
    dataset = ClassicImages(args, train_set) if in_memory else classic_files(args, train_set)
    # most tutorials ignore it too
    warnings.filterwarnings("ignore", message="This DataLoader will create 4 worker")
    options = {"num_workers": CLASSIC_WORKERS, "pin_memory": device.type == "cuda"}
    loader = DataLoader(dataset, args.batch_size, shuffle=True, **options)
    del train_set
    total = 0.0
    correct = 0

    def step(images, targets):
        nonlocal total, correct
        images, targets = images.to(device), targets.to(device)
        loss, outputs = train_step(images, targets)
        total += loss.item()
        correct += (outputs.argmax(dim=1) == targets).sum().item()

    return timed(loader, step, device)


class ClassicImages(Dataset):
    """Images in memory, converted to PIL images and transformed one by one, as in torchvision's
    CIFAR10.
    """

    def __init__(self, args, train_set):
        self.images = train_set.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets = train_set.targets.tolist()
        self.transform = classic_transform(args, train_set)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index].squeeze())  # (H, W) if there is one channel
        return self.transform(image), self.targets[index]


def classic_files(args, train_set):
    """Return an ImageFolder with as many images as the training set, decoded by PIL when they are
    read.
    """
    folder = torchvision.datasets.ImageFolder(
        Path(args.data_dir, "train"), classic_transform(args, train_set)
    )
    chosen = torch.randperm(len(folder), generator=torch.Generator().manual_seed(0))[
        : len(train_set)
    ]
    return torch.utils.data.Subset(folder, chosen.tolist())


def classic_transform(args, train_set):
    stats = train_set.channel_stats()
    mean, std = ((s / 255).tolist() for s in stats)
    size = train_set.image_size
    crop = (
        T.RandomCrop(size, padding=size[0] // 8)
        if train_set.in_memory
        else T.RandomResizedCrop(size)
    )
    flip = [T.RandomHorizontalFlip()] if args.dataset != "mnist" else []
    return T.Compose([crop, *flip, T.ToTensor(), T.Normalize(mean, std)])


LOOPS = {
    "classic, files": lambda args: classic_loop(args, in_memory=False),
    "classic, memory": lambda args: classic_loop(args, in_memory=True),
    "01": None,  # a script, see run_loop
    "limit": limit_loop,
}


def compare_loaders(args, env):
    """Compare our loader with the classic loader, one worker each, without training."""
    device = torch.device("cpu")
    args.workers = 1
    train_set, _ = build_datasets(args)
    augment, _ = build_transforms(train_set, args, device)
    ours = build_loader(train_set, args, range(len(train_set)), train=True)
    classic = DataLoader(
        classic_files(args, train_set), args.batch_size, num_workers=1, persistent_workers=True
    )
    loaders = {"classic loader": (classic, lambda images: images), "our loader": (ours, augment)}
    speeds = {name: [] for name in loaders}
    for repeat in range(args.repeats + 1):
        for name, (loader, finish) in loaders.items():
            begin = time.perf_counter()
            images = 0
            for batch in loader:
                images += len(finish(batch[0]))
            if repeat > 0:  # the first pass starts the worker and fills the file cache
                speeds[name].append(images / (time.perf_counter() - begin))
                write(
                    args,
                    env,
                    bench="input",
                    loop=name,
                    repeat=repeat - 1,
                    images_per_second=speeds[name][-1],
                )
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    print(f"\nloaders alone, one worker: {'img/s, median (range)':>28}")
    for name in loaders:
        print(f"{name:26} {spread(speeds[name], '.0f'):>28}")
    print(f"ours / classic             {spread(ratios, '.2f'):>28}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__, add_flags))
