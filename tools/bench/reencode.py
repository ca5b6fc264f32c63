"""Measure what re-encoding photographs gives: images per second that one loader worker of 06 reads.

    python tools/bench/reencode.py --data-dir data/imagenet-mini

tools/prepare_imagenet.py makes a copy of the folder for each --short-side. Then the loaders take
turns, without training, and ratios compare readings of the same turn.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from imagenet.datasets import Images
from imagenet.loader import build_loader
from imagenet.sampler import GlobalBatchSampler
from tools.records import append, spread


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--data-dir",
        default="data/imagenet-mini",
        metavar="DIR",
        help="photographs, as train/CLASS and val/CLASS",
    )
    add(
        "--short-side",
        nargs="+",
        type=whole_number(16),
        default=[256, 384],
        metavar="N",
        help="pixels of the copies",
    )
    add(
        "--image-size",
        type=whole_number(16),
        default=224,
        metavar="N",
        help="pixels per side of a training image",
    )
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="readings of each folder")
    add(
        "--log-file",
        type=output_file,
        metavar="FILE",
        help="append one JSON line per reading to FILE",
    )
    return parser.parse_args()


def main(args):
    env = environment(torch.device("cpu"))
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | "
        f"{args.repeats} readings, in turn"
    )
    with tempfile.TemporaryDirectory() as copies:
        folders = {None: Path(args.data_dir)} | {
            side: Path(copies, str(side)) for side in args.short_side
        }
        for side in args.short_side:
            prepare(args.data_dir, folders[side], side)
        loaders = {
            side: one_worker(folder / "train", args.image_size) for side, folder in folders.items()
        }
        sizes = {side: megabytes(folder / "train") for side, folder in folders.items()}
        speeds = {side: [] for side in loaders}
        for repeat in range(-1, args.repeats):
            for side, loader in loaders.items():
                begin = time.perf_counter()
                images = sum(len(batch[1]) for batch in loader)
                speed = images / (time.perf_counter() - begin)
                if repeat >= 0:  # the first reading starts the worker and fills the cache of files
                    speeds[side].append(speed)
                    row = {
                        "short_side": side,
                        "megabytes": sizes[side],
                        "repeat": repeat,
                        "images": images,
                    }
                    settings = {"data_dir": args.data_dir, "image_size": args.image_size}
                    append(
                        args.log_file,
                        env | {"bench": "reencode"} | settings | row | {"images_per_second": speed},
                    )
        del loaders  # end the workers before their files are deleted

    print(f"\n{'short side':12} {'size':>8} {'img/s per worker':>24} {'against the originals':>24}")
    for side, same in speeds.items():
        ratios = [a / b for a, b in zip(same, speeds[None], strict=True)]
        print(
            f"{side or 'as it is':12} {sizes[side]:5.0f} MB {spread(same, '.0f'):>24} "
            f"{spread(ratios, '.2f'):>24}"
        )


def prepare(source, target, side):
    command = [sys.executable, ROOT / "tools/prepare_imagenet.py", source, target]
    command += ["--short-side", side]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(
            f"tools/prepare_imagenet.py exited with code {done.returncode}: "
            f"{done.stderr.strip()[-300:]}"
        )


def one_worker(folder, image_size):
    """Return a loader of 06 with one worker, which stays alive between readings."""
    images = Images(str(folder), image_size, seed=0)
    batch = min(32, len(images))
    sampler = GlobalBatchSampler(len(images) // batch * batch, batch, 0, 1)
    return build_loader(images, sampler, 1, torch.device("cpu"))


def megabytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
