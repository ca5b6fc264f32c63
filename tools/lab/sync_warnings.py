"""Name the lines of a script that make the CPU wait for the GPU, and how often each did.

    python tools/lab/sync_warnings.py 06_imagenet.py --dummy 12800 --epochs 1

It runs the script with torch.cuda.set_sync_debug_mode("warn"). A line that waits once per training
step holds up the GPU; one that waits once per epoch or per printed line does not.
"""

import collections
import runpy
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def main():
    counts = collections.Counter()

    def count(message, category, filename, line, *_):
        if "synchroniz" in str(message):
            path = Path(filename)
            counts[f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"] += 1

    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("always")
    warnings.showwarning = count
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        print("\nlines that waited for the GPU:")
        for place, times in counts.most_common(20):
            print(f"{times:6}  {place}")


if __name__ == "__main__":
    main()
