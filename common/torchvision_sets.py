"""--dataset cifar10 and mnist, which torchvision downloads."""

import os

import torch
from filelock import FileLock
from torchvision.datasets import CIFAR10, MNIST

from common.errors import UserError, one_line
from common.memory import MemoryImages, choose


def load_torchvision_set(args):
    """Return the training set and the test set, in memory.

    Raises:
        UserError: the files are missing or damaged.
    """
    name = args.dataset
    build = {"cifar10": CIFAR10, "mnist": MNIST}[name]
    try:
        if args.download:
            os.makedirs(args.data_dir, exist_ok=True)
            # One process downloads, the others wait.
            with FileLock(os.path.join(args.data_dir, f".{name}.lock")):
                build(args.data_dir, download=True)
        train = build(args.data_dir, train=True)
        test = build(args.data_dir, train=False)
    except (RuntimeError, OSError, ValueError, AssertionError, LookupError, EOFError) as error:
        raise UserError(
            f"cannot read {name} in {args.data_dir} ({one_line(error)}): add --download, "
            "and first delete the files if they are damaged, "
            "or use --dataset shapes, which needs no files"
        ) from None

    def in_memory(dataset, limit):
        images = torch.as_tensor(dataset.data)  # mnist: (N, H, W); cifar10: (N, H, W, 3)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
        targets = torch.as_tensor(dataset.targets)
        if limit is not None:
            chosen = choose(len(images), limit)
            images, targets = images[chosen], targets[chosen]
        return MemoryImages(images, targets, num_classes=10)

    return in_memory(train, args.limit), in_memory(test, None)
