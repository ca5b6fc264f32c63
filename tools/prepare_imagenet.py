"""Prepare photographs for 06: sort ImageNet's archives into folders, split classes, make large
images smaller.

    python tools/prepare_imagenet.py ARCHIVES data/imagenet  # ImageNet's three official files
    python tools/prepare_imagenet.py flowers data/flowers --val-share 0.1  # one folder per class
    python tools/prepare_imagenet.py data/imagenet data/small --short-side 256  # train/ and val/
    made before

The result is TARGET/train/CLASS/*.jpg and TARGET/val/CLASS/*.jpg. ARCHIVES is a folder with
ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz. The split depends
only on the names of the files, so it is the same everywhere and new files do not move old ones.
With --short-side an image is decoded, resized and saved as JPEG once, instead of being decoded at
full size in each epoch. Files are written completely or not at all, and none is overwritten: after
an interruption, the same command continues. Damaged images are named and left out.
"""

import concurrent.futures
import errno
import io
import json
import os
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image
from torchvision.datasets.imagenet import ARCHIVE_META, load_meta_file, parse_devkit_archive
from tqdm import tqdm

from common.errors import UserError, one_line, one_line_errors
from common.flags import Parser, number, whole_number
from common.images import list_images, to_rgb
from common.machine import cores_per_process
from imagenet import signals

TRAIN_TAR, VAL_TAR, DEVKIT = (ARCHIVE_META[part][0] for part in ("train", "val", "devkit"))
SETTINGS = "prepared.json"  # in TARGET: with which flags it was made
QUALITY = 90  # of JPEGs, for resized images
# what a damaged image raises
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
CHUNK = 256  # images per task of a process
FEW = 100_000  # training images: with fewer, start from trained weights


class Item(NamedTuple):
    """An image: where it is, and where it goes."""

    file: str  # the image, or the archive that holds it
    offset: int | None  # in the archive, in bytes
    size: int  # in bytes
    target: str  # below TARGET, as train/CLASS/NAME.jpg


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="archives, class folders, or train/ and val/ with them")
    add("target", metavar="TARGET", help="folder for train/ and val/; continued if it exists")
    share = number(above=0, below=1)
    add("--val-share", type=share, metavar="X", help="share of each class for val/")
    side = "resize larger images to N pixels on the short side"
    add("--short-side", type=whole_number(16), metavar="N", help=side)
    cores = cores_per_process(1)
    add("--workers", type=whole_number(1), default=cores, metavar="N", help="number of processes")
    return parser.parse_args()


def main(args):
    source, target = Path(args.source), Path(args.target)
    if not source.is_dir():
        raise UserError(
            f"{source} is not a folder: expected ImageNet's archives, or folders of images"
        )
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{target} is inside {source}: expected another place")
    items = find_items(source, args.val_share)
    if args.short_side:
        items = [item._replace(target=jpeg_name(item.target)) for item in items]
    if args.val_share:
        items = [keep_in_place(item, target) for item in items]
    check_names(items)
    todo = [item for item in items if not (target / item.target).exists()]
    settings = check_settings(args, target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        check_space(todo, target, args.short_side)
        if not (target / SETTINGS).exists():
            write(target / SETTINGS, f"{json.dumps(settings)}\n".encode())
    except OSError as error:
        found = f"{one_line(error)}: expected a folder to write to"
        raise UserError(f"{found}; name another TARGET") from None
    damaged = 0
    print(
        f"{len(items)} images, {len(items) - len(todo)} of them done before | "
        f"{args.workers} processes"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, end the workers
    with (
        concurrent.futures.ProcessPoolExecutor(args.workers, initializer=start_worker) as pool,
        tqdm(total=len(todo), unit="img", disable=None) as bar,
    ):
        chunks = [todo[k : k + CHUNK] for k in range(0, len(todo), CHUNK)]
        try:
            futures = [
                pool.submit(prepare_chunk, chunk, target, args.short_side) for chunk in chunks
            ]
            for future in concurrent.futures.as_completed(futures):
                done, messages = future.result()
                bar.update(done)
                damaged += len(messages)
                for message in messages:
                    tqdm.write(f"damaged, left out: {message}", file=sys.stderr)
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                found = f"{one_line(error)}: expected space for all images"
                raise UserError(f"{found}; free some, and run the same command again") from None
            if isinstance(error, concurrent.futures.BrokenExecutor):
                found = "a process was killed, probably because the memory was full"
                found += f": expected enough for {args.workers} processes; free some, or run the"
                remedy = f"same command again with --workers {max(1, args.workers // 2)}"
                raise UserError(f"{found} {remedy}") from None
            raise
    splits = {
        split: sum(item.target.startswith(f"{split}/") for item in items)
        for split in ("train", "val")
    }
    print(
        f"{target}: {splits['train']} training and {splits['val']} validation images, less "
        f"{damaged} damaged ones"
    )
    if damaged == len(items):
        raise UserError(
            f"none of {damaged} images can be read: "
            f"expected JPEG, PNG or other images; {SETTINGS} stays"
        )
    check_classes(source, target)
    print(f"next: {next_command(target, splits['train'])}")


def next_command(target, count):
    """Return the command that trains on `count` images, as docs/06_imagenet.md shows it."""
    flags = "@recipes/resnet18.args"
    if count < FEW:
        flags = "--arch resnet50 --weights torchvision:DEFAULT --new-head --epochs 10 --lr 0.01"
    return f"python 06_imagenet.py {shlex.quote(str(target))} {flags}"


def find_items(source, val_share):
    """Return the images of a folder as a list of Item.

    Raises:
        UserError: it holds neither archives nor folders of images.
    """
    has_archives = (source / TRAIN_TAR).exists() or (source / VAL_TAR).exists()
    has_train, has_val = ((source / split).is_dir() for split in ("train", "val"))
    if val_share and (has_archives or (has_train and has_val)):
        raise UserError(f"--val-share: {source} has validation images; leave the flag out")
    if has_archives:
        return find_in_archives(source)
    if has_train and not has_val:
        raise UserError(
            f"{source} has train/ and no val/: "
            "expected both, or one folder per class with --val-share"
        )
    if has_train:
        return [
            item._replace(target=f"{split}/{item.target}")
            for split in ("train", "val")
            for items in class_items(source / split).values()
            for item in items
        ]
    if val_share is None:
        raise UserError(
            f"{source} has neither train/ nor {TRAIN_TAR}; "
            "to split class folders, add --val-share 0.1"
        )
    return [
        item for items in class_items(source).values() for item in split_class(items, val_share)
    ]


def jpeg_name(name):
    path = Path(name)
    return name if path.suffix.lower() in (".jpg", ".jpeg") else str(path.with_suffix(".jpg"))


def check_names(items):
    """Refuse two images that would have the same name."""
    sources = {}
    for item in items:
        if item.target in sources:
            found = f"{sources[item.target]} and {item.file} would both be {item.target}"
            raise UserError(f"{found}: expected one of them; rename or delete the other")
        sources[item.target] = item.file


def class_items(folder):
    """Return {class: its images}; the targets are CLASS/NAME."""
    paths, targets, names = list_images(folder)
    if len(names) < 2:
        raise UserError(f"{folder} has {len(names)} class folder(s): expected two or more")
    classes = {name: [] for name in names}
    for path, target in zip(paths, targets.tolist(), strict=True):
        label = names[target]
        name = "_".join(Path(path).relative_to(folder / label).parts)
        size = os.path.getsize(path) if os.path.exists(path) else 0  # 0: a broken link
        classes[label].append(Item(path, None, size, f"{label}/{name}"))
    return classes


def split_class(items, share):
    """Split the images of a class into val/ and train/ by a hash of their names, with at least one
    image in each.
    """
    if len(items) < 2:
        raise UserError(
            f"{items[0].file} is the only image of its class: "
            "expected one for training and one for validation"
        )
    ordered = sorted(items, key=lambda item: (zlib.crc32(os.fsencode(item.target)), item.target))
    count = sum(zlib.crc32(os.fsencode(item.target)) < share * 2**32 for item in items)
    count = min(max(count, 1), len(items) - 1)
    return [
        item._replace(target=f"{'val' if k < count else 'train'}/{item.target}")
        for k, item in enumerate(ordered)
    ]


def keep_in_place(item, target):
    """Return the item with the part, train/ or val/, that it has in the target already: new images
    may not move it.
    """
    part, _, name = item.target.partition("/")
    other = f"{'val' if part == 'train' else 'train'}/{name}"
    return item._replace(target=other) if (target / other).exists() else item


def find_in_archives(source):
    """Return the images in ImageNet's archives: where each begins, without extracting anything."""
    for name in (TRAIN_TAR, VAL_TAR, DEVKIT):
        if not (source / name).exists():
            raise UserError(
                f"{source} has no {name}: expected ImageNet's {TRAIN_TAR}, {VAL_TAR} and {DEVKIT}"
            )
    items = []
    try:
        with tarfile.open(source / TRAIN_TAR) as outer:  # an archive for each class
            for member in tqdm(outer, desc="reading " + TRAIN_TAR, unit=" classes", disable=None):
                label = Path(member.name).stem
                with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                    for image in inner:
                        begin = member.offset_data + image.offset_data
                        name = f"train/{label}/{image.name}"
                        items.append(Item(str(source / TRAIN_TAR), begin, image.size, name))
        with tarfile.open(source / VAL_TAR) as archive:
            images = sorted(
                (image for image in archive if image.isfile()), key=lambda image: image.name
            )
    except tarfile.TarError as error:
        raise UserError(
            f"{source}: an archive is damaged or not complete ({error}); download it again"
        ) from None
    labels = validation_labels(source)
    if len(labels) != len(images):
        raise UserError(
            f"{source / VAL_TAR} has {len(images)} images, and {DEVKIT} labels for {len(labels)}"
        )
    for image, label in zip(images, labels, strict=True):
        name = Path(image.name).name
        items.append(
            Item(str(source / VAL_TAR), image.offset_data, image.size, f"val/{label}/{name}")
        )
    return items


def validation_labels(source):
    """Return the class of each validation image, in the order of their names, from the development
    kit.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.symlink((source / DEVKIT).resolve(), Path(folder, DEVKIT))
        try:
            parse_devkit_archive(folder)
        except ImportError:
            raise UserError(
                f"torchvision reads {DEVKIT} with scipy, which is missing; pip install scipy"
            ) from None
        except (RuntimeError, OSError, tarfile.TarError) as error:
            raise UserError(f"{source / DEVKIT}: {one_line(error)}; download it again") from None
        return load_meta_file(folder)[1]


def check_settings(args, target):
    """Return the flags that decide the result.

    Refuse to continue a folder that was made with others.
    """
    flags = {"val_share": args.val_share, "short_side": args.short_side, "quality": QUALITY}
    flags["source"] = str(Path(args.source).resolve())
    file = target / SETTINGS
    try:
        before = json.loads(file.read_text()) if file.exists() else flags
    except ValueError:
        repair = f"echo {shlex.quote(json.dumps(flags))} > {shlex.quote(str(file))}"
        found = f"{file} is damaged: expected the flags of the first run"
        raise UserError(f"{found}; if they were those of now, repair it: {repair}") from None
    if before != flags:
        changed = next(name for name in flags if before.get(name) != flags[name])
        found = f"{target} was made with {changed} {before.get(changed)}, not {flags[changed]}"
        raise UserError(
            f"{found}: expected the same flags; continue with those, or name another TARGET"
        )
    others = target.iterdir() if target.is_dir() and not file.exists() else []
    if any(path.suffix != ".new" for path in others):
        raise UserError(
            f"{target} is not empty and was not made by this command: name another TARGET"
        )
    return flags


def check_space(todo, target, short_side):
    """Refuse to begin if copies of the images will not fit on the disk.

    The size of smaller images is not known before they are made.
    """
    needed = sum(item.size for item in todo)
    free = shutil.disk_usage(target).free
    if short_side is None and needed > 0.95 * free:
        found = f"{target}: about {needed / 2**30:.1f} GiB to write, {free / 2**30:.1f} GiB free"
        raise UserError(
            f"{found}: expected enough space; "
            "free some, or make the images smaller with --short-side"
        )


def check_classes(source, target):
    """Refuse a result in which damage has left a class in only one of train/ and val/."""
    train, val = (
        {path.name for path in (target / part).glob("*") if path.is_dir()}
        for part in ("train", "val")
    )
    for name in sorted(train ^ val):
        folder = target / ("train" if name in train else "val") / name
        found = f"class {name} is only in {folder}: expected each class in train/ and val/"
        remedy = f"replace or delete its damaged images in {source}, delete {folder}"
        raise UserError(f"{found}; {remedy}, and run the same command again")


def start_worker():
    """Leave signals to the main process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.ignore()
    signals.exit_when_parent_dies()


def prepare_chunk(items, target, short_side):
    """Write some images. Return (how many were tried, a message for each damaged one)."""
    damaged = []
    for item in items:
        try:
            data = shrink(read(item), short_side)
        except UNREADABLE as error:
            damaged.append(f"{item.target} of {item.file} ({one_line(error)})")
            continue
        write(target / item.target, data)
    return len(items), damaged


def write(path, data):
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{os.getpid()}.new")  # the name of the image may be as long as allowed
    new.write_bytes(data)
    new.rename(path)


def read(item):
    """Return the bytes of an image file."""
    with open(item.file, "rb") as file:
        file.seek(item.offset or 0)
        return file.read(item.size)


def shrink(data, short_side):
    """Return the bytes of an image: as they are, or as a JPEG whose short side is at most
    `short_side` pixels.

    Raises:
        OSError, SyntaxError, ValueError, DecompressionBombError: it cannot be decoded. See
            UNREADABLE.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.load()  # all of it, to find damage
        is_small = short_side is None or min(image.size) <= short_side
        if short_side is None or (is_small and image.format == "JPEG"):
            return data
        scale = 1 if is_small else short_side / min(image.size)
        size = [round(side * scale) for side in image.size]
        result = io.BytesIO()
        resized = to_rgb(image).resize(size, Image.Resampling.BICUBIC)
        resized.save(result, "JPEG", quality=QUALITY)
        return result.getvalue()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
