"""Measure the cost of loading images that fit in memory.

    python tools/bench/input.py --dataset folder --data-dir data/cifar10

Three loops train the same model on the same images. Each loop runs in its own process; they take
turns, --repeats times:

    classic, memory   RandomCrop, Flip, ToTensor and Normalize per PIL image; 4 loader workers;
                      .item() in each training step
    01                01_snsc.py
    limit             the training step alone, on one batch that is already on the device

On a GPU, 01 and the limit need --epochs N, so that they run for ten seconds or more; the classic
loop runs one epoch. A ratio compares runs of the same repeat. Memory is the sum over a loop's
processes, with shared pages counted once.
"""

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.data import build_datasets, build_loader, build_transforms
from common.errors import UserError, one_line_errors
from common.flags import shared_flags, whole_number
from common.models import build_model
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

CLASSIC_WORKERS = 4


def parse_args():
    parser = shared_flags(__doc__, conflict_handler="resolve")
    add = parser.add_argument
    # A benchmark compares processes that do equal work.
    add("--batch-size", type=whole_number(2), default=256, metavar="N", help="images per process")
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="runs of each loop")
    add("--loop", choices=FUNCTIONS, help=argparse.SUPPRESS)  # run it in this process
    # Enough images that the batches which workers prefetch before the timing starts do not matter.
    parser.set_defaults(limit=100 * 256, epochs=1)
    return parser.parse_args()


def main(args):
    if args.loop:
        print(json.dumps({"images_per_second": FUNCTIONS[args.loop](args)}))
        return
    train_set, _ = build_datasets(args)
    if not train_set.in_memory:
        raise UserError("these images are read from files: expected small ones of one size")
    records = take_turns(
        args,
        fields(args, pick_device()) | {"bench": "input"},
        LOOPS,
        run=lambda loop: [run_loop(loop, args)],
        line=lambda run: f"{run['loop']:16} {run['images_per_second']:8.0f} img/s",
    )
    runs = group(records, "loop")
    show(runs, "01 / loop", {loop: ratios(runs["01"], same) for loop, same in runs.items()})
    print(summary("01", runs["01"], {loop: runs[loop] for loop in FUNCTIONS}))


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


def command_line(args):
    """Return the flags that select the data and the training, as a command line."""
    names = ("dataset", "data_dir", "arch", "batch_size", "limit", "seed", "workers")
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]


def first_batch(args, train_set, device):
    """Return the first batch of a training set, normalized, as (images, targets) on the device. A
    small set is repeated.
    """
    indices = [k % len(train_set) for k in range(args.batch_size)]
    images, targets = next(iter(build_loader(train_set, args, indices)))
    normalize = build_transforms(train_set, args, device)[1]
    return normalize(images.to(device)), targets.to(device)


def build_step(args, train_set, device):
    """Build a model and return a function that runs one training step: (images, targets) -> (loss,
    outputs).

    Args:
        args: Namespace of parse_args.
        train_set: data set, for the shape of its images and its number of classes.
        device: torch.device of the model; images and targets must be on it.
    """
    torch.manual_seed(args.seed)
    model = build_model(args, train_set).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )

    def step(images, targets):
        outputs = model(images)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, outputs

    return step


def limit_loop(args):
    """Time the training step alone, always on the same batch."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    step = build_step(args, train_set, device)
    batch = first_batch(args, train_set, device)
    return timed([batch] * (args.epochs * len(train_set) // args.batch_size), step, device)


def classic_loop(args):
    """Time the loop that most tutorials use."""
    device = pick_device()
    train_set, _ = build_datasets(args)
    train_step = build_step(args, train_set, device)
    dataset = ClassicImages(train_set)
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
        mean, std = ([level / 255 for level in levels] for levels in train_set.channel_stats())
        size = train_set.image_size
        crop = T.RandomCrop(size, padding=size[0] // 8)
        self.transform = T.Compose(
            [crop, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)]
        )

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index].squeeze())  # (H, W) if there is one channel
        return self.transform(image), self.targets[index]


FUNCTIONS = {"classic, memory": classic_loop, "limit": limit_loop}
LOOPS = ("classic, memory", "01", "limit")


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
