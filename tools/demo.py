"""Train one model twice, with one process and with two, and compare: python tools/demo.py

It runs 01_snsc.py, then 03_mnmc_ddp_launch.py under torchrun, with the same images per training
step. With more GPUs, 03 gets 2, 4 or 8 processes; with one GPU, one process. Needs no files.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.flags import Parser, add_flags, whole_number
from common.machine import cores_per_process
from tools.records import to_run

ROWS = {  # name: (field of the record, format)
    "processes": ("world_size", "{}"),
    "images per process and step": ("batch_size", "{}"),
    "loss in training": ("train_loss", "{:.3f}"),
    "accuracy in training (%)": ("train_acc", "{:.1f}"),
    "loss on the test set": ("test_loss", "{:.3f}"),
    "accuracy on the test set (%)": ("test_acc", "{:.1f}"),
    "images per second": ("images_per_second", "{:.0f}"),
}


def main(args):
    os.chdir(ROOT)
    gpus = count_gpus()
    processes = count_processes(gpus)
    flags = f"--arch small_net --limit {args.limit} --epochs {args.epochs}"
    one = f"python 01_snsc.py {flags}"
    many = f"torchrun --standalone --nproc-per-node={processes} 03_mnmc_ddp_launch.py {flags}"
    if not gpus:
        many = f"OMP_NUM_THREADS={cores_per_process(processes)} {many}"
    records = [run(one), run(many)]
    print_comparison(*records)
    if gpus == 1:
        print("There is one GPU, so both have one process and do the same work.")
    elif not gpus:
        print("Without GPUs the same cores do all the work: this shows no speedup of several GPUs.")


def count_gpus():
    """Return the number of GPUs that processes can share a training on.

    Apple's mps is none: 03 trains on the CPU there.
    """
    if not torch.accelerator.is_available():
        return 0
    backend = dist.get_default_backend_for_device(torch.accelerator.current_accelerator())
    return 0 if backend == "gloo" else torch.accelerator.device_count()


def count_processes(gpus):
    """Return the number of processes of 03: 2 without GPUs, else a power of two, at most 8."""
    if gpus == 0:
        return 2
    return max(n for n in (1, 2, 4, 8) if n <= gpus)


def run(command):
    """Run a command as a user would type it, and return the record of its last epoch.

    The program exits with the exit code of a command that fails.
    """
    print(f"$ {command}", flush=True)
    arguments, variables = to_run(command)
    # A thread that waits for another must not spin on a core that some other program needs.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | variables
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        done = subprocess.run([*arguments, "--log-file", str(log)], env=environment)
        if done.returncode:
            print(f"tools/demo.py: exit code {done.returncode} of: {command}", file=sys.stderr)
            sys.exit(done.returncode)
        print()
        return json.loads(log.read_text().splitlines()[-1])


def print_comparison(one, many):
    """Print the records of both runs side by side, and why they agree."""
    print(f"{'':30} {'01':>8} {'03':>8}")
    for name, (field, form) in ROWS.items():
        print(f"{name:30} {form.format(one[field]):>8} {form.format(many[field]):>8}")
    print(
        "\n01 and 03 train on the same number of images per step, with the same learning rate and\n"
        "the same number of steps. So the results are close. They are not equal, because each\n"
        "process crops and flips in its own way, and batch norm sees the images of one process."
    )


def parse_args():
    parser = Parser(__doc__)
    least = count_processes(count_gpus()) + 1  # or a process gets one image, and batch norm fails
    add_flags(
        parser,
        [
            ("--epochs N", whole_number(1), 4, "default: %(default)s"),
            ("--limit N", whole_number(least), 16000, "training images"),
        ],
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(parse_args())
    except KeyboardInterrupt:
        sys.exit(130)
