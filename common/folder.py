"""--dataset folder: small images that are held in memory, or photographs that workers read."""

import os

import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from common.errors import UserError
from common.images import (
    MEAN,
    STD,
    Paths,
    check_classes,
    find_splits,
    list_images,
    read_image,
    split_command,
)
from common.memory import MemoryImages, choose

SMALL_SIDE = 64  # pixels: images up to this size, all of one size, are held in memory
SMALL_BYTES = 4 * 2**30  # unless they would take more than this
CROP = 224  # pixels: the side of what the model sees of a photograph


class Photographs(Dataset):
    """Images read from files, and cropped to uint8 (3, CROP, CROP).

    Args:
        root: str, a folder with one folder per class.
        random_crops: bool. False: the center of each image.
    """

    in_memory = False
    note = ""
    channels = 3
    image_size = (CROP, CROP)

    def __init__(self, root, random_crops):
        self.root = root
        self.paths, self.targets, self.classes = list_images(root)
        self.num_classes = len(self.classes)
        if random_crops:
            self.crop = v2.RandomResizedCrop(CROP)
        else:
            self.crop = v2.Compose([v2.Resize(CROP * 8 // 7), v2.CenterCrop(CROP)])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.crop(read_image(self.paths[index])), self.targets[index]

    def channel_stats(self):
        """Return mean and standard deviation of ImageNet's channels, (3,) each, 0 to 255."""
        return torch.tensor(MEAN), torch.tensor(STD)


def load_folder(args):
    """Return the training set and the test set of --data-dir.

    Both are in memory, or both are read from files.

    Raises:
        UserError: a folder is missing, an image is damaged, or the classes differ.
    """
    train_root, test_root = find_splits(args.data_dir)
    if train_root is None or test_root is None:
        missing = "train/" if train_root is None else "val/ or test/"
        message = (
            f"--data-dir {args.data_dir} has no {missing}: "
            "expected train/CLASS/*.jpg and val/CLASS/*.jpg (or test/)"
        )
        command = split_command(args.data_dir)
        raise UserError(f"{message}; to split its class folders: {command}" if command else message)
    train = Photographs(train_root, args.augment)
    test = Photographs(test_root, random_crops=False)
    check_classes(train, test)
    chosen = choose(len(train), args.limit)
    train.paths = Paths(train.paths[k] for k in chosen)
    train.targets = train.targets[chosen]

    small_train = load_small(train)
    if small_train is not None:
        small_test = load_small(test)
        if small_test is not None and small_test.image_size == small_train.image_size:
            train, test = small_train, small_test
    unused = os.path.join(args.data_dir, "test")
    if os.path.isdir(unused) and test_root != unused:
        test.note = f"{unused} is not used, because there is a val/ too"
    return train, test


def load_small(photographs):
    """Read all images into memory. Return None if they are not small or not all of one size."""
    images = None
    for k, path in enumerate(photographs.paths):
        image = read_image(path)
        if images is None:
            size = len(photographs) * image.numel()
            if max(image.shape) > SMALL_SIDE or size > SMALL_BYTES:
                return None
            images = torch.empty(len(photographs), *image.shape, dtype=torch.uint8)
        if image.shape != images[k].shape:
            return None
        images[k] = image
    return MemoryImages(images, photographs.targets, photographs.num_classes)
