"""The flags that all scripts share, checked as far as they can be before anything is loaded."""

import argparse
import contextlib
import math
import os
import shutil
import sys
import sysconfig

import torch

AMP_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BareParser(argparse.ArgumentParser):
    """An argument parser that shows every default, and whose errors are one line and exit code 2.

    Args:
        doc: the docstring of the script, printed by --help.
    """

    def __init__(self, doc, **options):
        class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
            """Keep the docstring's lines as they are, and show every default."""

        super().__init__(description=doc, formatter_class=Formatter, allow_abbrev=False, **options)

    def convert_arg_line_to_args(self, line):
        """The flags in a line of a file that is named by @FILE; what follows a # is a comment."""
        return line.partition("#")[0].split()

    def add_machine_flags(self):
        """Add the flags that say how to compute, not what."""
        add = self.add_argument
        add("--amp", choices=tuple(AMP_DTYPES), default="none", help="mixed precision")
        add("--channels-last", action="store_true", help="keep images as NHWC: faster with --amp on a GPU")
        add("--compile", action="store_true", help="compile the network with torch.compile")

    def parse_args(self, *args, **kwargs):
        args = super().parse_args(*args, **kwargs)
        if args.amp == "fp16" and not torch.accelerator.is_available():
            self.error("argument --amp: fp16 needs a GPU and there is none here; on a CPU use --amp bf16 or none")
        if args.compile and not can_compile():
            install = "xcode-select --install" if sys.platform == "darwin" else "sudo apt-get install g++ python3-dev"
            self.error(f"argument --compile: no C++ compiler or no Python.h here; {install}, or leave --compile out")
        for flag, path in (("--log-file", args.log_file), ("--save", getattr(args, "save", None))):
            if path is not None and (reason := _unwritable(path)):
                self.error(f"argument {flag}: cannot write {path}: {reason}; name a file in a folder of yours")
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (all flags: {self.prog} --help)\n")


class Parser(BareParser):
    """A parser with the flags that scripts 01 to 05 share."""

    def __init__(self, doc):
        super().__init__(doc)
        add = self.add_argument
        datasets = ("shapes", "cifar10", "mnist", "folder")
        add("--dataset", choices=datasets, default="shapes", help="folder: train/CLASS/*.jpg, test/CLASS/...")
        add("--data-dir", default="data", metavar="DIR", help="where the files of a dataset lie")
        add("--download", action="store_true", help="fetch cifar10 or mnist into --data-dir if missing")
        add("--epochs", type=whole_number(1), default=5, metavar="N", help="passes over the training images")
        add("--batch-size", type=whole_number(1), default=256, metavar="N", help="images a process a step")
        add("--lr", type=number(above=0), default=0.01, metavar="RATE", help="learning rate for a global batch of 256")
        add("--lr-scaling", choices=("linear", "none"), default="linear", help="linear: --lr x global batch / 256")
        add("--warmup-epochs", type=number(), default=0, metavar="N", help="epochs until the rate is at its peak")
        add("--workers", type=whole_number(0), metavar="N", help="loader processes; automatic: 0 for images in memory")
        self.add_machine_flags()
        add("--arch", default="resnet18", metavar="NAME", help="a torchvision network, mnist_net or small_net")
        add("--augment", action=argparse.BooleanOptionalAction, default=True, help="random crops and flips")
        add("--seed", type=whole_number(0, 2**32), default=0, metavar="N", help="of weights, order, augmentation")
        add("--limit", type=whole_number(1), metavar="N", help="use N training images only, for a quick try")
        add("--log-file", metavar="FILE", help="append one JSON line an epoch to FILE")
        add("--save", metavar="FILE", help="write the trained weights to FILE at the end")


def whole_number(least, most=math.inf):
    """The type of a flag that takes a whole number from `least` to `most`."""

    def parse(text):
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number {limits}")
        return number

    return parse


def number(above=None, least=0, below=math.inf):
    """The type of a flag that takes a finite number: above `above`, or else of at least `least`; and below `below`."""
    limits = f"above {above:g}" if above is not None else f"of {least:g} or more"
    limits += f" and below {below:g}" if below < math.inf else ""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        enough = value > above if above is not None else value >= least
        if not enough or not value < below:
            raise argparse.ArgumentTypeError(f"{text!r} given, expected a number {limits}")
        return value

    return parse


def can_compile():
    """Whether torch.compile finds what it calls: on Linux $CXX or g++, on a Mac clang++, and Python.h."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return bool(shutil.which(compiler)) and os.path.exists(sysconfig.get_path("include") + "/Python.h")


def _unwritable(path):
    """Why a file cannot be written, or None. Tried now, not after hours of training."""
    new = not os.path.exists(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as error:
        return error.strerror
    if new:
        with contextlib.suppress(FileNotFoundError):  # another rank, asking the same, was faster
            os.remove(path)
    return None
