"""Train as the usual ImageNet example does, to compare 06 with: images per second of a plain loop.

    python tools/bench/peer.py --arch resnet50 --batch-size 256
    python tools/bench/peer.py --data-dir data/imagenet-mini --workers 8 --amp bf16

ImageFolder reads PIL images, which the loader workers crop, mirror, convert and normalize one by
one. Each training step reads its loss and its accuracy, as loops with running averages do. Without
--data-dir the images are generated once and held in memory.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T

from common.errors import one_line_errors
from common.flags import Parser, output_file, whole_number
from common.images import MEAN, STD
from common.records import environment
from common.report import synchronize, warmup_steps
from imagenet.flags import AMP_DTYPES
from tools.bench.measure import pick_device
from tools.records import append


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="folder with train/CLASS/*.jpg; without it, one batch")
    add("--arch", default="resnet18", metavar="NAME", help="a torchvision model")
    add("--batch-size", type=whole_number(1), default=256, metavar="N", help="images per step")
    add("--image-size", type=whole_number(32), default=224, metavar="N", help="pixels per side")
    add("--workers", type=whole_number(0), default=4, metavar="N", help="loader processes")
    add("--steps", type=whole_number(20), default=60, metavar="N", help="training steps")
    add("--amp", choices=("none", "bf16"), default="none", help="mixed precision")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line to FILE")
    return parser.parse_args()


def main(args):
    device = pick_device()
    model = torchvision.models.get_model(args.arch, num_classes=1000).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    loader = build_loader(args)
    model.train()
    step, images_seen = 0, 0
    while step < args.steps:
        for images, targets in loader:
            images, targets = (
                images.to(device, non_blocking=True),
                targets.to(device, non_blocking=True),
            )
            with torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none"):
                outputs = model(images)
                loss = criterion(outputs, targets)
            averages = loss.item(), (outputs.argmax(1) == targets).float().mean().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = step + 1
            images_seen = images_seen + len(targets)
            if step == warmup_steps(args.steps):
                synchronize(device)
                start = time.perf_counter()
                images_seen = 0
            if step == args.steps:
                break
    synchronize(device)
    speed = images_seen / (time.perf_counter() - start)
    setting = f"{args.arch}, {args.batch_size} images per step, amp {args.amp}"
    print(f"a plain loop: {setting}: {speed:.1f} img/s, loss {averages[0]:.3f}")
    names = ["data_dir", "batch_size", "image_size", "steps", "amp"] + ["workers"] * bool(
        args.data_dir
    )
    settings = {"bench": "peer", "model": args.arch} | {name: getattr(args, name) for name in names}
    append(args.log_file, settings | environment(device) | {"images_per_second": round(speed, 1)})


def build_loader(args):
    """Return batches of photographs; without a folder, one batch in memory, which main() uses again
    and again.
    """
    pin = torch.accelerator.is_available()
    if args.data_dir is None:
        images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
        targets = torch.randint(1000, (args.batch_size,))
        return [(images.pin_memory(), targets.pin_memory()) if pin else (images, targets)]
    normalize = T.Normalize([level / 255 for level in MEAN], [level / 255 for level in STD])
    transform = T.Compose(
        [T.RandomResizedCrop(args.image_size), T.RandomHorizontalFlip(), T.ToTensor(), normalize]
    )
    dataset = torchvision.datasets.ImageFolder(Path(args.data_dir, "train"), transform)
    options = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True}
    return DataLoader(dataset, **options, num_workers=args.workers, pin_memory=pin)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
