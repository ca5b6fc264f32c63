"""Measure what fine-tuning gives: accuracy after the same training steps, with and without weights
of other classes.

    python tools/bench/finetune.py --data-dir data/cifar10

06 is trained on the first half of the classes. Then it is trained on a part of the other half,
--repeats times in each of three ways: from nothing, from the weights of the first half with
--new-head, and with all but the head frozen.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from imagenet.datasets import find_folders
from tools.records import append, spread

FLAGS = "--arch small_net --image-size 32 --batch-size 64 --workers 2"
WAYS = {
    "from nothing": "",
    "fine-tuned": "--weights {weights} --new-head",
    "only the head": "--weights {weights} --new-head --freeze 0,1,3,4,6,7,9,10,12,13",
}


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--data-dir",
        default="data/cifar10",
        metavar="DIR",
        help="folder with train/CLASS and test/CLASS or val/CLASS",
    )
    add(
        "--epochs",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="epochs on the first half of the classes",
    )
    add(
        "--images",
        type=whole_number(1),
        default=200,
        metavar="N",
        help="training images per class of the second half",
    )
    add(
        "--tuning-epochs",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="epochs on the second half",
    )
    add("--repeats", type=whole_number(1), default=3, metavar="N", help="runs of each way")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per run to FILE")
    return parser.parse_args()


def main(args):
    env = environment(torch.device("cpu"))
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | "
        f"{args.repeats} runs of each way"
    )
    with tempfile.TemporaryDirectory() as folder:
        first, second = (make_half(args, Path(folder), half) for half in (0, 1))
        accuracy, _ = train(
            first, Path(folder, "before"), f"--epochs {args.epochs} --lr 0.2 --warmup-epochs 1"
        )
        print(f"on the first half of the classes: {accuracy:.1f} % after {args.epochs} epochs")
        runs = {way: [] for way in WAYS}
        for repeat in range(args.repeats):
            for way, flags in WAYS.items():
                weights = Path(folder, "before/best.pt")
                flags = (
                    f"{flags.format(weights=weights)} --epochs {args.tuning_epochs} --lr "
                    "0.1 --warmup-epochs 0"
                )
                path = Path(folder, f"{way} {repeat}".replace(" ", "-"))
                accuracy, steps = train(second, path, f"{flags} --seed {repeat}")
                runs[way].append(accuracy)
                print(
                    f"   run {repeat + 1}: {way:14} {accuracy:5.1f} % after {steps} training steps",
                    flush=True,
                )
                row = {
                    "way": way,
                    "repeat": repeat,
                    "steps": steps,
                    "test_acc": accuracy,
                    "images": args.images,
                }
                append(args.log_file, env | {"bench": "finetune"} | row)
    print(f"\n{'way':16} test accuracy (%), median (range)")
    for way, accuracies in runs.items():
        print(f"{way:16} {spread(accuracies, '.1f')}")


def make_half(args, folder, half):
    """Make a folder with half of the classes, as links, and return it.

    The second half has fewer training images.
    """
    folders = find_folders(str(ROOT / args.data_dir), None)
    for split, source, limit in zip(
        ("train", "val"), folders, (args.images if half else None, None), strict=True
    ):
        classes = sorted(path for path in Path(source).iterdir() if path.is_dir())
        middle = len(classes) // 2
        for path in classes[middle:] if half else classes[:middle]:
            target = folder / f"half{half}" / split / path.name
            target.mkdir(parents=True)
            for image in sorted(path.iterdir())[:limit]:
                (target / image.name).symlink_to(image.resolve())
    return folder / f"half{half}"


def train(data, checkpoints, flags):
    """Run 06. Return its best test accuracy in % and the number of training steps."""
    command = [sys.executable, ROOT / "06_imagenet.py", data, *FLAGS.split(), *flags.split()]
    command += ["--checkpoints-path", checkpoints, "--keep", 1]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"06 exited with code {done.returncode}; see its message above")
    steps, epochs = re.findall(r"== step: \[ *\d+/(\d+)\] \[\d+/(\d+)\]", done.stdout)[-1]
    return float(re.search(r"^done: top-1 ([\d.]+)%", done.stdout, re.M)[1]), int(steps) * int(
        epochs
    )


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
