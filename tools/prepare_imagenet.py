"""Prepare photographs for 06: split classes into train/ and val/, make large images smaller.

    python tools/prepare_imagenet.py flowers data/flowers --val-share 0.1  # one folder per class
    python tools/prepare_imagenet.py data/imagenet data/small --short-side 256  # train/ and val/

The result is TARGET/train/CLASS/*.jpg and TARGET/val/CLASS/*.jpg. The split depends only on the
names of the files, so it is the same everywhere. With --short-side an image is decoded, resized and
saved as JPEG once, instead of being decoded at full size in each epoch. Damaged images are named
and left out. Files are written completely or not at all, and none is overwritten: after an
interruption, the same command continues.
"""

import concurrent.futures
import functools
import io
import itertools
import os
import signal
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image
from tqdm import tqdm

from common.errors import UserError, one_line, one_line_errors
from common.flags import Parser, number, whole_number
from common.images import list_images, to_rgb
from common.machine import cores_per_process
from imagenet import signals

QUALITY = 90  # of JPEGs, for resized images


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="class folders, or train/ and val/ with them")
    add("target", metavar="TARGET", help="folder for train/ and val/; continued if it exists")
    share = number(above=0, below=1)
    add("--val-share", type=share, metavar="X", help="share of each class for val/")
    add("--short-side", type=whole_number(16), metavar="N", help="resize larger images to N pixels")
    cores = cores_per_process(1)
    add("--workers", type=whole_number(1), default=cores, metavar="N", help="number of processes")
    return parser.parse_args()


def main(args):
    source, target = Path(args.source), Path(args.target)
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: expected a folder of classes")
    if target.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{target} is inside {source}: expected another place")
    images = {}  # {path below TARGET: image file}
    for part, name, file in find_images(source, args.val_share):
        if args.short_side and not name.lower().endswith((".jpg", ".jpeg")):
            name += ".jpg"
        # New images may move an old one of a tiny class, which would then be in both parts.
        other = "val" if part == "train" else "train"
        if args.val_share and (target / other / name).exists():
            part = other
        images[f"{part}/{name}"] = file
    todo = {name: file for name, file in images.items() if not (target / name).exists()}
    train = sum(name.startswith("train/") for name in images)
    done = len(images) - len(todo)
    print(f"{train} training and {len(images) - train} validation images, {done} done before")
    try:
        damaged = prepare_all(todo, target, args)
    except OSError as error:
        found = f"{one_line(error)}: expected a folder with enough space"
        raise UserError(f"{found}; then run the same command again") from None
    print(f"{target}: {len(images) - damaged} images, {damaged} damaged and left out")


def find_images(source, val_share):
    """Yield (train or val, CLASS/NAME, file) for each image."""
    parts = [part for part in ("train", "val") if (source / part).is_dir()]
    if len(parts) == 1 or bool(parts) == bool(val_share):
        found = f"{source} has {' and '.join(parts) or 'no train and val'}"
        expected = "train and val without --val-share, or class folders with --val-share 0.1"
        raise UserError(f"{found}: expected {expected}")
    for part in parts:
        for name in list_names(source / part):
            yield part, name, f"{source}/{part}/{name}"
    if val_share:
        for label, names in itertools.groupby(list_names(source), lambda name: name.split("/")[0]):
            for part, name in split_class(label, list(names), val_share):
                yield part, name, f"{source}/{name}"


def list_names(folder):
    """Return CLASS/NAME of each image in a folder of classes, sorted by class."""
    paths, _, classes = list_images(folder)
    if len(classes) < 2:
        raise UserError(f"{folder} has one class folder, {classes[0]}: expected two or more")
    return [Path(path).relative_to(folder).as_posix() for path in paths]


def split_class(label, names, share):
    """Yield (train or val, name) for each image of a class, with at least one in each part.

    An image belongs to val if the hash of its name is low, whatever other images there are.
    """
    if len(names) < 2:
        raise UserError(f"class {label} has one image: expected one for train/ and one for val/")
    hashes = {name: zlib.crc32(os.fsencode(name)) for name in names}
    count = sum(value < share * 2**32 for value in hashes.values())
    count = min(max(count, 1), len(names) - 1)
    for k, name in enumerate(sorted(names, key=hashes.get)):
        yield "val" if k < count else "train", name


def prepare_all(images, target, args):
    """Write images with several processes. Return how many are damaged, and name them."""
    damaged = 0
    prepare = functools.partial(prepare_image, target=target, short_side=args.short_side)
    with concurrent.futures.ProcessPoolExecutor(args.workers, initializer=start_worker) as pool:
        try:
            reasons = pool.map(prepare, images.keys(), images.values(), chunksize=16)
            bar = tqdm(reasons, total=len(images), unit="img", disable=None)
            for file, reason in zip(images.values(), bar, strict=True):
                if reason:
                    damaged += 1
                    tqdm.write(f"damaged, left out: {file} ({reason})", file=sys.stderr)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or it would wait for all images
            raise
    return damaged


def start_worker():
    """Leave Ctrl-C to the main process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.exit_when_parent_dies()


def prepare_image(name, file, target, short_side):
    """Write an image completely or not at all. Return why it cannot be read, or None."""
    try:
        data = shrink(file, short_side)
    except Exception as error:  # Pillow raises many kinds for damaged files
        return one_line(error)
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{os.getpid()}.new")  # the name of the image may be as long as allowed
    new.write_bytes(data)
    new.rename(path)
    return None


def shrink(file, short_side):
    """Return the bytes of an image file: unchanged, or as a JPEG of at most `short_side` pixels."""
    with Image.open(file) as image:
        image.load()  # all of it, to find damage
        is_small = short_side is None or min(image.size) <= short_side
        if short_side is None or (is_small and image.format == "JPEG"):
            return Path(file).read_bytes()
        scale = 1 if is_small else short_side / min(image.size)
        size = [round(side * scale) for side in image.size]
        resized = to_rgb(image).resize(size, Image.Resampling.BICUBIC)
    result = io.BytesIO()
    resized.save(result, "JPEG", quality=QUALITY)
    return result.getvalue()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
