"""Image files: how every script lists them and reads them."""

import os
import shlex
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from common.errors import UserError, one_line

# Mean and deviation of the channels of ImageNet's training images, on a scale of 0 to 255.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
SPLITTER = Path(__file__).resolve().parent.parent / "tools/prepare_imagenet.py"


class Paths:
    """The names of N files in one block of memory, each given as a str.

    A list would grow in each worker of a loader: to read a str changes its count of references, so
    that a forked process copies the page of memory in which it lies.
    """

    def __init__(self, paths):
        self.names = np.array([os.fsencode(path) for path in paths])

    def __len__(self):
        return len(self.names)

    def __getitem__(self, k):
        return os.fsdecode(self.names[k])


def find_splits(root):
    """Return the folders of training and test images: root/train, and root/val or else root/test.

    None stands for one that does not exist.
    """

    def existing(name):
        folder = os.path.join(root, name)
        return folder if os.path.isdir(folder) else None

    return existing("train"), existing("val") or existing("test")


def split_command(root):
    """Return the command that splits class folders into train/ and val/.

    Return None if `root` is no folder of two or more class folders with images.
    """
    folders = [path for path in Path(root).glob("*") if path.is_dir()]
    if len(folders) < 2 or not all(map(has_images, folders)):
        return None
    source = os.path.normpath(root)
    if os.path.basename(source) in (".", ".."):  # no name from which to make another one
        source = os.path.abspath(source)
    tool = os.path.relpath(SPLITTER)
    return shlex.join(["python", tool, source, f"{source}-split", "--val-share", "0.1"])


def has_images(folder):
    return any(path.suffix.lower() in IMG_EXTENSIONS for path in folder.glob("*"))


def list_images(root):
    """Return the image files of a folder with one folder per class.

    Returns:
        (paths, targets, classes): N Paths, int64 (N,), and the names of the classes.

    Raises:
        UserError: there are no classes, or one of them is empty.
    """
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
    return Paths(path for path, _ in folder.samples), targets, folder.classes


def check_classes(train, test):
    """Check that two datasets have the same classes, and at least two.

    Args:
        train, test: have `root`, a folder, and `classes`, a list of str.

    Raises:
        UserError: they do not.
    """
    differences = sorted(set(train.classes) ^ set(test.classes))
    if differences:
        odd = differences[0]
        root = train.root if odd in train.classes else test.root
        raise UserError(
            f"class {odd} is only in {root}: "
            f"expected the same classes in {train.root} and {test.root}"
        )
    if len(train.classes) < 2:
        raise UserError(f"1 class in {train.root}: expected 2 or more, one folder for each")


def read_image(path):
    """Decode an image file as uint8 (3, H, W).

    Raises:
        UserError: it is damaged.
    """
    try:
        image = decode_image(path, ImageReadMode.RGB)
        return v2.functional.to_dtype(image, torch.uint8, scale=True)
    except RuntimeError:
        pass  # a format that Pillow reads and torchvision does not (bmp, tiff), or a damaged file
    try:
        with Image.open(path) as image:
            return v2.functional.pil_to_tensor(to_rgb(image))
    except (OSError, SyntaxError, ValueError) as error:
        reason = one_line(error)
        raise UserError(
            f"{path} cannot be read as an image ({reason}); delete it or replace it"
        ) from None


def to_rgb(image):
    """Convert a Pillow image to RGB."""
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would clip
        image = image.convert("I").point(lambda level: level / 256)
    return image.convert("RGB")
