"""--dataset folder: one folder per class, of small images that are held in memory, or of photographs."""

import os

import torch
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from common.data import MemoryImages, choose
from common.errors import UserError, one_line

SMALL_SIDE = 64  # pixels: images up to this size, all of one size, are held in memory
SMALL_BYTES = 4 * 2**30  # unless they would take more than this
CROP = 224  # pixels: the side of what the model sees of a photograph
# mean and deviation, on a scale of 0 to 255
IMAGENET_STATS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Photographs(ImageFolder):
    """Images read from files, cropped to uint8 (3, CROP, CROP): at random for training, or from the center."""

    in_memory, channels, image_size = False, 3, (CROP, CROP)
    num_classes = property(lambda self: len(self.classes))

    def __init__(self, root, random_crops):
        crop = (
            [v2.RandomResizedCrop(CROP)]
            if random_crops
            else [v2.Resize(CROP * 8 // 7), v2.CenterCrop(CROP)]
        )
        super().__init__(root, v2.Compose([v2.PILToTensor(), *crop]), loader=open_image)

    def channel_stats(self):
        """Return mean and standard deviation of each channel of ImageNet, (3,) each, on a scale of 0 to 255."""
        return torch.tensor(IMAGENET_STATS)


def load_folder(args):
    """Return the training set and the test set of --data-dir, both in memory or both read from files.

    Raises:
        UserError: a folder is missing, an image is damaged, or the classes differ.
    """
    folders = [os.path.join(args.data_dir, split) for split in ("train", "val", "test")]
    test_folder = folders[1] if os.path.isdir(folders[1]) else folders[2]
    try:
        train, test = (
            Photographs(folders[0], args.augment),
            Photographs(test_folder, random_crops=False),
        )
    # names the folder that is missing, or the class that has no images
    except FileNotFoundError as error:
        expected = "expected train/CLASS/*.jpg and val/CLASS/*.jpg (or test/)"
        raise UserError(f"--data-dir {args.data_dir}: {one_line(error)}; {expected}") from None
    differences = sorted(set(train.classes) ^ set(test.classes))
    if differences or len(train.classes) < 2:
        problem = (
            f"only one of them has the class {differences[0]}"
            if differences
            else "they have 1 class"
        )
        raise UserError(
            f"{train.root} and {test.root}: {problem}; expected the same classes in both, 2 or more"
        )
    train.samples = [train.samples[k] for k in choose(len(train), args.limit)]
    small = load_small(train)
    small_test = small and load_small(test)
    same_size = small_test and small.image_size == small_test.image_size
    return (small, small_test) if same_size else (train, test)


def load_small(folder):
    """Read all images of a folder into memory. Return None if they are not small or not all of one size."""
    images = None
    for k, (path, _) in enumerate(folder.samples):
        image = v2.functional.pil_to_tensor(open_image(path))
        if images is None:
            if max(image.shape) > SMALL_SIDE or len(folder) * image.numel() > SMALL_BYTES:
                return None
            images = torch.empty(len(folder), *image.shape, dtype=torch.uint8)
        if image.shape != images[k].shape:
            return None
        images[k] = image
    return MemoryImages(
        images, torch.tensor([target for _, target in folder.samples]), len(folder.classes)
    )


def open_image(path):
    """Open an image file as an RGB image of Pillow."""
    try:
        return default_loader(path)
    except (OSError, SyntaxError, ValueError) as error:
        reason = one_line(error)
        raise UserError(
            f"{path} cannot be read as an image ({reason}); delete it or replace it"
        ) from None
