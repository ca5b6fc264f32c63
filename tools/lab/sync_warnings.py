"""Name the lines of a script that make the CPU wait for the GPU, and how often each did.

    python tools/lab/sync_warnings.py --most 25 06_imagenet.py --dummy 12800 --epochs 1

It runs the script with torch.cuda.set_sync_debug_mode("warn"). A line that waits once per training
step holds up the GPU; one that waits once per epoch or per printed line does not. With --most N,
a line that waits more than N times is an error.
"""

import argparse
import collections
import math
import runpy
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.errors import UserError, one_line_errors
from common.flags import Parser, whole_number


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument(
        "--most",
        type=whole_number(0),
        default=math.inf,
        metavar="N",
        help="how often a line may wait",
    )
    parser.add_argument("script", help="path of the script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args()


def main(args):
    counts = collections.Counter()

    def count(message, category, filename, line, *_):
        if "synchroniz" in str(message):
            path = Path(filename)
            counts[f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"] += 1

    sys.argv = [args.script, *args.flags]
    warnings.simplefilter("always")
    warnings.showwarning = count
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    try:
        runpy.run_path(str(ROOT / args.script), run_name="__main__")
    finally:
        print("\nlines that waited for the GPU:")
        for place, times in counts.most_common(20):
            print(f"{times:6}  {place}")
    for place, times in counts.most_common(1):
        if times > args.most:
            raise UserError(
                f"{place} waited {times} times: expected {args.most} at most; "
                "a line that waits in each training step holds up the GPU"
            )


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
