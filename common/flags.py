"""The flags of 01 and 02, which 03 to 05 have too."""

import argparse
import contextlib
import math
import os
import sys


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose --help shows the defaults.

    It reads --batch_size as --batch-size.

    Args:
        doc: the docstring of the script, printed by --help.
    """

    def __init__(self, doc, **options):
        class Formatter(
            argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
        ):
            """Keep the lines of the docstring; show the defaults of flags that have one."""

            def _get_help_string(self, action):
                if action.default is None or action.default is False or action.default == "":
                    return action.help
                return super()._get_help_string(action)

        super().__init__(description=doc, formatter_class=Formatter, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        words = [with_hyphens(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(words, namespace)

    def error(self, message):
        remedy = f"all flags: {self.prog} --help"
        if message.startswith("unrecognized arguments"):
            remedy += "; from another script: docs/coming-from.md"
        self.exit(2, f"{self.prog}: error: {message} ({remedy})\n")


def with_hyphens(word):
    """Return a word of a command line with - for _ in the name of its flag: --batch_size=8."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def parse_args(doc):
    """Parse the flags of 01 and 02. --help prints `doc`, the docstring of the script."""
    parser = shared_flags(doc)
    args = parser.parse_args()
    copies = launched_copies()
    name = max(copies, key=copies.get, default=None)
    if name and copies[name] > 1:
        print(
            f"{parser.prog}: {name}={copies[name]}: each copy trains alone; "
            "03_mnmc_ddp_launch.py shares the work",
            file=sys.stderr,
        )
    return args


def launched_copies():
    """Return {environment variable: copies of this script that a launcher has started}."""
    names = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}


def shared_flags(doc):
    """Return a parser of the flags that 01 to 05 share; see Parser."""
    parser = Parser(doc)
    add_flags(parser, SHARED)
    return parser


def add_flags(parser, rows):
    """Add flags to a parser, or to a group of flags.

    Args:
        rows: (flag and what follows it in --help, type, default, help) of each flag. The type is a
            function of the text, or a tuple of choices, or bool. If a bool is True by default, its
            flag has a --no- form.
    """
    for usage, kind, default, text in rows:
        name, _, metavar = usage.partition(" ")
        if kind is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            options = {"action": action}
        elif isinstance(kind, tuple):
            options = {"choices": kind}
        else:
            options = {"type": kind, "metavar": metavar}
        parser.add_argument(name, default=default, help=text, **options)


def whole_number(least, most=math.inf):
    """Return the type of a flag: a whole number from `least` to `most`."""
    limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    return _checked(int, lambda value: least <= value <= most, f"a whole number {limits}")


def number(above=None, below=math.inf):
    """Return the type of a flag: a number above `above`, or of 0 or more; and below `below`."""
    limits = f"above {above:g}" if above is not None else "of 0 or more"
    if below < math.inf:
        limits += f" and below {below:g}"

    def is_valid(value):
        return (value >= 0 if above is None else value > above) and value < below

    return _checked(float, is_valid, f"a number {limits}")


def _checked(kind, is_valid, expected):
    def parse(text):
        with contextlib.suppress(ValueError):
            if is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} given, expected {expected}")

    return parse


def output_file(path):
    """The type of a flag that names a file to write.

    It is tried now, not after hours of training.
    """
    is_new = not os.path.exists(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        open(path, "a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {path}: {error.strerror}; name a file you may write"
        ) from None
    if is_new:
        with contextlib.suppress(OSError):  # another rank tries the same file
            os.remove(path)
    return path


CPUS = os.cpu_count() or 1
# fmt: off
SHARED = [  # see add_flags
    ("--dataset", ("shapes", "cifar10", "mnist", "folder"), "shapes",
     "shapes needs no files; folder is for your own images"),
    ("--data-dir DIR", str, "data",
     "the dataset's files, or train/CLASS/*.jpg and val/CLASS/*.jpg"),
    ("--download", bool, False, "download cifar10 or mnist into --data-dir if missing"),
    ("--epochs N", whole_number(1), 5, "passes over the training images"),
    ("--batch-size N", whole_number(2), 256, "images per training step, of all processes together"),
    ("--lr X", number(above=0), 0.01, "learning rate for 256 images per training step"),
    ("--lr-scaling", ("linear", "none"), "linear", "linear: --lr * --batch-size / 256; none: --lr"),
    ("--warmup-epochs N", number(), 0, "epochs in which the learning rate rises"),
    ("--workers N", whole_number(0), min(4, CPUS), "loader processes, for photographs only"),
    ("--arch NAME", str, "resnet18", "a torchvision model, mnist_net or small_net"),
    ("--augment", bool, True, "random crops and flips"),
    ("--seed N", whole_number(0, 2**32), 0, "for weights, order and augmentation"),
    ("--print-every N", whole_number(1), 50, "training steps between lines"),
    ("--limit N", whole_number(2), None, "train on N images only, for a quick try"),
    ("--log-file FILE", output_file, None, "append one JSON line per epoch to FILE"),
    ("--save FILE", output_file, None, "write the trained weights to FILE"),
]
# fmt: on
