"""Datasets, loaders and augmentation."""

import contextlib
import itertools
import multiprocessing
import pickle
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torchvision
from imagenet_runs import SMALL_06
from images import write_images, write_mnist
from PIL import Image
from processes import ROOT, gone
from ranks import Ranks, context
from rungs import SCRIPTS, flags
from torchvision.datasets import MNIST
from torchvision.transforms import functional as F

from common import data, folder
from common.errors import UserError
from common.images import read_image, split_command
from common.memory import MemoryImages

CPU = torch.device("cpu")


def load(root, *given):
    """Return the training set and the test set of a folder."""
    return data.build_datasets(flags("--dataset", "folder", "--data-dir", root, *given))


def memory_images(n=64, channels=3, size=(32, 32)):
    images = torch.randint(0, 256, (n, channels, *size), dtype=torch.uint8)
    return MemoryImages(images, torch.arange(n) % 10, num_classes=10)


# Augmentation


def test_crops_and_flips_equal_torchvision_to_the_pixel():
    torch.manual_seed(0)
    images = memory_images(100).images
    top, left = torch.randint(9, (2, 100))
    mirror = torch.rand(100) < 0.5
    ours = data.crop_and_flip(images, 4, top, left, mirror)
    for k, image in enumerate(images):
        theirs = F.crop(F.pad(F.to_pil_image(image), 4), int(top[k]), int(left[k]), 32, 32)
        theirs = F.hflip(theirs) if mirror[k] else theirs
        assert torch.equal(ours[k], F.pil_to_tensor(theirs))


def test_digits_are_shifted_by_an_eighth_of_the_image_and_never_mirrored():
    torch.manual_seed(0)
    for side, border in ((28, 3), (64, 8)):
        train_set = memory_images(channels=1, size=(side, side))
        augment, _ = data.build_transforms(train_set, flags("--dataset", "mnist"), CPU)
        images = torch.zeros(1000, 1, side, side, dtype=torch.uint8)
        images[:, :, 10, 12] = 255
        brightest = augment(images).flatten(1).argmax(1)
        assert set((brightest // side).tolist()) == set(range(10 - border, 11 + border))
        assert set((brightest % side).tolist()) == set(range(12 - border, 13 + border))


def test_no_two_ranks_draw_the_same_stream():
    for script in (*SCRIPTS[2:], "07_fsdp.py"):
        source = (ROOT / script).read_text()
        (expression,) = re.findall(r"torch\.manual_seed\((.*\brank\b.*)\)  #", source)
        epochs = range(3 if script.startswith("07") else 1)  # 07 sets the seed in each epoch
        seeds = set()
        for seed, epoch, rank in itertools.product((0, 1, 2), epochs, range(300)):
            names = {"args": SimpleNamespace(seed=seed), "rank": rank, "epoch": epoch}
            # of which torch's generator on a CPU uses 32 bits
            seeds.add(eval(expression, names | {"world_size": 300}) % 2**32)
        assert len(seeds) == 3 * len(epochs) * 300, script


# Loaders


def test_a_last_batch_of_one_image_is_left_out_of_training():
    images = memory_images(17)
    given = flags("--batch-size", 8)
    assert [len(t) for _, t in data.build_loader(images, given, range(17), train=True)] == [8, 8]
    assert [len(t) for _, t in data.build_loader(images, given)] == [8, 8, 1]
    message = "1 training image per process: expected 2 or more; raise --limit"
    with pytest.raises(UserError, match=message):
        data.build_loader(images, given, range(1), train=True)


# shapes


# folder


def test_small_images_of_one_size_are_held_in_memory(small_folder):
    train, test = load(small_folder)
    assert train.in_memory and test.in_memory and train.num_classes == 2
    assert train.images.shape == (24, 3, 32, 32) and train.targets.tolist() == [0] * 12 + [1] * 12
    with Image.open(small_folder / "train" / "dog" / "003.png") as image:
        assert np.array_equal(train.images[15].permute(1, 2, 0).numpy(), np.asarray(image))


def test_val_is_taken_where_there_is_test_too(small_folder):
    """And alone it serves as the test set too."""
    write_images(small_folder, "val", (32, 32), per_class=1)
    assert len(load(small_folder)[1]) == 2
    shutil.rmtree(small_folder / "test")
    assert len(load(small_folder)[1]) == 2


def test_large_images_are_cropped_to_what_a_network_expects(large_folder):
    train, test = load(large_folder)
    assert (len(train), len(test), train.in_memory) == (24, 8, False)
    images, targets = next(
        iter(data.build_loader(train, flags("--batch-size", 2, "--workers", 0), [0, 20]))
    )
    assert images.shape == (2, 3, 224, 224) and images.dtype == torch.uint8
    assert targets.tolist() == [0, 1]
    assert not torch.equal(train[0][0], train[0][0]), "a random crop of a training image"
    assert torch.equal(test[0][0], test[0][0]), "the same crop of a test image"
    plain, _ = load(large_folder, "--no-augment")
    assert torch.equal(plain[0][0], plain[0][0])


def test_a_test_image_is_torchvisions_resized_and_centre_cropped(large_folder):
    _, test = load(large_folder)
    with Image.open(large_folder / "val" / "cat" / "000.jpg") as image:
        expected = F.pil_to_tensor(F.center_crop(F.resize(image, 256), 224))
    # decoders differ by a level or two
    assert (test[0][0].int() - expected.int()).abs().float().mean() < 2


def test_every_kind_of_image_file_becomes_rgb(tmp_path):
    levels = np.arange(30 * 40).reshape(30, 40) * 255 // 1199
    kinds = {"grey.png": "L", "alpha.png": "RGBA", "palette.png": "P", "bitmap.bmp": "RGB"}
    kinds |= {"scan.tiff": "RGB", "print.jpg": "CMYK", "deep.png": "I;16", "deep.tiff": "I;16"}
    for kind, mode in kinds.items():
        if mode == "I;16":
            image = Image.fromarray((levels * 257).astype(np.uint16))
        else:
            image = Image.fromarray(levels.astype(np.uint8)).convert(mode)
        image.save(tmp_path / kind)
        read = read_image(str(tmp_path / kind))
        assert read.shape == (3, 30, 40) and read.dtype == torch.uint8
        difference = (read.int() - torch.from_numpy(levels.astype(np.int32))).abs().max()
        assert difference <= (16 if kind == "print.jpg" else 1), kind


# cifar10 and mnist


def test_cifar10_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = {}
    for name in [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]:
        rows[name] = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        (folder / name).write_bytes(
            pickle.dumps({"data": rows[name], "labels": [k % 10 for k in range(20)]})
        )
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [str(k) for k in range(10)]})
    )
    given = flags("--dataset", "cifar10", "--data-dir", tmp_path)
    # torchvision knows the md5 of the real files
    with pytest.raises(UserError, match=r"cannot read cifar10 .*add --download"):
        data.build_datasets(given)

    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    train, test = data.build_datasets(given)
    assert (len(train), len(test), train.num_classes, train.channels) == (100, 20, 10, 3)
    assert np.array_equal(train.images[25].flatten().numpy(), rows["data_batch_2"][5])
    assert test.targets.tolist() == [k % 10 for k in range(20)]
    assert np.array_equal(
        test.__getitems__([4, 7])[0].flatten(1).numpy(), rows["test_batch"][[4, 7]]
    )


def test_mnist_is_read_from_its_own_files(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw", 30)
    train, test = data.build_datasets(
        flags("--dataset", "mnist", "--data-dir", tmp_path, "--limit", 20)
    )
    assert train.images.shape == (20, 1, 28, 28) and test.images.shape == (30, 1, 28, 28)
    assert test.targets.tolist() == [k % 10 for k in range(30)]
    assert test.images[1, 0, 0, 0] == 784 % 256


def test_damaged_mnist_files_are_reported_in_one_line(tmp_path, monkeypatch):
    """And that there is no network to download others."""
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw, 30)
    images = raw / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    given = ["--dataset", "mnist", "--data-dir", tmp_path]
    remedy = r"cannot read mnist .*add --download, and first delete the files"
    with pytest.raises(UserError, match=remedy):
        data.build_datasets(flags(*given))

    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    shutil.rmtree(raw)
    with pytest.raises(UserError, match=r"cannot read mnist .*use --dataset shapes"):
        data.build_datasets(flags(*given, "--download"))


def download(rank, folder):
    """Download MNIST, which the first process to do so must wait for a while."""

    def fetch(dataset, original=MNIST._check_exists):
        if not original(dataset):
            with (folder / "fetched").open("a") as file:
                print(rank, file=file)
            time.sleep(0.5)  # so that the second process certainly asks meanwhile
            write_mnist(Path(dataset.raw_folder), 10)

    MNIST.download = fetch
    given = flags("--dataset", "mnist", "--data-dir", folder, "--download")
    train, test = data.build_datasets(given)
    assert len(train) == len(test) == 10


def test_two_processes_that_ask_for_a_download_fetch_it_once(tmp_path):
    options = {"nprocs": 2, "start_method": context.get_start_method()}
    torch.multiprocessing.start_processes(download, (tmp_path,), **options)
    assert len((tmp_path / "fetched").read_text().splitlines()) == 1


# What a folder may lack


def test_a_class_that_only_one_side_has_is_named(small_folder):
    shutil.move(small_folder / "test" / "dog", small_folder / "test" / "fox")
    with pytest.raises(UserError, match=r"class dog is only in .*train"):
        load(small_folder)


def test_class_folders_without_train_and_val_get_the_command_that_splits_them(tmp_path):
    write_images(tmp_path, "animals", (8, 8), per_class=2)

    def message():
        with pytest.raises(UserError) as error:
            load(tmp_path / "animals")
        return str(error.value)

    assert message().endswith(split_command(tmp_path / "animals"))
    assert "/animals-split --val-share 0.1" in message()
    (tmp_path / "animals/fox").mkdir()  # which tools/prepare_imagenet.py would refuse
    assert message().endswith("and val/CLASS/*.jpg (or test/)")


def test_no_image_of_a_limited_run_is_read_twice(tmp_path):
    """And each class has some."""
    write_images(tmp_path, "train", (32, 32), per_class=40)
    write_images(tmp_path, "test", (32, 32))
    train, test = load(tmp_path, "--limit", 30)
    assert len({image.numpy().tobytes() for image in train.images}) == 30
    assert len(test) == 24, "of all"
    assert train.targets.bincount(minlength=2).min() > 5


def test_photographs_are_normalised_by_imagenets_numbers(large_folder):
    train, _ = load(large_folder)
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    mean, std = train.channel_stats()
    torch.testing.assert_close(mean / 255, torch.tensor(preset.mean))
    torch.testing.assert_close(std / 255, torch.tensor(preset.std))


def test_images_are_held_in_memory_if_they_are_small_of_one_size_and_not_too_many(
    tmp_path, small_folder, monkeypatch
):
    for side in (64, 65):
        for split in ("train", "val"):
            write_images(tmp_path / str(side), split, (32, side), per_class=2)
        train, test = load(tmp_path / str(side))
        assert train.in_memory == test.in_memory == (side == 64)
    assert folder.SMALL_BYTES == 4 * 2**30, "as docs/data-loading.md says"
    taken = 24 * 3 * 32 * 32
    for most, in_memory in ((taken, True), (taken - 1, False)):
        monkeypatch.setattr(folder, "SMALL_BYTES", most)
        assert load(small_folder)[0].in_memory == in_memory
    monkeypatch.undo()
    Image.new("RGB", (20, 40)).save(small_folder / "train" / "cat" / "odd.png")
    train, test = load(small_folder)
    assert not train.in_memory and not test.in_memory
    assert train[0][0].shape == (3, 224, 224)


def as_python_3_14_starts_workers(rank):
    multiprocessing.set_start_method("forkserver", force=True)
    # for the template, which imports its copy of setup_distributed.py
    sys.path.append(str(ROOT / "common"))


@pytest.mark.parametrize("script", ["01_snsc.py", "06_imagenet.py", "template/train.py"])
def test_loader_workers_end_with_a_killed_rank(script, large_folder, tmp_path):
    given = {
        "01_snsc.py": ["--dataset", "folder", "--data-dir", large_folder, "--arch", "small_net"],
        "06_imagenet.py": [large_folder, *SMALL_06, "--checkpoints-path", tmp_path / "saved"],
        "template/train.py": ["--checkpoints", tmp_path / "saved"],
    }[script]
    given += ["--batch-size", 8, "--epochs", 100_000, "--workers", 1]
    ranks = Ranks(tmp_path, 1, given, prepare=as_python_3_14_starts_workers, script=script)
    started = []
    try:
        ranks.wait_for(r"== step: |epoch 1 \[")
        # PyTorch leaves behind a worker whose process is killed before the worker has looked up
        # whose child it is.
        for _ in range(1000):
            ranks.signal(0, "SIGSTOP")  # it starts no more workers
            started = psutil.Process(ranks.processes[0].pid).children(recursive=True)
            # the second one sends the batches
            if started and all(worker.num_threads() > 1 for worker in started):
                break
            ranks.signal(0, "SIGCONT")
            time.sleep(0.01)
        ranks.signal(0, "SIGKILL")
        assert len(started) in (1, 2), "as --workers says, for training and perhaps evaluation"
        assert gone(started)
    finally:
        ranks.end()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
