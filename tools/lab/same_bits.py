"""Compare the newest checkpoints in two folders, bit for bit. It is an error if they differ.

python tools/lab/same_bits.py checkpoints/whole checkpoints/killed
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from common.errors import UserError, one_line_errors
from imagenet.checkpoint_file import decode, read_file

PARTS = ("step", "model", "ema", "optimizer", "scaler", "totals")


def newest(folder):
    """Return the state in the newest checkpoint of a folder."""
    paths = sorted(Path(folder).glob("step-*.pt"))
    if not paths:
        raise UserError(f"{folder} holds no checkpoint: expected step-*.pt")
    return decode(read_file(paths[-1]))


def differences(one, other, place=""):
    """Return the places in two nested states at which they differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [place]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [d for key in one for d in differences(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [
            d
            for k, pair in enumerate(zip(one, other, strict=True))
            for d in differences(*pair, f"{place}/{k}")
        ]
    return [] if one == other else [place]


def main():
    if len(sys.argv) != 3:
        raise UserError(
            "expected two folders: python tools/lab/same_bits.py "
            "checkpoints/whole checkpoints/killed"
        )
    one, other = map(newest, sys.argv[1:])
    found = [place for part in PARTS for place in differences(one[part], other[part], part)]
    if found:
        raise UserError(f"{len(found)} places differ, for example {found[0]}")
    print(f"the same bits after step {one['step']}, in {', '.join(PARTS)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
