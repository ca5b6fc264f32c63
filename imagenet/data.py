"""The input of 06: photographs from a folder, or generated images, on their way to the device ahead of the step.

Loader workers decode, crop and mirror images as bytes. The device converts them to numbers. The
random crop of an image depends only on seed, epoch and image, whichever process makes it. So a run
that is resumed, or continues on another number of processes, sees the same pixels.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import util

import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from common.data import START_METHOD
from common.distributed import cores_per_process
from common.errors import UserError, one_line
from imagenet import signals

# of ImageNet's channels, on a scale of 0 to 255
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
IGNORED = -100  # the target that nn.CrossEntropyLoss ignores
MAX_DAMAGED = 0.01  # the share of images that may be unreadable
MAX_TRIES = 10  # how many images in a row may be unreadable


class Images(Dataset):
    """The images of a folder, fetched by the batch of (epoch, index).

    In training, the next image replaces a damaged one. In evaluation, a damaged image gets the
    target IGNORED.

    Args:
        root: str, a folder with one folder per class.
        size: int, pixels per side.
        seed: int, for the random crops of training; or None for evaluation, on the center of each
            image.
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
        """Return images uint8 (N, 3, size, size), targets int64 (N,), indices of damaged images int64 (any,)."""
        images = torch.zeros(len(keys), 3, *self.image_size, dtype=torch.uint8)
        targets = torch.full((len(keys),), IGNORED)
        damaged = []
        for k, (epoch, index) in enumerate(keys):
            image, used = self._read(index, damaged)
            if image is not None:
                if self.seed is not None:  # integers have the same hash in every process
                    torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
                images[k], targets[k] = self.transform(image), self.targets[used]
        return images, targets, torch.tensor(damaged, dtype=torch.int64)

    def _read(self, index, damaged):
        """Return an image or its replacement, and the index of what was read; (None, index) if there is neither."""
        for used in range(index, index + (1 if self.seed is None else MAX_TRIES)):
            used %= len(self)
            try:
                return read_image(self.paths[used]), used
            except UserError:
                damaged.append(used)
        return None, index


class DummyImages(Dataset):
    """Generated images for benchmarks: the same 64 again and again.

    Args:
        count: int, the length of the dataset.
        size: int, pixels per side.
        num_classes: int.
    """

    def __init__(self, count, size, num_classes=1000):
        self.count, self.classes = count, [str(k) for k in range(num_classes)]
        self.num_classes, self.channels, self.image_size = num_classes, 3, (size, size)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(
            256, (64, 3, size, size), generator=generator, dtype=torch.uint8
        )
        self.targets = torch.randint(num_classes, (64,), generator=generator)

    def __len__(self):
        return self.count

    def __getitems__(self, keys):
        indices = torch.tensor([index % 64 for _, index in keys], dtype=torch.int64)
        images = self.images.index_select(0, indices)  # a third of the time of images[indices]
        return images, self.targets[indices], torch.tensor([], dtype=torch.int64)


def build_datasets(args):
    """Build the training set and the validation set.

    Args:
        args: reads train_path, val_path, image_size, seed and dummy.

    Raises:
        UserError: there are no images, or the two have different classes.
    """
    if args.dummy:
        return DummyImages(args.dummy, args.image_size), DummyImages(
            max(1, args.dummy // 25), args.image_size
        )
    train, val = find_folders(args.train_path, args.val_path)
    train_set, val_set = Images(train, args.image_size, args.seed), Images(val, args.image_size)
    if train_set.classes != val_set.classes:
        odd = sorted(set(train_set.classes) ^ set(val_set.classes))[0]
        only = train if odd in train_set.classes else val
        raise UserError(
            f"class {odd} is only in {only}: expected the same classes in {train} and {val}"
        )
    if len(train_set.classes) < 2:
        raise UserError(f"1 class in {train}: expected 2 or more, one folder for each")
    return train_set, val_set


def find_folders(train, val):
    """Return the folders of training and validation images, given a folder of both or one for each.

    Args:
        train: str, holds class folders; or train/ and, unless `val` is given, val/ or test/.
        val: str or None.

    Raises:
        UserError: they do not exist.
    """
    root = train
    if not os.path.isdir(root):
        raise UserError(
            f"{root} is not a folder: expected one with train/CLASS/*.jpg and val/CLASS/*.jpg"
        )
    if os.path.isdir(os.path.join(root, "train")):
        train = os.path.join(root, "train")
        val = val or next(
            (p for p in (os.path.join(root, s) for s in ("val", "test")) if os.path.isdir(p)), None
        )
    if val is None or not os.path.isdir(val):
        found = (
            f"{val} is not a folder"
            if val
            else f"{root} has no train/ with val/ or test/ beside it"
        )
        raise UserError(
            f"{found}: expected validation images in class folders; name their folder with "
            "--val-path DIR"
        )
    return train, val


def unused_test_folder(train, val):
    """Return the folder test/ if there is one that find_folders() leaves aside, else None."""
    used, test = find_folders(train, val), os.path.join(train, "test")
    is_class = used[0] == train
    return None if is_class or not os.path.isdir(test) or os.path.samefile(used[1], test) else test


def list_images(root):
    """Return the image files of an ImageFolder tree: paths, targets int64 (N,), class names."""
    try:
        folder = ImageFolder(root, allow_empty=True)
    except FileNotFoundError:
        raise UserError(f"{root} has no class folders: expected {root}/CLASS/*.jpg") from None
    targets = torch.tensor(folder.targets, dtype=torch.int64)
    counts = targets.bincount(minlength=len(folder.classes))
    if not counts.all():
        empty = os.path.join(root, folder.classes[int(counts.argmin())])
        raise UserError(
            f"{empty} has no images (.jpg, .png, ...): put some there or delete the folder"
        )
    return [path for path, _ in folder.samples], targets, folder.classes


def read_image(path):
    """Decode an image file as uint8 (3, H, W).

    Raises:
        UserError: it is damaged.
    """
    try:
        return v2.functional.to_dtype(
            decode_image(path, ImageReadMode.RGB), torch.uint8, scale=True
        )
    except RuntimeError:
        pass  # a format that Pillow reads and torchvision does not (bmp, tiff), or a damaged file
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip
                image = image.convert("I").point(lambda level: level / 256)
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable image ({one_line(error)}); delete it or replace it"
        ) from None


def build_loader(dataset, batches, workers, local_world_size):
    """Build the ordinary DataLoader, for batches of uint8 images.

    Args:
        dataset: Images or DummyImages.
        batches: GlobalBatches.
        workers: int, or None for this process's share of the cores, less two beside a GPU (for
            DummyImages, none).
        local_world_size: int, the processes on this machine, which share its cores.
    """
    if workers is None:
        cores = cores_per_process(local_world_size)
        if torch.cuda.is_available():
            # for this process itself: its main thread, autograd, pinned memory and NCCL
            cores = max(1, cores - 2)
        workers = 0 if isinstance(dataset, DummyImages) else cores
    # When Python exits it sends SIGTERM to the workers, which ignore it, and waits for them.
    util.Finalize(None, _kill_workers, exitpriority=100)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=START_METHOD if workers else None,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=tuple,  # __getitems__ has made a batch already
        worker_init_fn=_ignore_signals,
    )


def build_normalize(channels_last, device):
    """Return the function that turns uint8 (N, 3, H, W) on the device into float32 of mean 0 and deviation 1, about."""
    mean, std = (torch.tensor(s, device=device)[:, None, None] for s in (MEAN, STD))
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return lambda images: (images.contiguous(memory_format=memory_format) / std).sub_(mean / std)


class DeviceLoader:
    """Batches on the device: (images uint8, targets). On a GPU, each is copied while the step before it computes.

    Args:
        dataset, batches, workers: see build_loader.
        d: Distributed.
        group: a gloo process group of all ranks.
    """

    def __init__(self, dataset, batches, workers, d, group):
        self.loader, self.device = (
            build_loader(dataset, batches, workers, d.local_world_size),
            d.device,
        )
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.damaged = DamagedImages(dataset, group)

    def report_damaged(self):
        """Name the damaged images that any rank has found. Every rank must call it."""
        self.damaged.sync()

    def __iter__(self):
        stream, ready = self.stream, None
        for *batch, damaged in self.loader:
            self.damaged.add(damaged)
            with torch.cuda.stream(stream):  # without a GPU this does nothing
                copied = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            if stream is None:
                yield copied
                continue
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in copied:
                # its memory is not reused while a step reads it
                tensor.record_stream(torch.cuda.current_stream())
            ready = copied
        if ready is not None:
            yield ready


class DamagedImages:
    """The damaged images of a dataset. Rank 0 names each of them once; too many are an error.

    Args:
        dataset: Images.
        group: a gloo process group of all ranks.
    """

    def __init__(self, dataset, group):
        self.dataset, self.group = dataset, group
        self.known, self.new = set(), set()

    def add(self, indices):
        """Note what this rank found."""
        self.new |= set(indices.tolist())

    def sync(self):
        """Exchange what the ranks found. Every rank must call it.

        Raises:
            UserError: more than 1 % of the images are damaged.
        """
        per_rank = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(per_rank, self.new, group=self.group)
        new, self.new = sorted(set().union(*per_rank) - self.known), set()
        self.known |= set(new)
        if dist.get_rank(self.group) == 0:
            for index in new:
                print(
                    f"damaged, left out: {self.dataset.paths[index]}", file=sys.stderr, flush=True
                )
        if len(self.known) > MAX_DAMAGED * len(self.dataset):
            raise UserError(
                f"{len(self.known)} of {len(self.dataset)} images are damaged, for example "
                f"{self.dataset.paths[min(self.known)]}: expected at most {MAX_DAMAGED:.0%}; "
                "delete or replace them"
            )


def _ignore_signals(worker):
    """Leave signals to the main process, which needs batches from its workers until it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.ignore()
    # if the main process is killed, a worker with a batch to deliver would wait for ever
    signals.exit_with_parent()
    # after Ctrl-C the main process closes the connection while a worker delivers a batch
    show = sys.excepthook
    sys.excepthook = lambda kind, *rest: (
        None if issubclass(kind, ConnectionError) else show(kind, *rest)
    )


def _kill_workers():
    # Windows has no SIGCHLD, a thread may not set it
    with contextlib.suppress(AttributeError, ValueError):
        # otherwise the DataLoader reports the workers as lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
