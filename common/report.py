"""What 01 to 05 print and record.

A Report only observes: without it a script trains the same model.
"""

import multiprocessing
import os
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.console import Console, memory_used
from common.distributed import find_launcher
from common.images import find_splits
from common.records import append_record, count_repeats, run_fields


class Report:
    """The console lines and the records of one run. Only rank 0 prints and writes.

    Args:
        args: the shared flags.
        device: torch.device.
        local_world_size: int, the processes on this machine.
    """

    def __init__(self, args, device, local_world_size=1):
        rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.args = args
        self.device = device
        self.world_size = world_size
        self.started = time.perf_counter()
        self.console = Console(rank)
        self.meter = Meter(device)
        flags = ("dataset", "data_dir", "limit", "augment", "batch_size", "warmup_epochs", "seed")
        self.record = {name: getattr(args, name) for name in flags}
        self.record |= run_fields(device, launcher_name(), world_size, local_world_size)
        self.record |= {
            "model": args.arch,
            "global_batch": args.batch_size * world_size,
            "amp": getattr(args, "amp", "none"),
            "sync_bn": getattr(args, "sync_bn", False),
        }
        if args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        # Of the current epoch:
        self.epoch = 0
        self.steps = 0
        self.waited = 0.0  # seconds for data
        self.totals = [0.0, 0.0, 0.0]  # sum of losses, correct answers, images; see show_step
        # Of the last line, and of the last epoch:
        self.train_loss = None
        self.train_acc = None  # in %
        self.test_loss = None
        self.test_acc = None  # in %
        self.seconds = None
        self.images_per_second = None

    def print(self, line):
        self.console.print(line)

    def header(self, model, train_set, test_set, lr):
        """Print what decides the cost and the result of a run. Every rank must call it.

        Args:
            lr: float, the learning rate after scaling.
        """
        r = self.record
        args = self.args
        r["lr"] = lr
        self.console.print_launch(r, self.device)
        size = "x".join(str(n) for n in (train_set.channels, *train_set.image_size))
        storage = "in memory" if train_set.in_memory else "read from files"
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        self.print(
            f"{args.dataset}: {len(train_set)} train and {len(test_set)} test images of {size}, "
            f"{storage}, {train_set.num_classes} classes | {args.arch}, {weights:.1f} M weights"
        )
        if args.dataset == "folder":
            test = os.path.join(args.data_dir, "test")
            if os.path.isdir(test) and find_splits(args.data_dir)[1] != test:
                self.print(f"{test} is not used, because there is a val/ too")
        options = [f"seed {args.seed}"]
        if args.warmup_epochs:
            options.append(f"{args.warmup_epochs:g} epochs of warm-up")
        if r["sync_bn"]:
            options.append("synchronized batch norm")
        self.print(
            f"global batch = {args.batch_size} x {self.world_size} = {r['global_batch']} | "
            f"lr {args.lr:g} -> {lr:g} | {', '.join(options)}"
        )

    def timed(self, loader, epoch):
        """Return an iterator over a training epoch that measures how long the loop waits for data.

        On a GPU the wait is an upper bound of what data costs: meanwhile the GPU works on earlier
        steps.
        """
        self.epoch = epoch
        self.steps = len(loader)
        self.waited = 0.0
        self.totals = [0.0, 0.0, 0.0]
        self.meter.begin()
        description = f"epoch {epoch + 1}/{self.args.epochs}"
        return self.console.with_bar(self._timed(iter(loader)), self.steps, description)

    def _timed(self, batches):
        step = 0
        asked = time.perf_counter()
        # to its end: RandomSampler draws a last random number there
        while batch := next(batches, None):
            self.waited += time.perf_counter() - asked
            self.meter.images += len(batch[1]) * self.world_size
            yield batch
            step += 1
            if step == warmup_steps(self.steps):
                self.meter.warm = self.meter.line = self.meter.mark()
            asked = time.perf_counter()

    def due(self, step):
        """Return whether a step, counted from 0, gets a line. All ranks agree.

        One in --print-every does, and the last.
        """
        return (step + 1) % self.args.print_every == 0 or step + 1 == self.steps

    def show_step(self, step, totals):
        """Print loss and accuracy since the start of the epoch, and the speed since the last line.

        Args:
            step: int, counted from 0.
            totals: float (3,) on the device: sum of losses, correct answers and images since the
                last line, over all ranks.
        """
        new = totals.tolist()  # note: this waits for the device
        self.totals = [a + b for a, b in zip(self.totals, new, strict=True)]
        loss, correct, images = self.totals
        self.train_loss = loss / images
        self.train_acc = 100 * correct / images
        speed = self.meter.speed(self.meter.line)
        self.print(
            f"   == step: [{step + 1:3}/{self.steps}] [{self.epoch + 1}/{self.args.epochs}] | "
            f"loss: {self.train_loss:.3f} | acc: {self.train_acc:6.3f}% | {speed:.0f} img/s"
        )
        self.console.bar.set_postfix_str(f"loss {self.train_loss:.3f}, {speed:.0f} img/s")
        self.meter.line = self.meter.mark()
        if step + 1 == self.steps:
            self.seconds = self.meter.line.seconds - self.meter.start.seconds
            self.images_per_second = self.meter.speed(self.meter.warm)

    def show_epoch(self, totals):
        """Print loss and accuracy on the test set, and write the record of an epoch.

        Args:
            totals: float (3,) on the device: sum of losses, correct answers and images of the test
                set, over all ranks.
        """
        loss, correct, images = totals.tolist()
        self.test_loss = loss / images
        self.test_acc = 100 * correct / images
        wait_share = self.waited / self.seconds
        self.print(
            f"   == test: [{self.epoch + 1}/{self.args.epochs}] | "
            f"loss: {self.test_loss:.3f} | acc: {self.test_acc:6.3f}% | "
            f"epoch took {self.seconds:.1f} s, {self.images_per_second:.0f} img/s, "
            f"{100 * wait_share:.1f}% of it waiting for data"
        )
        measured = {
            "epoch": self.epoch + 1,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 1),
            "data_wait_share": round(wait_share, 4),
            "train_loss": round(self.train_loss, 4),
            "train_acc": round(self.train_acc, 3),
            "test_loss": round(self.test_loss, 4),
            "test_acc": round(self.test_acc, 3),
        }
        if self.args.log_file and self.console.rank == 0:
            append_record(self.args.log_file, self.record | measured)

    def summary(self):
        """Print the last line of a run."""
        seconds = time.perf_counter() - self.started
        self.print(
            f"done: test accuracy {self.test_acc:.2f}% after {self.args.epochs} epochs | "
            f"{seconds:.0f} s | {memory_used(self.device)}"
        )


class Mark(NamedTuple):
    """A moment of an epoch."""

    seconds: float  # on the clock, when the device had finished its work
    images: int  # of the epoch so far, on all ranks


class Meter:
    """The speed of a training epoch.

    It waits for the device before it reads the clock, so its seconds are true. Images per second
    since `warm` leave out the first steps of an epoch (compilation, workers that start).

    Args:
        device: torch.device.
    """

    def __init__(self, device):
        self.device = device
        self.images = 0  # of this epoch so far, on all ranks; the caller counts them
        self.start = None  # Mark: the start of the epoch
        self.warm = None  # Mark: the end of its first steps
        self.line = None  # Mark: the last line that was printed

    def begin(self):
        """Begin an epoch."""
        self.images = 0
        self.start = self.warm = self.line = self.mark()

    def mark(self):
        """Return the Mark of now."""
        synchronize(self.device)
        return Mark(time.perf_counter(), self.images)

    def speed(self, since):
        """Return the images per second on all ranks since a Mark."""
        now = self.mark()
        return (now.images - since.images) / (now.seconds - since.seconds)


def batch_totals(loss, outputs, targets):
    """Return float (3,) on the device: sum of losses, correct answers, images of a batch."""
    correct = (outputs.argmax(dim=1) == targets).sum()
    return torch.stack([loss.detach() * len(targets), correct, torch.full_like(loss, len(targets))])


def launcher_name():
    """Return what started this process: "python", "mp.spawn" or a launcher."""
    if not dist.is_initialized():
        return "python"
    if multiprocessing.parent_process():
        return "mp.spawn"
    return find_launcher()[0]


def synchronize(device):
    """Wait until an accelerator has finished its work. A CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def warmup_steps(steps):
    """Return how many steps of an epoch images per second leave out: 5, or a tenth if short."""
    return min(5, steps // 10)
