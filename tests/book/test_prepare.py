"""tools/prepare_imagenet.py: archives, splits, smaller images, interruptions, damage."""

import concurrent.futures
import errno
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import scipy.io
from imagenet_runs import parse_06
from PIL import Image
from processes import ROOT, gone

from common.errors import UserError
from common.images import split_command
from imagenet.datasets import find_folders
from tools import prepare_imagenet as prepare


def photo(size=(40, 30), seed=0, kind="JPEG"):
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()


@pytest.fixture
def flowers(tmp_path):
    """Two classes of twenty photographs, one folder per class."""
    for label in ("rose", "tulip"):
        for k in range(20):
            path = tmp_path / "flowers" / label / f"{k}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(seed=k))
    return tmp_path / "flowers"


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["prepare_imagenet.py", *map(str, flags), "--workers", "1"])
    prepare.main(prepare.parse_args())


def files(folder):
    paths = [
        path for split in ("train", "val") for path in (folder / split).rglob("*") if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in paths if path.suffix != ".new"
    }


def test_class_folders_are_split_by_name(flowers, tmp_path, monkeypatch):
    """New images move no old ones, in the same folder and in another."""
    run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
    run(monkeypatch, flowers, tmp_path / "few", "--val-share", 0.0001)
    before = files(tmp_path / "a")
    originals = {name: (flowers / name.split("/", 1)[1]).read_bytes() for name in before}
    assert len(before) == 40 and before == originals
    few = files(tmp_path / "few")
    for label in ("rose", "tulip"):
        assert 1 <= sum(name.startswith(f"val/{label}/") for name in before) <= 12
        assert sum(name.startswith(f"val/{label}/") for name in few) == 1, "each class has one"
    for k in range(100, 140):  # the hash of some of these names is lower
        (flowers / f"rose/{k}.jpg").write_bytes(photo(seed=k))
    run(monkeypatch, flowers, tmp_path / "b", "--val-share", 0.25)
    run(monkeypatch, flowers, tmp_path / "few", "--val-share", 0.0001)
    assert before.items() <= files(tmp_path / "b").items()
    assert few.items() <= files(tmp_path / "few").items() and len(files(tmp_path / "few")) == 80


def test_the_command_for_class_folders_can_be_typed_as_it_is(flowers, tmp_path, monkeypatch):
    """Also with a space in the name, from another folder, and for the folder in which one is."""
    photographs = flowers.rename(tmp_path / "my photographs")
    for folder, root in ((tmp_path, "my photographs/"), (photographs, ".")):
        monkeypatch.chdir(folder)
        _, tool, *words = shlex.split(split_command(root))
        assert os.path.samefile(tool, prepare.__file__)
        run(monkeypatch, *words)
        assert find_folders(words[1], None) == (f"{words[1]}/train", f"{words[1]}/val")
        shutil.rmtree(words[1])
    assert words[0] == str(photographs)


def test_the_next_command_starts_from_trained_weights_for_few_images(
    flowers, tmp_path, monkeypatch, capsys
):
    target = tmp_path / "new photographs"
    run(monkeypatch, flowers, target, "--val-share", 0.25)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("next: python 06_imagenet.py ")
    args = parse_06(*shlex.split(line)[3:])
    assert (args.train_path, args.new_head) == (str(target), True)
    assert args.weights == "torchvision:DEFAULT" and args.epochs == 10
    command = line.removeprefix("next: ").replace(f"'{target}'", "data/flowers")
    assert command in (ROOT / "docs/06_imagenet.md").read_text()
    imagenet = prepare.next_command("data/imagenet", 1_281_167)
    assert imagenet == "python 06_imagenet.py data/imagenet @recipes/resnet18.args"


def test_a_folder_with_train_and_val_keeps_its_splits(flowers, tmp_path, monkeypatch):
    source = tmp_path / "source"
    for split in ("train", "val"):
        shutil.copytree(flowers, source / split)
    (source / "val/rose/0.jpg").unlink()
    run(monkeypatch, source, tmp_path / "a")
    assert files(tmp_path / "a") == files(source) and len(files(source)) == 79
    (source / "train/rose/0.png").write_bytes(photo(kind="PNG"))
    found = r"rose/0\.jpg and .*rose/0\.png would both be train/rose/0\.jpg: expected one of them"
    with pytest.raises(UserError, match=found):
        run(monkeypatch, source, tmp_path / "b", "--short-side", 20)
    assert not (tmp_path / "b").exists()


def test_large_images_are_resized_and_small_ones_kept(flowers, tmp_path, monkeypatch):
    (flowers / "rose/large.png").write_bytes(photo((200, 100), kind="PNG"))
    Image.new("RGBA", (20, 10)).save(flowers / "rose/small.png")  # a JPEG cannot be transparent
    deep = np.full((100, 100), 100 * 256, np.uint16)  # 16 bits per pixel
    Image.fromarray(deep).save(flowers / "rose/deep.png")
    target = tmp_path / "a"
    run(monkeypatch, flowers, target, "--val-share", 0.25, "--short-side", 50)
    (deep,) = target.rglob("deep.jpg")
    assert np.abs(np.asarray(Image.open(deep), int) - 100).max() <= 1, "scaled, and not clipped"
    (large,) = target.rglob("large.jpg")
    (small,) = target.rglob("small.jpg")
    (kept,) = target.rglob("rose/7.jpg")
    assert (Image.open(large).size, Image.open(large).format) == ((100, 50), "JPEG")
    assert (Image.open(small).size, Image.open(small).format) == ((20, 10), "JPEG")
    assert kept.read_bytes() == (flowers / "rose/7.jpg").read_bytes()


def test_an_interrupted_run_starts_no_further_images_and_continues(
    flowers, tmp_path, monkeypatch, capsys
):
    def interrupt(*_):
        raise KeyboardInterrupt

    target = tmp_path / "a"
    given = [flowers, target, "--val-share", 0.25]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "CHUNK", 1)
        patch.setattr(prepare.tqdm, "update", interrupt)
        run(monkeypatch, *given)
    begun = files(target)
    assert 0 < len(begun) < 40, "those that had been started are finished, the others left"
    mine, *_ = begun
    (target / mine).write_bytes(b"mine")
    run(monkeypatch, *given)
    assert f"40 images, {len(begun)} of them done before" in capsys.readouterr().out
    whole = {name: (flowers / name.split("/", 1)[1]).read_bytes() for name in files(target)}
    assert len(whole) == 40 and files(target) == whole | {mine: b"mine"}, "none is overwritten"
    found = r"was made with val_share 0\.25, not 0\.5: expected the same flags"
    with pytest.raises(UserError, match=found):
        run(monkeypatch, flowers, target, "--val-share", 0.5)


def test_damaged_images_are_named_left_out_and_counted(flowers, tmp_path, monkeypatch, capsys):
    data = photo()
    (flowers / "rose/half.jpg").write_bytes(data[: len(data) // 2])
    (flowers / "rose/text.jpg").write_text("no image")
    (flowers / "rose/gone.jpg").symlink_to("deleted.jpg")
    for done in (0, 40):  # a second run tries them again
        run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
        out, err = capsys.readouterr()
        named = [line.split()[5] for line in err.splitlines() if line.startswith("damaged")]
        assert sorted(Path(name).name for name in named) == ["gone.jpg", "half.jpg", "text.jpg"]
        assert f"43 images, {done} of them done before | 1 processes" in out
        found = re.search(r"(\d+) training and (\d+) validation images, less 3 damaged ones", out)
        names = list(files(tmp_path / "a"))
        val = sum(name.startswith("val/") for name in names)
        assert len(names) == 40 and sum(map(int, found.groups())) == 43
        assert 0 < val <= int(found[2]) <= val + 3 < 20
    for path in flowers.rglob("*.jpg"):
        path.unlink()
        path.write_text("no image")
    with pytest.raises(UserError, match="none of 43 images can be read: expected JPEG, PNG or"):
        run(monkeypatch, flowers, tmp_path / "b", "--val-share", 0.25)


def test_a_class_that_val_lost_to_damage_is_named_with_a_remedy_that_works(
    flowers, tmp_path, monkeypatch
):
    target = tmp_path / "a"
    given = [flowers, target, "--val-share", 0.0001]  # one image of each class
    run(monkeypatch, *given)
    (name,) = (path.name for path in (target / "val/tulip").iterdir())
    shutil.rmtree(target)
    (flowers / "tulip" / name).write_text("no image")
    remedy = f"{target}/train/tulip: expected each class in train/ and val/; replace or delete"
    with pytest.raises(UserError, match=f"class tulip is only in {remedy} its damaged images"):
        run(monkeypatch, *given)
    (flowers / "tulip" / name).unlink()
    shutil.rmtree(target / "train/tulip")
    run(monkeypatch, *given)
    assert len(list((target / "val/tulip").iterdir())) == 1 and len(files(target)) == 39


def test_names_may_be_long_or_not_utf_8(flowers, tmp_path, monkeypatch):
    for name in ("x" * 245 + ".jpg", os.fsdecode(b"caf\xe9.jpg")):
        (flowers / "rose" / name).write_bytes(photo())
    run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
    assert len(files(tmp_path / "a")) == 42


def test_a_wrong_folder_is_refused_and_left_alone(flowers, tmp_path, monkeypatch):
    share = ["--val-share", 0.1]
    target = tmp_path / "a"
    for change, flags, message in (
        (lambda: None, [], r"has neither train/ nor ILSVRC2012_img_train\.tar; to split class fol"),
        ((flowers / "empty").mkdir, share, "empty has no images"),
        ((flowers / "train").mkdir, [], "has train/ and no val/"),
        ((flowers / "val").mkdir, share, "has validation images; leave the flag out"),
        ((flowers / prepare.VAL_TAR).touch, [], f"has no {prepare.TRAIN_TAR}"),
        (lambda: shutil.rmtree(flowers / "val"), share, "has validation images; leave the flag"),
    ):
        change()
        with pytest.raises(UserError, match=message):
            run(monkeypatch, flowers, target, *flags)
    assert not target.exists()
    with pytest.raises(UserError, match="expected another place"):
        run(monkeypatch, flowers, flowers / "tulip/a")
    (flowers / prepare.VAL_TAR).unlink()
    shutil.rmtree(flowers / "train")
    shutil.rmtree(flowers / "empty")
    target.mkdir()
    (target / "photo.jpg").touch()  # somebody else's
    with pytest.raises(UserError, match=r"/a is not empty and was not made by this command: name"):
        run(monkeypatch, flowers, target, *share)
    assert [path.name for path in target.iterdir()] == ["photo.jpg"]
    for wrong in ("photo.jpg", "photo.jpg/b"):
        with pytest.raises(UserError, match=r"photo\.jpg.*: expected a folder to write to; name"):
            run(monkeypatch, flowers, target / wrong, *share)
    # left by a run that was killed before its first image
    (target / "photo.jpg").rename(target / ".123.new")
    run(monkeypatch, flowers, target, *share)
    settings = (target / prepare.SETTINGS).read_text()
    (target / prepare.SETTINGS).write_text("")
    with pytest.raises(UserError, match=r"prepared\.json is damaged: .* echo '\{") as error:
        run(monkeypatch, flowers, target, *share)
    command = str(error.value).partition("repair it: ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert (target / prepare.SETTINGS).read_text() == settings
    run(monkeypatch, flowers, target, *share)


def test_a_disk_that_is_too_small_is_named(flowers, tmp_path, monkeypatch):
    with open(flowers / "rose/huge.jpg", "wb") as file:
        file.truncate(3 * 2**30)  # a file of zeros, which takes no space
    free = SimpleNamespace(free=int(2.5 * 2**30))
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match=r"about 3\.0 GiB to write, 2\.5 GiB free"):
        run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
    assert not files(tmp_path / "a")

    def full(path, data, write=Path.write_bytes):
        if path.parent != tmp_path / "a":  # which has room for the settings
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    (flowers / "rose/huge.jpg").unlink()
    threads = concurrent.futures.ThreadPoolExecutor  # which share what is patched
    monkeypatch.setattr(prepare.concurrent.futures, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(prepare, "start_worker", lambda: None)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"No space left on device: .* run the same command again"):
        run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25, "--short-side", 20)


def test_a_worker_that_is_killed_is_named(flowers, tmp_path, monkeypatch):
    def fail(_):  # as a pool of processes does, of which one is killed
        raise concurrent.futures.BrokenExecutor

    threads = concurrent.futures.ThreadPoolExecutor  # which share what is patched
    monkeypatch.setattr(prepare.concurrent.futures, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(prepare, "start_worker", lambda: None)
    monkeypatch.setattr(prepare, "read", fail)
    found = "a process was killed, .*: expected enough for 1 processes; .* again with --workers 1"
    with pytest.raises(UserError, match=found):
        run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)


def write_tar(path, members):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """ImageNet's three files: two classes of three training images, and five validation images."""
    folder = tmp_path / "archives"
    folder.mkdir()
    classes = {}
    for k, label in enumerate(("n01", "n02")):
        write_tar(
            tmp_path / "class.tar", {f"{label}_{i}.JPEG": photo(seed=10 * k + i) for i in range(3)}
        )
        classes[f"{label}.tar"] = (tmp_path / "class.tar").read_bytes()
    write_tar(folder / prepare.TRAIN_TAR, classes)
    write_tar(
        folder / prepare.VAL_TAR,
        {f"ILSVRC2012_val_{k:08}.JPEG": photo(seed=100 + k) for k in (3, 1, 2, 5, 4)},
    )
    kinds = [
        ("ILSVRC2012_ID", "i4"),
        ("WNID", "O"),
        ("words", "O"),
        ("gloss", "O"),
        ("num_children", "i4"),
    ]
    synsets = np.array(
        [(1, "n01", "tench, fish", "", 0), (2, "n02", "shark", "", 0), (3, "n99", "animal", "", 2)],
        kinds,
    )
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": synsets})
    kit = "ILSVRC2012_devkit_t12/data"
    labels = b"2\n1\n2\n1\n1\n"
    write_tar(
        folder / prepare.DEVKIT,
        {
            f"{kit}/meta.mat": meta.getvalue(),
            f"{kit}/ILSVRC2012_validation_ground_truth.txt": labels,
        },
    )
    # the sum of the real file
    monkeypatch.setattr("torchvision.datasets.imagenet._verify_archive", lambda *_: None)
    return folder


def test_imagenets_archives_become_class_folders(archives, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        patch.setitem(sys.modules, "scipy.io", None)
        with pytest.raises(UserError, match=r"with scipy, which is missing; pip install scipy$"):
            run(monkeypatch, archives, tmp_path / "a")
    run(monkeypatch, archives, tmp_path / "a")
    train = {
        f"train/{label}/{label}_{i}.JPEG": photo(seed=10 * k + i)
        for k, label in enumerate(("n01", "n02"))
        for i in range(3)
    }
    labels = ["n02", "n01", "n02", "n01", "n01"]
    val = {
        f"val/{labels[k - 1]}/ILSVRC2012_val_{k:08}.JPEG": photo(seed=100 + k) for k in range(1, 6)
    }
    assert files(tmp_path / "a") == train | val
    write_tar(archives / prepare.VAL_TAR, {"ILSVRC2012_val_00000001.JPEG": photo()})
    with pytest.raises(UserError, match=r"has 1 images, and .* labels for 5"):
        run(monkeypatch, archives, tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_preparation_leaves_no_process_and_no_half_image(flowers, tmp_path, number):
    """The same command completes it."""
    for k in range(300):
        (flowers / f"rose/large{k}.jpg").write_bytes(photo((300, 300), seed=k))
    command = [sys.executable, "tools/prepare_imagenet.py", flowers, tmp_path / "a"]
    command += ["--val-share", "0.25"]
    command += ["--short-side", "200", "--workers", "3"]
    process = subprocess.Popen(command, cwd=ROOT)
    while not list((tmp_path / "a").rglob("*.jpg")):
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 3
    process.send_signal(number)
    assert process.wait(60) == (143 if number == signal.SIGTERM else -number)
    assert gone(workers, seconds=30)
    for name in files(tmp_path / "a"):
        Image.open(tmp_path / "a" / name).load()
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0 and "next: python 06_imagenet.py" in end.stdout, end.stderr
    assert len(files(tmp_path / "a")) == 340
