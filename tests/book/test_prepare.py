"""tools/prepare_imagenet.py: splits, smaller images, damage, interruptions, bad input."""

import io
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image
from processes import ROOT, gone

from common.errors import UserError
from common.images import split_command
from imagenet.datasets import find_folders
from tools import prepare_imagenet as prepare


def photo(size=(40, 30)):
    data = io.BytesIO()
    Image.effect_noise(size, 64).save(data, "JPEG")
    return data.getvalue()


@pytest.fixture
def flowers(tmp_path):
    """Two classes of twenty photographs, one folder per class."""
    folder = tmp_path / "mine/flowers"
    for label in ("rose", "tulip"):
        (folder / label).mkdir(parents=True)
        for k in range(20):
            (folder / label / f"{k}.jpg").write_bytes(photo())
    return folder


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["prepare_imagenet.py", *map(str, flags), "--workers", "1"])
    prepare.main(prepare.parse_args())


def files(folder):
    paths = [path for part in ("train", "val") for path in (folder / part).glob("*/[!.]*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_class_folders_are_split_by_name(flowers, tmp_path, monkeypatch):
    """New images move no old ones, in another folder, and in the same one with a tiny share."""
    run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
    run(monkeypatch, flowers, tmp_path / "few", "--val-share", 0.0001)
    before = files(tmp_path / "a")
    few = files(tmp_path / "few")
    assert before == {name: (flowers / name.split("/", 1)[1]).read_bytes() for name in before}
    rose = [4, 5, 10, 11, 18, 19]  # on every machine, and in every version
    assert {name for name in before if "val/rose" in name} == {f"val/rose/{k}.jpg" for k in rose}
    assert len(list(tmp_path.glob("few/val/*/*"))) == 2, "each class has one"
    for k in range(100, 140):  # the hash of some of these names is lower
        (flowers / f"rose/{k}.jpg").write_bytes(photo())
    run(monkeypatch, flowers, tmp_path / "b", "--val-share", 0.25)
    run(monkeypatch, flowers, tmp_path / "few", "--val-share", 0.0001)
    assert len(before) == 40 and before.items() <= files(tmp_path / "b").items()
    assert few.items() <= files(tmp_path / "few").items() and len(files(tmp_path / "few")) == 80


def test_the_command_for_class_folders_can_be_typed_as_it_is(flowers, tmp_path, monkeypatch):
    """Also with a space in the name, from another folder, and for the folder in which one is."""
    photographs = flowers.rename(tmp_path / "my photographs")
    for folder, root in ((tmp_path, "my photographs/"), (photographs, ".")):
        monkeypatch.chdir(folder)
        _, tool, *words = shlex.split(split_command(root))
        assert Path(tool).samefile(prepare.__file__)
        run(monkeypatch, *words)
        assert find_folders(words[1], None) == (f"{words[1]}/train", f"{words[1]}/val")
    assert words[:2] == [str(photographs), f"{photographs}-split"]


def test_large_images_are_resized_and_small_ones_kept(flowers, tmp_path, monkeypatch):
    """In a folder that has train/ and val/, as torchvision leaves ImageNet."""
    source = tmp_path / "source"
    shutil.copytree(flowers, source / "train")
    shutil.copytree(flowers, source / "val")
    kept = files(source)
    (source / "val/tulip/large.JPEG").write_bytes(photo((200, 100)))
    Image.new("RGBA", (20, 10)).save(source / "train/rose/7.png")  # a JPEG cannot be transparent
    Image.new("I;16", (100, 100), 100 * 256).save(source / "train/rose/deep.png")
    run(monkeypatch, source, tmp_path / "a", "--short-side", 50)
    names = ("val/tulip/large.JPEG", "train/rose/7.png.jpg", "train/rose/deep.png.jpg")
    large, small, deep = (Image.open(tmp_path / "a" / name) for name in names)
    assert (large.size, small.size, deep.size) == ((100, 50), (20, 10), (50, 50))
    assert large.format == small.format == deep.format == "JPEG"
    darkest, brightest = deep.convert("L").getextrema()
    assert 99 <= darkest <= brightest <= 101, "scaled to 8 bits, and not clipped"
    assert kept.items() <= files(tmp_path / "a").items() and len(kept) == 80


def test_damaged_images_are_named_and_left_out(flowers, tmp_path, monkeypatch, capsys):
    (flowers / "rose/half.jpg").write_bytes(photo()[:500])
    (flowers / "rose/gone.jpg").symlink_to("deleted.jpg")
    for done in (0, 40):  # a second run tries them again, and overwrites no image
        run(monkeypatch, flowers, tmp_path / "a", "--val-share", 0.25)
        out, err = capsys.readouterr()
        named = [line.split()[3] for line in err.splitlines() if line.startswith("damaged")]
        assert sorted(Path(name).name for name in named) == ["gone.jpg", "half.jpg"]
        assert f", {done} done before" in out and "40 images, 2 damaged and left out" in out
        made = list(tmp_path.glob("a/*/*/*"))
        assert len(made) == 40 and (done == 0 or made[0].read_bytes() == b"mine")
        made[0].write_bytes(b"mine")


def test_bad_input_is_named_in_one_line(flowers, tmp_path, monkeypatch):
    photograph = shutil.copy(flowers / "rose/0.jpg", tmp_path)
    target = tmp_path / "a"
    share = ["--val-share", 0.1]
    shutil.copytree(flowers, tmp_path / "half/train")
    for source, to, flags, message in (
        (photograph, target, share, r"0\.jpg is not a folder: expected a folder of classes"),
        (flowers, flowers / "rose/a", share, r"is inside .*: expected another place"),
        (flowers, target, [], r"no train and val: expected .* class folders with --val-share"),
        (tmp_path / "half", target, share, r"has train: expected train and val without --val-"),
        (flowers.parent, target, share, r"mine has one class folder, flowers: expected two or"),
        (flowers, photograph, share, r"0\.jpg.*: expected a folder with enough space"),
    ):
        with pytest.raises(UserError, match=message):
            run(monkeypatch, source, to, *flags)
    assert not target.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_half_image_and_can_be_continued(flowers, tmp_path, number):
    for k in range(300):
        (flowers / f"rose/large{k}.jpg").write_bytes(photo((300, 300)))
    command = [sys.executable, "tools/prepare_imagenet.py", flowers, tmp_path / "a"]
    command += ["--val-share", "0.25", "--short-side", "200", "--workers", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not files(tmp_path / "a"):
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -number)
    assert len(workers) == 3 and gone(workers, seconds=30)
    assert "Traceback" not in process.stderr.read()
    assert 0 < len(files(tmp_path / "a")) < 340
    for data in files(tmp_path / "a").values():
        Image.open(io.BytesIO(data)).load()
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 0 and "340 images, 0 damaged" in end.stdout, end.stderr
    assert len(files(tmp_path / "a")) == 340
