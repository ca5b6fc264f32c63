"""Datasets, loaders and augmentation, fast enough that the network is what a step waits for.

Small images are held in memory as one uint8 tensor. The Dataset answers __getitems__, so the ordinary
DataLoader fetches a whole batch with one index operation; crops, flips and normalisation then run per
image, but for the batch at once, on the training device. Large images are decoded and resized by the
loader's workers as they come, and travel as uint8 too.
"""

import http.client
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from filelock import FileLock
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from common import shapes
from common.distributed import cores_per_process
from common.errors import UserError, one_line
from common.report import leaves_one_alone

SMALL_SIDE = 64  # pixels: images up to here, all of one size, are held in memory
SMALL_BYTES = 4 * 2**30  # unless they would fill more than this
CROP = 224  # pixels a side of what a network sees of a large image


class MemoryImages(Dataset):
    """Images in memory, fetched by the batch.

    Args:
        images: uint8 (N, C, H, W).
        targets: int64 (N,).
        num_classes: int.
    """

    in_memory = True

    def __init__(self, images, targets, num_classes):
        self.images, self.targets, self.num_classes = images, targets, num_classes
        self.channels, self.image_size = images.shape[1], tuple(images.shape[2:])

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]

    def __getitems__(self, indices):
        return self.images[indices], self.targets[indices]

    def channel_stats(self):
        """Mean and standard deviation of each channel, (C,) each, in levels of 0 to 255; exact."""
        levels = torch.arange(256, dtype=torch.float64)
        counts = torch.zeros(self.channels, 256, dtype=torch.float64)
        for part in self.images.split(1000):  # in parts, since flatten copies
            counts += torch.stack([c.flatten().bincount(minlength=256) for c in part.unbind(1)])
        share = counts / counts.sum(1, keepdim=True)
        mean = share @ levels
        return mean, (share @ levels.square() - mean.square()).clamp(min=1).sqrt()


class FileImages(Dataset):
    """Images decoded from their files as they come, cropped to CROP x CROP.

    Args:
        paths: list of str.
        targets: int64 (N,).
        num_classes: int.
        transform: takes and returns uint8 (3, H, W); the result is CROP x CROP.
    """

    in_memory = False
    channels, image_size = 3, (CROP, CROP)

    def __init__(self, paths, targets, num_classes, transform):
        self.paths, self.targets, self.num_classes, self.transform = paths, targets, num_classes, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(read_image(self.paths[index])), self.targets[index]

    def __getitems__(self, indices):
        return torch.stack([self[index][0] for index in indices]), self.targets[indices]

    def channel_stats(self):
        """Mean and standard deviation of ImageNet's channels, in levels of 0 to 255."""
        return torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])


def build_datasets(args):
    """Load the training set and the test set of --dataset.

    Returns:
        (train_set, test_set), each MemoryImages or FileImages.

    Raises:
        UserError: the files are missing or damaged; the message says which and what to do.
    """
    build = {"shapes": _shapes, "cifar10": _torchvision, "mnist": _torchvision, "folder": _folder}
    train_set, test_set = build[args.dataset](args)
    if len(train_set) < 2:
        raise UserError(f"{len(train_set)} training image: expected 2 or more; raise --limit or add images")
    if train_set.num_classes < 2:
        raise UserError(f"1 class in {args.data_dir}/train: expected 2 or more, one folder each; one is no choice")
    return train_set, test_set


def build_loader(dataset, sampler, args, local_world_size=1, *, train):
    """The ordinary DataLoader, set up for batches of uint8 images.

    Args:
        dataset: MemoryImages or FileImages.
        sampler: yields indices and has a length.
        args: the shared flags; reads batch_size and workers.
        local_world_size: int, the processes on this machine, which share its cores.
        train: leave out a last batch that would leave one image alone, here or, under DataParallel, on one
            of the GPUs: batch norm cannot learn from it.
    """
    workers = args.workers
    if workers is None:
        workers = 0 if dataset.in_memory else cores_per_process(local_world_size)
    gpus = 1 if dist.is_initialized() else max(1, torch.cuda.device_count())
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        drop_last=train and leaves_one_alone(len(sampler) % args.batch_size, gpus),
        num_workers=workers,
        persistent_workers=train and workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=as_it_is,  # __getitems__ has made the batch already
        worker_init_fn=leave_ctrl_c_to_main,
    )


def build_transforms(train_set, args, device):
    """What turns a uint8 batch on the device into the network's input.

    Returns:
        (augment, normalize): each takes uint8 (N, C, H, W) and returns float32 (N, C, H, W) of about
        mean 0 and deviation 1; augment also crops and flips each image at random, as --augment says.
    """
    mean, std = (s.float().to(device)[:, None, None] for s in train_set.channel_stats())
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    # Mirrored digits are no digits. Large images are cropped by the workers, who see the whole of them.
    flip = args.dataset != "mnist"
    padding = train_set.image_size[0] // 8 if train_set.in_memory else 0

    def normalize(images):
        return (images.contiguous(memory_format=memory_format) / std).sub_(mean / std)

    def augment(images):
        if args.augment:
            n = len(images)
            top, left = torch.randint(2 * padding + 1, (2, n), device=device)
            mirror = torch.rand(n, device=device) < (0.5 if flip else 0)
            images = crop_and_flip(images, padding, top, left, mirror)
        return normalize(images)

    return augment, normalize


def crop_and_flip(images, padding, top, left, mirror):
    """Shift each image by its own offset within a black border, then mirror those marked.

    For the same offsets this is torchvision's RandomCrop(size, padding) and horizontal flip to the pixel.

    Args:
        images: (N, C, H, W), any dtype and device.
        padding: pixels of border on every side.
        top, left: int64 (N,), 0 to 2 * padding.
        mirror: bool (N,).
    """
    height, width = images.shape[2:]
    windows = F.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    images = windows[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(mirror[:, None, None, None], images.flip(3), images)


def read_image(path):
    """Decode an image file as uint8 (3, H, W)."""
    try:
        return v2.functional.to_dtype(decode_image(path, ImageReadMode.RGB), torch.uint8, scale=True)
    except RuntimeError:  # torchvision lacks some formats (bmp, tiff) that Pillow reads
        return _read_with_pillow(path)


def _read_with_pillow(path):
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip
                image = image.convert("I").point(lambda level: level / 256)
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"{path} is no readable image ({one_line(error)}); delete it or put a good copy there"
        ) from None


def as_it_is(batch):
    return batch


def leave_ctrl_c_to_main(_):
    """In a worker: let the main process end it, and say nothing if that hangs up in the middle of a batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show = sys.excepthook
    sys.excepthook = lambda kind, *rest: None if issubclass(kind, ConnectionError) else show(kind, *rest)


def _choose(n, limit):
    """Which of n training images to use: all, or --limit of them from all over the set, always the same."""
    if limit is None or limit >= n:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:limit].sort().values


def _shapes(args):
    def draw(seed, indices):
        images = torch.empty(len(indices), 3, shapes.SIZE, shapes.SIZE, dtype=torch.uint8)
        targets = torch.empty(len(indices), dtype=torch.int64)
        for rows in torch.arange(len(indices)).split(1000):  # a chunk's temporaries fit the cache
            drawn = shapes.render(seed, indices[rows].numpy())
            images[rows], targets[rows] = map(torch.from_numpy, drawn)
        return MemoryImages(images, targets, len(shapes.CLASSES))

    return draw(0, _choose(50_000, args.limit)), draw(1, torch.arange(10_000))


def _torchvision(args):
    name = args.dataset
    build = {"cifar10": torchvision.datasets.CIFAR10, "mnist": torchvision.datasets.MNIST}[name]
    if args.download:
        _download(build, args)
    try:
        train, test = (build(args.data_dir, train=train) for train in (True, False))
    except (RuntimeError, OSError, ValueError, AssertionError, LookupError, EOFError) as error:
        if str(error).startswith("Dataset not found"):
            found = f"{name} is not in {args.data_dir}, or not whole: add --download to fetch it"
        else:
            found = f"the files of {name} in {args.data_dir} cannot be read: delete them, then add --download"
        raise UserError(f"{found}; without a network use --dataset shapes, which needs no files") from None

    def in_memory(dataset, limit):
        images = torch.as_tensor(dataset.data)  # mnist: (N, H, W); cifar10: (N, H, W, 3)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
        targets = torch.as_tensor(dataset.targets)
        if limit is not None:
            chosen = _choose(len(targets), limit)
            images, targets = images[chosen], targets[chosen]
        return MemoryImages(images, targets, num_classes=10)

    return in_memory(train, args.limit), in_memory(test, None)


def _download(build, args):
    """Fetch a dataset; of all the processes that ask for it, one downloads and the others wait."""
    timeout = socket.getdefaulttimeout()
    try:
        os.makedirs(args.data_dir, exist_ok=True)
        socket.setdefaulttimeout(30)  # a network that swallows packets must not hang the run
        with FileLock(os.path.join(args.data_dir, f".{args.dataset}.lock")):
            build(args.data_dir, download=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise UserError(
            f"cannot download {args.dataset} to {args.data_dir} ({one_line(error)}): check the network, "
            f"copy the files there by hand, or use --dataset shapes, which needs none"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)


def _folder(args):
    train_dir = os.path.join(args.data_dir, "train")
    test_dir = next((d for d in (os.path.join(args.data_dir, s) for s in ("val", "test")) if os.path.isdir(d)), None)
    if not os.path.isdir(train_dir) or test_dir is None:
        missing = "train/" if not os.path.isdir(train_dir) else "val/ or test/"
        raise UserError(
            f"--data-dir {args.data_dir} has no {missing}: expected train/CLASS/*.jpg and val/CLASS/*.jpg "
            "(or test/); name the folder that holds them with --data-dir"
        )
    paths, targets, classes = list_images(train_dir)
    test_paths, test_targets, test_classes = list_images(test_dir)
    if classes != test_classes:
        odd = sorted(set(classes) ^ set(test_classes))[0]
        only = train_dir if odd in classes else test_dir
        raise UserError(f"class {odd} is only in {only}: expected the same classes in {train_dir} and {test_dir}")
    chosen = _choose(len(paths), args.limit)
    paths, targets = [paths[k] for k in chosen], targets[chosen]

    images, test_images = _load_small(paths), None
    if images is not None:
        test_images = _load_small(test_paths)
    if test_images is not None and images.shape[1:] == test_images.shape[1:]:
        sets = MemoryImages(images, targets, len(classes)), MemoryImages(test_images, test_targets, len(classes))
    else:
        whole = v2.Compose([v2.Resize(CROP * 8 // 7), v2.CenterCrop(CROP)])
        random = v2.RandomResizedCrop(CROP) if args.augment else whole
        sets = (
            FileImages(paths, targets, len(classes), random),
            FileImages(test_paths, test_targets, len(classes), whole),
        )
    return sets


def list_images(root):
    """The image files of an ImageFolder tree: (paths, targets int64 (N,), class names)."""
    try:
        folder = torchvision.datasets.ImageFolder(root, allow_empty=True)
    except FileNotFoundError:
        raise UserError(f"{root} has no class folders: expected {root}/CLASS/*.jpg") from None
    targets = torch.tensor(folder.targets, dtype=torch.int64)
    counts = targets.bincount(minlength=len(folder.classes))
    if not counts.all():
        empty = os.path.join(root, folder.classes[int(counts.argmin())])
        raise UserError(f"{empty} has no images (.jpg, .png, ...): put some there or delete the folder")
    return [path for path, _ in folder.samples], targets, folder.classes


def _load_small(paths):
    """All images as one uint8 tensor (N, 3, H, W), or None if they are not small or not of one size."""
    first = _read_with_pillow(paths[0])  # for small files Pillow is twice as fast
    if max(first.shape) > SMALL_SIDE or len(paths) * first.numel() > SMALL_BYTES:
        return None
    images = torch.empty(len(paths), *first.shape, dtype=torch.uint8)
    for row, path in zip(images, paths, strict=True):
        image = _read_with_pillow(path)
        if image.shape != first.shape:
            return None
        row.copy_(image)
    return images
