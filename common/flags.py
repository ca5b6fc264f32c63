"""The flags that 01 to 05 share, checked before anything is loaded."""

import argparse
import contextlib
import math
import os
import re
import socket

import torch


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit code 2, and whose --help shows the defaults.

    Args:
        doc: the docstring of the script, printed by --help.
    """

    def __init__(self, doc, **options):
        class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
            """Keep the lines of the docstring; show the defaults of flags that have one."""

            def _get_help_string(self, action):
                has_default = action.default is not None and action.default is not False
                return super()._get_help_string(action) if has_default else action.help

        super().__init__(description=doc, formatter_class=Formatter, allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (all flags: {self.prog} --help)\n")


def parse_args(doc):
    """Parse the flags of 01 and 02, whose docstring is `doc`."""
    return shared_flags(doc).parse_args()


def parse_ddp_args(doc):
    """Parse the flags of 03 and 05: those of 01, and --sync-bn."""
    return _ddp_flags(doc).parse_args()


def parse_spawn_args(doc):
    """Parse the flags of 04: those of 03, the number of processes, and the address of rank 0."""
    parser = _ddp_flags(doc)
    add, gpus = parser.add_argument, torch.accelerator.device_count()
    add("--nproc-per-node", type=whole_number(1), default=gpus or 2, metavar="N", help="processes, one per GPU")
    add("--nodes", type=whole_number(1), default=1, metavar="N", help="number of machines")
    add("--node-rank", type=whole_number(0), default=0, metavar="N", help="which machine this is, counted from 0")
    add("--dist-url", metavar="tcp://HOST:PORT", help="the address of rank 0; on one machine, a free port by default")
    args = parser.parse_args()
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (count := os.environ.get(name, "")).isdigit() and int(count) > args.nodes:
            problem = f"{name}={count}: a launcher started {count} copies of a script that starts its own processes"
            command = f"python {parser.prog}, or srun --ntasks={args.nodes} --ntasks-per-node=1 python {parser.prog}"
            parser.error(f"{problem}, expected one per machine; {command}")
    if args.node_rank > (last := args.nodes - 1):
        parser.error(f"--node-rank {args.node_rank} of --nodes {args.nodes}: expected a node rank from 0 to {last}")
    if args.dist_url is None and args.nodes > 1:
        parser.error(f"--nodes {args.nodes} without --dist-url: expected tcp://HOST:PORT, the machine of --node-rank 0")
    if args.dist_url is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            args.dist_url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    if not re.fullmatch(r"tcp://[^/]+:\d+", args.dist_url):
        parser.error(f"--dist-url {args.dist_url}: expected tcp://HOST:PORT, as in tcp://10.0.0.1:29500")
    return args


def shared_flags(doc):
    """Return a parser of the flags that 01 to 05 share."""
    parser = Parser(doc)
    add = parser.add_argument
    datasets = ("shapes", "cifar10", "mnist", "folder")
    add("--dataset", choices=datasets, default="shapes", help="folder: train/CLASS/*.jpg and val/CLASS/*.jpg")
    add("--data-dir", default="data", metavar="DIR", help="folder of the dataset's files")
    add("--download", action="store_true", help="download cifar10 or mnist into --data-dir if missing")
    add("--epochs", type=whole_number(1), default=5, metavar="N", help="passes over the training images")
    add("--batch-size", type=whole_number(2), default=256, metavar="N", help="images per process and training step")
    add("--lr", type=number(above=0), default=0.01, metavar="X", help="learning rate for a global batch of 256 images")
    add("--lr-scaling", choices=("linear", "none"), default="linear", help="linear: --lr * global batch / 256")
    add("--warmup-epochs", type=number(), default=0, metavar="N", help="epochs until the learning rate is reached")
    workers = min(4, os.cpu_count() or 1)
    add("--workers", type=whole_number(0), default=workers, metavar="N", help="loader processes for photographs")
    add("--arch", default="resnet18", metavar="NAME", help="a torchvision model, mnist_net or small_net")
    add("--augment", action=argparse.BooleanOptionalAction, default=True, help="random crops and flips")
    add("--seed", type=whole_number(0, 2**32), default=0, metavar="N", help="for weights, order and augmentation")
    add("--limit", type=whole_number(2), metavar="N", help="train on N images only, for a quick try")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per epoch to FILE")
    add("--save", type=output_file, metavar="FILE", help="write the trained weights to FILE")
    return parser


def _ddp_flags(doc):
    parser = shared_flags(doc)
    parser.add_argument("--sync-bn", action="store_true", help="batch norm over the images of all processes")
    # torch.distributed.launch passes --local-rank; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    return parser


def whole_number(least, most=math.inf):
    """Return the type of a flag: a whole number from `least` to `most`."""
    limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    return _checked(int, lambda value: least <= value <= most, f"a whole number {limits}")


def number(above=None, below=math.inf):
    """Return the type of a flag: a number above `above`, or of 0 or more; and below `below`."""
    limits = f"above {above:g}" if above is not None else "of 0 or more"
    limits += f" and below {below:g}" if below < math.inf else ""
    return _checked(float, lambda value: (value >= 0 if above is None else value > above) and value < below,
                    f"a number {limits}")  # fmt: skip


def _checked(kind, is_valid, expected):
    def parse(text):
        with contextlib.suppress(ValueError):
            if is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} given, expected {expected}")

    return parse


def output_file(path):
    """The type of a flag that names a file to write. It is tried now, not after hours of training."""
    is_new = not os.path.exists(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        open(path, "a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}; name a file you may write") from None
    if is_new:
        with contextlib.suppress(FileNotFoundError):  # another rank tries the same file
            os.remove(path)
    return path
