"""The flags of 06, checked before anything is loaded."""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from typing import NamedTuple

import torch

from common.flags import add_flags, number, output_file, whole_number
from ddp.flags import RankParser

AMP_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RecipeParser(RankParser):
    """A parser that reads the flags in a file named by @FILE. A comment there begins with #."""

    def convert_arg_line_to_args(self, line):
        return line.partition("#")[0].split()


def parse_args(doc):
    """Parse the flags of 06, whose docstring is `doc`."""
    parser = RecipeParser(doc, fromfile_prefix_chars="@")
    data = parser.add_argument_group("data")
    folder = "folder with train/ and val/, or with training class folders"
    data.add_argument("train_path", nargs="?", metavar="TRAIN", help=folder)
    add_flags(data, DATA)
    add_flags(parser.add_argument_group("model"), MODEL)
    add_flags(parser.add_argument_group("recipe"), RECIPE)
    add_flags(parser.add_argument_group("run"), RUN)
    add_machine_flags(parser)
    # torch.distributed.launch passes --local-rank; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    del args.local_rank
    fill_in(args)
    check_flags(parser, args)
    check_machine_flags(parser, args)
    return args


def fill_in(args):
    """Set the flags whose default depends on other flags."""
    if args.warmup_epochs is None:
        args.warmup_epochs = min(5, args.epochs / 20)
    if args.checkpoints_path is None and (args.dummy is None or args.resume):
        args.checkpoints_path = "checkpoints"


def check_flags(parser, args):
    """Refuse flags that contradict each other, or lack another one."""
    if (args.train_path is None) == (args.dummy is None):
        parser.error(
            "expected either a folder of images or --dummy N: 06_imagenet.py data/imagenet"
        )
    if args.evaluate and not (args.weights or args.resume):
        parser.error("--evaluate without a model to evaluate: add --weights FILE or --resume")
    if args.evaluate and args.weights and args.resume:
        parser.error(
            "--evaluate with both --weights and --resume: which model? leave out one of the two"
        )
    if args.new_head and not args.weights:
        parser.error(
            "--new-head without --weights: which weights to start from? add --weights FILE"
        )


class Interval(NamedTuple):
    """A number of training steps, or of seconds if is_time."""

    number: int
    is_time: bool

    def __str__(self):
        return f"{self.number}s" if self.is_time else str(self.number)


def interval(text):
    """The type of --checkpoint-every: a number of steps (100) or of seconds (600s)."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})(s?)", text)
    if not match:
        expected = "expected steps, as 100, or seconds, as 600s"
        raise argparse.ArgumentTypeError(f"{text!r} given, {expected}")
    return Interval(number=int(match[1]), is_time=match[2] == "s")


def event_folder(text):
    """The type of --tensorboard: the name of a folder."""
    if importlib.util.find_spec("tensorboard") is None:
        raise argparse.ArgumentTypeError("tensorboard is not installed; pip install tensorboard")
    return text


def add_machine_flags(parser):
    """Add the flags that decide how to compute, not what."""
    add_flags(parser.add_argument_group("computation"), COMPUTATION)


def check_machine_flags(parser, args):
    """Refuse what cannot work on this machine."""
    if args.amp == "fp16" and not torch.accelerator.is_available():
        parser.error(
            "argument --amp: fp16 needs a GPU and there is none here; "
            "on a CPU use --amp bf16 or none"
        )
    if args.compile and not can_compile():
        install = "sudo apt-get install gcc g++ python3-dev"
        if sys.platform == "darwin":
            install = "xcode-select --install"
        parser.error(
            f"argument --compile: no C or C++ compiler or no Python.h here; {install}, "
            "or leave --compile out"
        )


def can_compile():
    """Return whether torch.compile finds Python.h and a compiler: C++ on a CPU, C on a GPU."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if torch.cuda.is_available():
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), "gcc")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return bool(shutil.which(compiler)) and os.path.exists(header)


# fmt: off
DATA = [  # what to train on; see add_flags
    ("--val-path DIR", str, None,
     "validation class folders, or a folder with train/ and val/, if it is not TRAIN"),
    ("--dummy N", whole_number(2), None, "use N generated images instead, to measure speed"),
    ("--image-size N", whole_number(16), 224, "pixels per side of the model's input"),
    ("--workers N", whole_number(0), None, "loader processes per rank; else about one per core"),
]
MODEL = [  # what is trained
    ("--arch NAME", str, "resnet18", "a torchvision model, or timm:NAME if timm is installed"),
    ("--weights FILE", str, None, "weights to start from: a checkpoint, or a state_dict"),
    ("--new-head", bool, False, "with --weights: a new last layer, for other classes"),
    ("--freeze NAMES", str, "", "do not train these parts: conv1,bn1,layer1"),
    ("--sync-bn", bool, False, "batch norm over the images of all processes"),
]
RECIPE = [  # how the weights change
    ("--epochs N", whole_number(1), 100, "passes over the training images"),
    ("--batch-size N", whole_number(1), 256, "images per step on all processes together"),
    ("--accumulate N", whole_number(1), 1, "micro-batches per step"),
    ("--lr X", number(above=0), 0.1, "peak learning rate for 256 images; scaled linearly"),
    ("--schedule", ("cosine", "step"), "cosine", "step: divide by 10 every --step-epochs"),
    ("--final-lr X", number(), 0, "share of the peak at which --schedule cosine ends"),
    ("--step-epochs N", number(above=0), 30, "epochs between steps of --schedule step"),
    ("--warmup-epochs N", number(), None,
     "epochs until the learning rate is at its peak; 5 if not given, or --epochs / 20 if less"),
    ("--warmup-factor X", number(), 0.1, "share of the peak at which warm-up starts"),
    ("--momentum X", number(below=1), 0.9, "Nesterov momentum"),
    ("--weight-decay X", number(), 5e-5, "for weights, not for norms and biases"),
    ("--label-smoothing X", number(below=1), 0, "share of the target for all classes"),
    ("--clip-grad NORM", number(above=0), None, "clip the gradient of a step to this norm"),
    ("--ema X", number(below=1), 0, "average the weights with this decay; 0 is off"),
    ("--seed N", whole_number(0, 2**32), 0, "for weights, order, crops and dropout"),
]
RUN = [  # what happens beside the training
    ("--evaluate", bool, False, "evaluate the model of --weights or --resume, without training"),
    ("--eval-every N", whole_number(0), 1, "evaluate after every N epochs; 0 is never"),
    ("--checkpoints-path DIR", str, None,
     "folder of checkpoints, which machines may share; checkpoints if not given, or none with "
     "--dummy without --resume"),
    ("--checkpoint-every N", interval, "600s", "steps (100) or seconds (600s)"),
    ("--keep N", whole_number(1), 3, "checkpoints to keep, beside the best"),
    ("--resume", bool, False, "continue from the newest checkpoint, if there is one"),
    ("--dist-init-method", ("auto", "env", "slurm"), "auto", "the launcher to insist on"),
    ("--timeout SECONDS", number(above=0), 60, "how long to wait for a missing rank"),
    ("--print-every N", whole_number(1), 50, "steps between lines"),
    ("--time-communication", bool, False,
     "time it on GPUs too, which slows the backward pass a little"),
    ("--log-file FILE", output_file, None, "append one JSON line per epoch to FILE"),
    ("--tensorboard DIR", event_folder, None, "write event files for TensorBoard"),
    ("--deterministic", bool, False, "the same bits in every run; slower"),
]
COMPUTATION = [  # how to compute, not what
    ("--amp", tuple(AMP_DTYPES), "none", "mixed precision"),
    ("--channels-last", bool, False, "store images as NHWC: faster with --amp on a GPU"),
    ("--compile", bool, False, "compile the model with torch.compile"),
]
# fmt: on
