"""The images of 06: from a folder, or generated.

The random crop of an image depends only on seed, epoch and image, whichever process makes it. So a
run that is resumed, or continues on another number of processes, sees the same pixels.
"""

import os

import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from common.errors import UserError
from common.images import check_classes, find_splits, list_images, read_image, split_command

IGNORED = -100  # the target that nn.CrossEntropyLoss ignores
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
        self.root = root
        self.seed = seed
        self.paths, self.targets, self.classes = list_images(root)
        self.num_classes = len(self.classes)
        self.channels = 3
        self.image_size = (size, size)
        if seed is None:
            self.transform = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])
        else:
            self.transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.paths)

    def __getitems__(self, keys):
        """Read a batch.

        Args:
            keys: list of N (epoch, index).

        Returns:
            (images, targets, damaged): uint8 (N, 3, size, size), int64 (N,), and int64 (any,), the
            indices of images that are damaged.
        """
        images = torch.zeros(len(keys), 3, *self.image_size, dtype=torch.uint8)
        targets = torch.full((len(keys),), IGNORED)
        damaged = []
        for k, (epoch, index) in enumerate(keys):
            image, used = self._read(index, damaged)
            if image is None:
                continue
            if self.seed is not None:  # integers have the same hash in every process
                torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
            images[k] = self.transform(image)
            targets[k] = self.targets[used]
        return images, targets, torch.tensor(damaged, dtype=torch.int64)

    def _read(self, index, damaged):
        """Return an image or its replacement, and the index of what was read.

        If there is neither, return (None, index). `damaged` gets the indices of damaged images.
        """
        tries = 1 if self.seed is None else MAX_TRIES
        for used in range(index, index + tries):
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
        self.count = count
        self.num_classes = num_classes
        self.classes = [str(k) for k in range(num_classes)]
        self.channels = 3
        self.image_size = (size, size)
        random = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (64, 3, size, size), generator=random, dtype=torch.uint8)
        self.targets = torch.randint(num_classes, (64,), generator=random)

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
        train_set = DummyImages(args.dummy, args.image_size)
        val_set = DummyImages(max(1, args.dummy // 25), args.image_size)
        return train_set, val_set
    train, val = find_folders(args.train_path, args.val_path)
    train_set = Images(train, args.image_size, args.seed)
    val_set = Images(val, args.image_size)
    check_classes(train_set, val_set)
    return train_set, val_set


def find_folders(train, val):
    """Return the folders of training and validation images, given a folder of both or one for each.

    Args:
        train: str, holds class folders; or train/ and, unless `val` is given, val/ or test/.
        val: str, holds class folders, or val/ or test/ beside train/; or None.

    Raises:
        UserError: they do not exist.
    """
    root = train
    if not os.path.isdir(root):
        raise UserError(
            f"{root} is not a folder: expected one with train/CLASS/*.jpg and val/CLASS/*.jpg"
        )
    train_split, val_split = find_splits(root)
    if train_split:
        train = train_split
        val = val or val_split
    if val and all(find_splits(val)):  # the folder of both: without train/, val/ could be a class
        val = find_splits(val)[1]
    if val is None:
        found = f"{root} has no train/ with val/ or test/ beside it"
    elif not os.path.isdir(val):
        found = f"{val} is not a folder"
    else:
        return train, val
    remedy = "name their folder with --val-path DIR"
    command = split_command(root)
    if command:
        remedy = f"{remedy}, or split {root}: {command}"
    raise UserError(f"{found}: expected validation images in class folders; {remedy}")


def unused_test_folder(train, val):
    """Return the folder test/ if there is one that find_folders() leaves aside, else None."""
    used_train, used_val = find_folders(train, val)
    test = os.path.join(train, "test")
    if used_train == train or not os.path.isdir(test):  # test/ would be a class
        return None
    return None if os.path.samefile(used_val, test) else test
