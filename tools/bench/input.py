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
import shlex
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets, build_loader, build_transforms
from common.errors import UserError, one_line_errors
from tools.bench.measure import (
    ROOT,
    build_step,
    command_line,
    fields,
    first_batch,
    parse_args,
    pick_device,
    run_alone,
    show,
    summary,
    take_turns,
    timed,
)
from tools.records import append, group, ratios, spread

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
    known = fields(args, pick_device()) | {"bench": "input"}
    cannot = {
        "classic, files": args.dataset != "folder",
        "classic, memory": not train_set.in_memory,
    }
    possible = [loop for loop in LOOPS if not cannot.get(loop)]
    loops = args.loops or possible
    if missing := [loop for loop in loops if loop not in possible]:
        found = f"--loops {shlex.quote(missing[0])}: not for these images"
        raise UserError(f"{found}; expected one or more of {shlex.join(possible)}")
    records = take_turns(
        args,
        known,
        loops,
        run=lambda loop: [run_loop(loop, args)],
        line=lambda run: f"{run['loop']:16} {run['images_per_second']:8.0f} img/s",
    )
    runs = group(records, "loop")
    ours = runs.get("01", [])
    show(runs, "01 / loop", {loop: ratios(ours, same) for loop, same in runs.items() if ours})
    if not train_set.in_memory:
        compare_with_classic(args, known)
    if ours:
        print(summary("01", ours, {loop: same for loop, same in runs.items() if loop != "01"}))


def run_loop(loop, args):
    """Run one loop in its own process, and return its record."""
    flags = [*command_line(args), "--epochs", args.epochs]

    def command(folder):
        if loop == "01":
            return [ROOT / "01_snsc.py", *flags, "--log-file", folder / "log.jsonl"]
        return [ROOT / "tools/bench/input.py", *flags, "--loop", loop]

    records, memory = run_alone(f"the loop {loop!r}", command)
    speeds = [record["images_per_second"] for record in records]
    return {
        "loop": loop,
        "images_per_second": statistics.mean(speeds[1:] or speeds),  # not the first of several
        "peak_memory_mib": memory,
    }


def limit_loop(args):
    """Time the training step alone, always on the same batch."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    step = build_step(args, train_set, device)
    batch = first_batch(args, train_set, device)
    return timed([batch] * (args.epochs * len(train_set) // args.batch_size), step, device)


def classic_loop(args, in_memory):
    """Time the loop that most tutorials use."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    train_step = build_step(args, train_set, device)
    dataset = ClassicImages(train_set) if in_memory else files_of(args, train_set)
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

    def __init__(self, train_set):
        self.images = train_set.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets = train_set.targets.tolist()
        self.transform = transform_of(train_set)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index].squeeze())  # (H, W) if there is one channel
        return self.transform(image), self.targets[index]


def files_of(args, train_set):
    """Return the classic data set of as many images as the training set has."""
    return classic_files(Path(args.data_dir, "train"), transform_of(train_set), len(train_set))


def transform_of(train_set):
    size = train_set.image_size
    crop = T.RandomResizedCrop(size)
    if train_set.in_memory:
        crop = T.RandomCrop(size, padding=size[0] // 8)
    return classic_transform(crop, train_set.channel_stats())


LOOPS = {
    "classic, files": lambda args: classic_loop(args, in_memory=False),
    "classic, memory": lambda args: classic_loop(args, in_memory=True),
    "01": None,  # a script, see run_loop
    "limit": limit_loop,
}


def compare_with_classic(args, known):
    """Compare our loader with the classic loader, one worker each, without training."""
    args.workers = 1
    train_set, _ = build_datasets(args)
    augment, _ = build_transforms(train_set, args, torch.device("cpu"))
    ours = build_loader(train_set, args, range(len(train_set)), train=True)

    def our_batches():
        return ((augment(images), targets) for images, targets in ours)

    compare_loaders(args, known, files_of(args, train_set), our_batches)


# Loading images as most tutorials do, and ours beside it


def classic_transform(crop, levels):
    """Return the transform of one PIL image.

    Args:
        crop: transform that crops it.
        levels: mean and standard deviation of each channel, from 0 to 255.
    """
    mean, std = ([level / 255 for level in channels] for channels in levels)
    return T.Compose([crop, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])


def classic_files(folder, transform, count):
    """Return `count` images of an ImageFolder, decoded by PIL when they are read."""
    images = torchvision.datasets.ImageFolder(folder, transform)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return Subset(images, order[:count].tolist())


def compare_loaders(args, known, classic, our_batches):
    """Read all images with one worker each, --repeats times in turn, without training. Print and
    record the speeds.

    Args:
        args: Namespace with repeats, batch_size and log_file.
        known: dict, the fields of all records.
        classic: Dataset, read by the classic loader.
        our_batches: function that returns batches (images, targets, ...) of our loader.
    """
    loader = DataLoader(classic, args.batch_size, num_workers=1, persistent_workers=True)
    loaders = {"classic loader": lambda: loader, "our loader": our_batches}
    speeds = {name: [] for name in loaders}
    for repeat in range(-1, args.repeats):
        for name, batches in loaders.items():
            begin = time.perf_counter()
            images = sum(len(batch[1]) for batch in batches())
            speed = images / (time.perf_counter() - begin)
            if repeat >= 0:  # the first pass starts the worker and fills the cache of files
                speeds[name].append(speed)
                record = {"loop": name, "repeat": repeat, "images_per_second": speed}
                append(args.log_file, known | record)
    faster = [ours / classic for classic, ours in zip(*speeds.values(), strict=True)]
    medians = [f"{name} {statistics.median(values):.1f} img/s" for name, values in speeds.items()]
    print(f"\nwithout training: {', '.join(medians)}, ours / classic {spread(faster, '.2f')}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(__doc__, add_flags))
