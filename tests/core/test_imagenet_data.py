"""The images of 06: folders, crops, damaged files."""

import time

import pytest
import torch
import torchvision
from imagenet_runs import final, parse_06
from images import cut_off, write_images
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from common.errors import UserError
from common.images import split_command
from imagenet import checkpoint, datasets, loader
from imagenet.datasets import IGNORED, Images, build_datasets, find_folders
from imagenet.loader import build_normalize


@pytest.fixture
def damaged_folder(tmp_path):
    """A folder of 240 images, of which one to train on and one to test on are cut off."""
    for split in ("train", "val"):
        write_images(tmp_path / "images", split, (40, 44), per_class=60, suffix=".jpg")
        cut_off(tmp_path / "images" / split / "cat/007.jpg")
    return tmp_path / "images"


def test_a_damaged_image_is_named_once_and_left_out(train, damaged_folder):
    ranks = train("run", 2, damaged_folder, "--batch-size", 60, "--epochs", 2)
    assert ranks.wait() == [0, 0], ranks.output()
    output = ranks.output(0) + ranks.output(1)
    for split in ("train", "val"):
        assert output.count(f"damaged, left out: {damaged_folder}/{split}/cat/007.jpg") == 1
    assert "| 119 images" in output and "2 classes" in output


class Paths(list):
    """The paths of images as a dataset."""

    paths = property(lambda self: self)


def test_one_image_in_a_hundred_may_be_damaged(alone):
    damaged = loader.DamagedImages(Paths(f"{k}.jpg" for k in range(100)), alone)
    damaged.add(torch.tensor([7]))
    damaged.sync()
    damaged.add(torch.tensor([5]))
    message = r"^2 of 100 images are damaged, for example 5\.jpg: expected at most 1%"
    with pytest.raises(UserError, match=message):
        damaged.sync()


def test_validation_images_lie_beside_or_where_val_path_says(one_each, tmp_path):
    write_images(tmp_path, "test", (40, 44), ["a", "b"], 1)
    train, val = str(one_each / "train"), str(one_each / "val")
    assert find_folders(str(one_each), None) == (train, val)
    assert find_folders(str(one_each), str(tmp_path / "test")) == (train, str(tmp_path / "test"))
    assert find_folders(train, val) == (train, val)
    assert find_folders(train, str(one_each)) == (train, val)
    (tmp_path / "test/val").mkdir()  # a class of this name
    assert find_folders(train, str(tmp_path / "test")) == (train, str(tmp_path / "test"))
    (tmp_path / "test/val").rmdir()
    with pytest.raises(UserError, match=r"class 00 is only in .*expected the same classes in"):
        build_datasets(parse_06(one_each, "--val-path", tmp_path / "test"))


def test_06_names_the_command_that_splits_class_folders(one_each, tmp_path):
    write_images(tmp_path, "animals", (8, 8), per_class=2)
    animals = str(tmp_path / "animals")
    with pytest.raises(UserError) as error:
        find_folders(animals, None)
    remedy = f"; name their folder with --val-path DIR, or split {animals}: "
    assert str(error.value).endswith(remedy + split_command(animals))
    assert find_folders(animals, str(one_each / "val")) == (animals, str(one_each / "val"))
    half = write_images(tmp_path / "half", "train", (8, 8), per_class=1)
    with pytest.raises(UserError, match=r"; name their folder with --val-path DIR$"):
        find_folders(str(half), None)


def test_a_crop_depends_on_seed_epoch_and_image_alone(one_each):
    first, second = Images(one_each / "train", 32, seed=0), Images(one_each / "train", 32, seed=1)
    images, targets, damaged = first.__getitems__([(0, 3), (1, 3), (0, 5)])
    assert torch.equal(first.__getitems__([(0, 5)])[0][0], images[2])
    assert targets.tolist() == [3, 3, 5]
    assert not torch.equal(images[0], images[1]), "another one in each epoch"
    assert not torch.equal(second.__getitems__([(0, 3)])[0][0], images[0])
    assert len(damaged) == 0 and images.dtype == torch.uint8


def test_half_of_the_images_are_mirrored_in_training_alone(tmp_path):
    """Of a picture that grows lighter from left to right."""
    (tmp_path / "grey").mkdir()
    levels = torch.arange(0, 240, 4, dtype=torch.uint8).expand(3, 60, 60)
    to_pil_image(levels).save(tmp_path / "grey/ramp.png")

    def mirrored(images):
        left, right = images.float().mean((1, 2)).chunk(2, dim=1)
        return (left.mean(1) > right.mean(1)).sum().item()

    keys = [(epoch, 0) for epoch in range(200)]
    assert 75 < mirrored(Images(tmp_path, 32, seed=0).__getitems__(keys)[0]) < 125
    assert mirrored(Images(tmp_path, 32).__getitems__(keys)[0]) == 0


def test_validation_images_are_as_torchvisions_published_ones(large_folder):
    images = Images(large_folder / "val", 224)
    prepared = build_normalize(False, torch.device("cpu"))(
        images.__getitems__([(0, k) for k in range(8)])[0]
    )
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    expected = torch.stack([preset(Image.open(path)) for path in images.paths])
    # Levels of 0 to 255 are rounded here before they are normalized; Pillow resizes with a rounding
    # of its own.
    assert (prepared - expected).abs().max() < 2.5 / 255 / 0.22


def test_a_damaged_image_is_replaced_in_training_alone(damaged_folder):
    """By the next one, with its own target."""
    root = damaged_folder / "train"
    train_set = Images(root, 32, seed=0)
    val_set = Images(root, 32)
    index = list(train_set.paths).index(str(root / "cat/007.jpg"))
    cut_off(root / "cat/059.jpg")  # the last of its class
    images, targets, damaged = train_set.__getitems__([(0, index), (0, 59), (0, 3)])
    assert targets.tolist() == [0, 1, 0] and damaged.tolist() == [index, 59]
    assert images.flatten(1).any(dim=1).all()
    images, targets, damaged = val_set.__getitems__([(0, index), (0, 3)])
    assert targets.tolist() == [IGNORED, 0] and damaged.tolist() == [index]


def wait_for_slow_disks(rank):
    """Rank 0 lists its files slowly, writes slowly and reads slowly."""

    def write(*given, original=checkpoint.write_file):
        time.sleep(6)
        original(*given)

    def build(args, original=datasets.build_datasets):
        time.sleep(0 if rank else 6)  # the others wait for it longer than a barrier's timeout
        return original(args)

    def read(path, original=checkpoint.read_file):
        time.sleep(6)
        return original(path)

    datasets.build_datasets = build
    checkpoint.write_file = write
    checkpoint.read_file = read


def test_a_slow_disk_is_waited_for_longer_than_the_timeout(train, one_each, tmp_path):
    options = [one_each, "--batch-size", 20, "--epochs", 1, "--eval-every", 0, "--timeout", 4]
    ranks = train("run", 2, *options, prepare=wait_for_slow_disks)
    assert ranks.wait() == [0, 0], ranks.output()
    assert final(tmp_path / "run")["step"] == 2
    again = train("run", 2, *options, "--resume", prepare=wait_for_slow_disks)
    assert again.wait() == [0, 0], again.output()
    assert "resumed from" in again.output()
