"""Functions shared by the benchmarks: flags, a training step, a line in --log-file."""

import contextlib
from pathlib import Path

import torch
from torch import nn

from common.data import build_loader
from common.flags import shared_flags, whole_number
from common.models import build_model
from tools.records import append

ROOT = Path(__file__).resolve().parents[2]


def parse_args(doc, add_flags=lambda parser: None):
    """Parse the flags of a benchmark: the flags of 01 to 05, --repeats, and the benchmark's own
    flags.
    """
    parser = shared_flags(doc)
    parser.add_argument(
        "--repeats", type=whole_number(1), default=5, metavar="N", help="number of runs per variant"
    )
    add_flags(parser)
    # For input.py: enough images that the batches which workers prefetch before the timing starts
    # do not matter.
    parser.set_defaults(limit=100 * 256, epochs=1)
    return parser.parse_args()


def command_line(args):
    """Return the flags that select the data and the training, as a command line."""
    names = ("dataset", "data_dir", "arch", "batch_size", "limit", "seed", "workers")
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]


def pick_device():
    return (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )


def first_batch(args, train_set):
    """Return the first batch of a training set as (images, targets); a small set is repeated."""
    indices = [k % len(train_set) for k in range(args.batch_size)]
    return next(iter(build_loader(train_set, args, indices)))


def build_step(args, train_set, device, wrap=lambda model: model):
    """Build a model and return a function that runs one training step: (images, targets) -> (loss,
    outputs).

    With synced=False, the step leaves out the communication of DistributedDataParallel.

    Args:
        args: Namespace of parse_args.
        train_set: data set, for the shape of its images and its number of classes.
        device: torch.device of the model; images and targets must be on it.
        wrap: function that wraps the model, for example DistributedDataParallel.
    """
    torch.manual_seed(args.seed)
    model = build_model(args, train_set).to(device)
    model = wrap(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )

    def step(images, targets, synced=True):
        with contextlib.nullcontext() if synced else model.no_sync():
            outputs = model(images)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        return loss, outputs

    return step


def write(args, env, **measured):
    """Append one line to --log-file."""
    settings = {
        name: getattr(args, name) for name in ("dataset", "data_dir", "limit", "batch_size")
    }
    append(args.log_file, {"model": args.arch} | settings | env | measured)
