"""Datasets, loaders and augmentation.

Small images are held in memory: see memory.py. Photographs are decoded and cropped by loader
processes: see folder.py. Crops of small images, flips and normalization run on the device, on the
whole batch at once but with random numbers of its own for each image.
"""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from common import shapes
from common.errors import UserError
from common.memory import MemoryImages, choose

# How loader workers start. Python 3.14 would start them from a server process: they would outlive a
# killed training.
START_METHOD = "fork" if sys.platform == "linux" else None  # None: as usual there


def build_datasets(args):
    """Load the training set and the test set of --dataset.

    Both have the attributes in_memory, channels, image_size (height, width), num_classes and note
    (a line of the header, or ""), and channel_stats().

    Raises:
        UserError: the files are missing or damaged.
    """
    if args.dataset == "shapes":
        return _shapes(args)
    # Imported here, since a run needs one of them at most.
    if args.dataset == "folder":
        from common.folder import load_folder

        return load_folder(args)
    from common.torchvision_sets import load_torchvision_set

    return load_torchvision_set(args)


def build_loader(dataset, args, sampler=None, batch_size=None, *, train=False):
    """Build the DataLoader of uint8 batches.

    Args:
        sampler: an iterable of indices with a length. None: all images, in the order of the
            dataset.
        batch_size: int, the images of a batch. None: --batch-size.

    Raises:
        UserError: there are fewer than two images to train on.
    """
    if train and len(sampler) < 2:
        raise UserError(
            f"{len(sampler)} training image per process: expected 2 or more; raise --limit"
        )
    workers = 0 if dataset.in_memory else args.workers
    batch_size = batch_size or args.batch_size
    # Batch norm cannot train on a single image.
    drop_last = train and len(sampler) % batch_size == 1
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=workers,
        multiprocessing_context=START_METHOD if workers else None,
        persistent_workers=train and workers > 0,
        pin_memory=torch.accelerator.is_available(),
        collate_fn=tuple if dataset.in_memory else None,  # __getitems__ has made a batch already
    )


def build_transforms(train_set, args, device):
    """Build the functions that turn a uint8 batch on the device into the input of the model.

    Returns:
        (augment, normalize): each takes uint8 (N, C, H, W) and returns float32 (N, C, H, W) with a
        mean of about 0 and a deviation of about 1. augment also crops and flips each image at
        random, unless --no-augment.
    """
    mean, std = (s.float().to(device)[:, None, None] for s in train_set.channel_stats())
    flip = 0 if args.dataset == "mnist" else 0.5  # mirrored digits are no digits
    # Photographs are cropped when they are read.
    padding = train_set.image_size[0] // 8 if train_set.in_memory else 0

    def normalize(images):
        return (images / std).sub_(mean / std)

    def augment(images):
        if args.augment:
            n = len(images)
            top, left = torch.randint(2 * padding + 1, (2, n), device=device)
            images = crop_and_flip(images, padding, top, left, torch.rand(n, device=device) < flip)
        return normalize(images)

    return augment, normalize


def crop_and_flip(images, padding, top, left, mirror):
    """Shift each image by its own offset inside a black border, then mirror some.

    For the same offsets this equals torchvision's RandomCrop(size, padding) and horizontal flip,
    pixel by pixel.

    Args:
        images: (N, C, H, W), any dtype and device.
        padding: int, pixels of border on every side.
        top, left: int64 (N,), 0 to 2 * padding.
        mirror: bool (N,).
    """
    height, width = images.shape[2:]
    windows = F.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    images = windows[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(mirror[:, None, None, None], images.flip(3), images)


def _shapes(args):
    def draw(seed, indices):
        images = torch.empty(len(indices), 3, shapes.SIZE, shapes.SIZE, dtype=torch.uint8)
        targets = torch.empty(len(indices), dtype=torch.int64)
        # The temporary arrays of 1000 images fit the cache.
        for rows in torch.arange(len(indices)).split(1000):
            drawn_images, drawn_targets = shapes.render(seed, indices[rows].numpy())
            images[rows] = torch.from_numpy(drawn_images)
            targets[rows] = torch.from_numpy(drawn_targets)
        return MemoryImages(images, targets, len(shapes.CLASSES))

    return draw(0, choose(50_000, args.limit)), draw(1, torch.arange(10_000))
