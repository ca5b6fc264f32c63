"""The flags of 06, checked before anything is loaded."""

import argparse
import os
import re
import shutil
import sys
import sysconfig
from typing import NamedTuple

import torch

from common.flags import Parser, number, output_file, whole_number
from common.other_flags import OF_06

AMP_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RecipeParser(Parser):
    """A parser that reads the flags in a file named by @FILE. A comment there begins with #."""

    def convert_arg_line_to_args(self, line):
        return line.partition("#")[0].split()


def parse_args(doc):
    """Parse the flags of 06, whose docstring is `doc`."""
    parser = RecipeParser(doc, OF_06, fromfile_prefix_chars="@")
    add_data_flags(parser)
    add_model_flags(parser)
    add_recipe_flags(parser)
    add_run_flags(parser)
    add_machine_flags(parser)
    # torch.distributed.launch passes --local-rank; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    del args.local_rank
    check_flags(parser, args)
    check_machine_flags(parser, args)
    return args


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


def add_data_flags(parser):
    """Add the flags that decide what to train on."""
    add = parser.add_argument_group("data").add_argument
    add(
        "train_path",
        nargs="?",
        metavar="TRAIN",
        help="folder with train/ and val/, or with training class folders",
    )
    add(
        "--val-path",
        metavar="DIR",
        help="validation class folders, or a folder with train/ and val/, if it is not TRAIN",
    )
    add(
        "--dummy",
        type=whole_number(2),
        metavar="N",
        help="use N generated images instead, to measure speed",
    )
    add(
        "--image-size",
        type=whole_number(16),
        default=224,
        metavar="N",
        help="pixels per side of the model's input",
    )
    add(
        "--workers",
        type=whole_number(0),
        metavar="N",
        help="loader processes per rank; one per core if not given",
    )


def add_model_flags(parser):
    """Add the flags that decide what is trained."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--arch",
        default="resnet18",
        metavar="NAME",
        help="a torchvision model, or timm:NAME if timm is installed",
    )
    add(
        "--weights",
        metavar="FILE",
        help="weights to start from: a checkpoint, a state_dict, or torchvision:DEFAULT",
    )
    add(
        "--new-head",
        action="store_true",
        help="with --weights: a new last layer, for other classes",
    )
    add(
        "--freeze",
        default="",
        metavar="NAMES",
        help="do not train these parts: conv1,bn1,layer1",
    )
    add("--sync-bn", action="store_true", help="batch norm over the images of all processes")


def add_recipe_flags(parser):
    """Add the flags that decide how the weights change."""
    add = parser.add_argument_group("recipe").add_argument
    add(
        "--epochs",
        type=whole_number(1),
        default=100,
        metavar="N",
        help="passes over the training images",
    )
    add(
        "--batch-size",
        type=whole_number(1),
        default=256,
        metavar="N",
        help="images per step on all processes together",
    )
    add("--accumulate", type=whole_number(1), default=1, metavar="N", help="micro-batches per step")
    add(
        "--lr",
        type=number(above=0),
        default=0.1,
        metavar="X",
        help="peak learning rate for 256 images; scaled linearly",
    )
    add(
        "--schedule",
        choices=("cosine", "step"),
        default="cosine",
        help="step: divide by 10 every --step-epochs",
    )
    add(
        "--final-lr",
        type=number(),
        default=0,
        metavar="X",
        help="share of the peak at which --schedule cosine ends",
    )
    add(
        "--step-epochs",
        type=number(above=0),
        default=30,
        metavar="N",
        help="epochs between steps of --schedule step",
    )
    add(
        "--warmup-epochs",
        type=number(),
        default=5,
        metavar="N",
        help="epochs until the learning rate is at its peak",
    )
    add(
        "--warmup-factor",
        type=number(),
        default=0.1,
        metavar="X",
        help="share of the peak at which warm-up starts",
    )
    add("--momentum", type=number(below=1), default=0.9, metavar="X", help="Nesterov momentum")
    add(
        "--weight-decay",
        type=number(),
        default=5e-5,
        metavar="X",
        help="for weights, not for norms and biases",
    )
    add(
        "--label-smoothing",
        type=number(below=1),
        default=0,
        metavar="X",
        help="share of the target for all classes",
    )
    add(
        "--clip-grad",
        type=number(above=0),
        metavar="NORM",
        help="clip the gradient of a step to this norm",
    )
    add(
        "--ema",
        type=number(below=1),
        default=0,
        metavar="X",
        help="average the weights with this decay; 0 is off",
    )
    add(
        "--seed",
        type=whole_number(0, 2**32),
        default=0,
        metavar="N",
        help="for weights, order, crops and dropout",
    )


def add_run_flags(parser):
    """Add the flags that decide what happens beside the training."""
    add = parser.add_argument_group("run").add_argument
    add(
        "--evaluate",
        action="store_true",
        help="evaluate the model of --weights or --resume, without training",
    )
    add(
        "--eval-every",
        type=whole_number(0),
        default=1,
        metavar="N",
        help="evaluate after every N epochs; 0 is never",
    )
    add(
        "--checkpoints-path",
        default="checkpoints",
        metavar="DIR",
        help="folder of checkpoints; machines may share it",
    )
    add(
        "--checkpoint-every",
        type=interval,
        default="600s",
        metavar="N",
        help="steps (100) or seconds (600s)",
    )
    add(
        "--keep",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="checkpoints to keep, beside the best",
    )
    add(
        "--resume", action="store_true", help="continue from the newest checkpoint, if there is one"
    )
    add(
        "--dist-init-method",
        choices=("auto", "env", "slurm"),
        default="auto",
        help="the launcher to insist on",
    )
    add(
        "--timeout",
        type=number(above=0),
        default=60,
        metavar="SECONDS",
        help="how long to wait for a missing rank",
    )
    add("--print-every", type=whole_number(1), default=50, metavar="N", help="steps between lines")
    add(
        "--time-communication",
        action="store_true",
        help="time it on GPUs too, which slows the backward pass a little",
    )
    add(
        "--log-file",
        type=output_file,
        metavar="FILE",
        help="append one JSON line per epoch to FILE",
    )
    add("--tensorboard", metavar="DIR", help="write event files for TensorBoard")
    add("--deterministic", action="store_true", help="the same bits in every run; slower")


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


def add_machine_flags(parser):
    """Add the flags that decide how to compute, not what; tools/bench/train.py has them too."""
    add = parser.add_argument_group("computation").add_argument
    add("--amp", choices=tuple(AMP_DTYPES), default="none", help="mixed precision")
    add(
        "--channels-last",
        action="store_true",
        help="store images as NHWC: faster with --amp on a GPU",
    )
    add("--compile", action="store_true", help="compile the model with torch.compile")


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
