"""The input of 06: large images from a folder, or made-up ones, on their way to the device ahead of the step.

Images are decoded, cropped and mirrored as bytes by the loader's workers, and become numbers on the device. The
random crop of an image depends on seed, epoch and image alone, whichever process makes it, so a run that is resumed,
or goes on with another number of processes, sees the same pixels.
"""

import os
import sys
from multiprocessing import util

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from common.data import as_it_is, leave_ctrl_c_to_main, list_images, read_image
from common.distributed import cores_per_process
from common.errors import UserError, kill_workers
from imagenet.signals import end_with_parent, stop

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's channels, in levels of 0 to 255
MAX_DAMAGED = 0.01  # the share of images that may be unreadable
TRIES = 10  # images in a row that may be


class Images(Dataset):
    """The images of a folder, fetched by the batch of (epoch, index).

    In training, the image after a damaged one takes its place. In testing it is left out: its target is -1.

    Args:
        root: str, a folder with a folder for each class.
        size: int, pixels a side.
        seed: int, for the crops of training, or None for testing, with the middle of each image.
    """

    def __init__(self, root, size, seed=None):
        self.paths, self.targets, self.classes = list_images(root)
        self.num_classes, self.channels, self.image_size = len(self.classes), 3, (size, size)
        self.seed = seed
        if seed is None:
            self.transform = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])
        else:
            self.transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.paths)

    def __getitems__(self, keys):
        """(images uint8 (N, 3, size, size), targets int64 (N,), which images were found damaged int64 (any,))"""
        images = torch.zeros(len(keys), 3, *self.image_size, dtype=torch.uint8)
        targets = torch.full((len(keys),), -1)
        damaged = []
        for k, (epoch, index) in enumerate(keys):
            image, used = self._read(index, damaged)
            if image is not None:
                if self.seed is not None:  # whole numbers have the same hash in every process
                    torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
                images[k], targets[k] = self.transform(image), self.targets[used]
        return images, targets, torch.tensor(damaged, dtype=torch.int64)

    def _read(self, index, damaged):
        """An image, or what stands in for it, and its index; (None, index) if nothing does."""
        for used in range(index, index + (1 if self.seed is None else TRIES)):
            used %= len(self)
            try:
                return read_image(self.paths[used]), used
            except UserError:
                damaged.append(used)
        return None, index


class DummyImages(Dataset):
    """Made-up images, the same few again and again: what a benchmark needs, and nothing to learn.

    Args:
        count: int, how many to pretend.
        size: int, pixels a side.
        num_classes: int.
    """

    def __init__(self, count, size, num_classes=1000):
        self.count, self.classes = count, [str(k) for k in range(num_classes)]
        self.num_classes, self.channels, self.image_size = num_classes, 3, (size, size)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (64, 3, size, size), generator=generator, dtype=torch.uint8)
        self.targets = torch.randint(num_classes, (64,), generator=generator)

    def __len__(self):
        return self.count

    def __getitems__(self, keys):
        indices = torch.tensor([index % 64 for _, index in keys], dtype=torch.int64)
        return self.images[indices], self.targets[indices], torch.tensor([], dtype=torch.int64)


def find_folders(train, val):
    """The folders of training and test images: (train, val), for a folder of both or for one of each.

    Args:
        train: str, holds class folders; or train/ and, unless `val` is given, val/ or test/.
        val: str or None.

    Raises:
        UserError: they are not there.
    """
    root = train
    if not os.path.isdir(root):
        raise UserError(f"{root} is no folder: expected one with train/CLASS/*.jpg and val/CLASS/*.jpg")
    if os.path.isdir(os.path.join(root, "train")):
        train = os.path.join(root, "train")
        val = val or next((p for p in (os.path.join(root, s) for s in ("val", "test")) if os.path.isdir(p)), None)
    if val is None or not os.path.isdir(val):
        found = f"{val} is no folder" if val else f"{root} has no train/ with val/ or test/ beside it"
        raise UserError(f"{found}: expected test images in class folders; name theirs with --val-path DIR")
    return train, val


def build_datasets(args):
    """The training set and the test set.

    Args:
        args: reads train_path, val_path, image_size, seed and dummy.

    Raises:
        UserError: there are no images, or the two have other classes.
    """
    if args.dummy:
        return DummyImages(args.dummy, args.image_size), DummyImages(max(1, args.dummy // 25), args.image_size)
    train, val = find_folders(args.train_path, args.val_path)
    train_set, val_set = Images(train, args.image_size, args.seed), Images(val, args.image_size)
    if train_set.classes != val_set.classes:
        odd = sorted(set(train_set.classes) ^ set(val_set.classes))[0]
        only = train if odd in train_set.classes else val
        raise UserError(f"class {odd} is only in {only}: expected the same classes in {train} and {val}")
    if len(train_set.classes) < 2:
        raise UserError(f"1 class in {train}: expected 2 or more, one folder each; one is no choice")
    return train_set, val_set


def build_loader(dataset, batches, workers, local_world_size):
    """The ordinary DataLoader for batches of uint8 images.

    Args:
        dataset: Images or DummyImages.
        batches: GlobalBatches.
        workers: int or None: the process's share of the cores, or none for images that are in memory.
        local_world_size: int, the processes on this machine, which share its cores.
    """
    if workers is None:
        workers = 0 if isinstance(dataset, DummyImages) else cores_per_process(local_world_size)
    # Python, as it ends, would send workers SIGTERM, to which they are deaf, and wait for them.
    util.Finalize(None, kill_workers, exitpriority=100)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=as_it_is,  # __getitems__ has made the batch already
        worker_init_fn=_leave_signals_to_main,
    )


def build_normalize(channels_last, device):
    """What turns uint8 (N, 3, H, W) on the device into float32 of about mean 0 and deviation 1."""
    mean, std = (torch.tensor(s, device=device)[:, None, None] for s in (MEAN, STD))
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return lambda images: (images.contiguous(memory_format=memory_format) / std).sub_(mean / std)


def on_device(loader, device, damage):
    """Yield the loader's batches on the device; on a GPU each is copied while the step before it computes."""
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream() if cuda else None
    ready = None
    for *batch, damaged in loader:
        damage.note(damaged)
        with torch.cuda.stream(stream):  # without a GPU this does nothing
            copied = [tensor.to(device, non_blocking=True) for tensor in batch]
        if not cuda:
            yield copied
            continue
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in copied:
            tensor.record_stream(torch.cuda.current_stream())  # not to be reused while a step still reads it
        ready = copied
    if ready is not None:
        yield ready


class Damage:
    """The damaged images of a dataset: each named once, by rank 0, and an error when they are too many.

    Args:
        dataset: Images.
        group: a gloo process group of all ranks.
    """

    def __init__(self, dataset, group):
        self.dataset, self.group = dataset, group
        self.found, self.new = set(), set()

    def note(self, indices):
        self.new |= set(indices.tolist())

    def tell(self):
        """Tell all ranks what each has found; all must call it.

        Raises:
            UserError: more than 1 % of the images are damaged.
        """
        noted = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(noted, self.new, group=self.group)
        new, self.new = sorted(set().union(*noted) - self.found), set()
        self.found |= set(new)
        if dist.get_rank(self.group) == 0:
            for index in new:
                print(f"damaged, left out: {self.dataset.paths[index]}", file=sys.stderr, flush=True)
        if len(self.found) > MAX_DAMAGED * len(self.dataset):
            raise UserError(
                f"{len(self.found)} of {len(self.dataset)} images are damaged, {self.dataset.paths[min(self.found)]} "
                f"for one: expected at most {MAX_DAMAGED:.0%}; delete them or put good copies there"
            )


def _leave_signals_to_main(worker):
    """In a worker: signals reach every process of a job, and the main process needs its batches until it has saved."""
    leave_ctrl_c_to_main(worker)
    stop.ignore()
    end_with_parent()  # of a main process that is killed, workers with a batch to hand over would wait for ever
