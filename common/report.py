"""What 01 and 02 print and record, and the clock of an epoch.

A Report only observes: without it a script trains the same model. ddp/report.py has the Report of
several processes.
"""

import time
from typing import NamedTuple

import torch

from common.console import Console, memory_used
from common.records import append_record, count_repeats, environment, started_alone


class Report:
    """The console lines and the records of one run.

    Args:
        args: the shared flags.
        device: torch.device.
        fields: dict, fields of the records that differ from those of one process.
        is_main: bool. False prints and writes nothing, since another process does.
    """

    recorded = ("dataset", "data_dir", "limit", "augment", "warmup_epochs", "seed")  # flags

    def __init__(self, args, device, fields=None, is_main=True):
        self.args = args
        self.device = device
        self.started = time.perf_counter()
        self.console = Console(is_main)
        self.record = {name: getattr(args, name) for name in self.recorded}
        self.record |= environment(device) | started_alone()
        self.record |= {
            "model": args.arch,
            "batch_size": args.batch_size,
            "global_batch": args.batch_size,
            "amp": "none",
            "sync_bn": False,
        }
        self.record |= fields or {}
        self.world_size = self.record["world_size"]
        if args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        self.epoch = None  # Epoch: the current one
        self.test_acc = None  # in %, after the last epoch

    def print(self, line):
        self.console.print(line)

    def launch_lines(self):
        """Return the lines that say how the run was started, and on what."""
        r = self.record
        return [
            f"{r['script']} | started by python | world size 1 | torch {r['torch']}",
            f"device: {self.device} ({r['device_name']}, {r['cpu_threads']} CPU threads)",
        ]

    def header(self, model, train_set, test_set, lr):
        """Print what decides the cost and the result of a run.

        Args:
            lr: float, the learning rate after scaling.
        """
        r = self.record
        args = self.args
        r["lr"] = lr
        for line in self.launch_lines():
            self.print(line)
        size = "x".join(str(n) for n in (train_set.channels, *train_set.image_size))
        storage = "in memory" if train_set.in_memory else "read from files"
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        self.print(
            f"{args.dataset}: {len(train_set)} train and {len(test_set)} test images of {size}, "
            f"{storage}, {train_set.num_classes} classes"
        )
        if test_set.note:
            self.print(test_set.note)
        options = [f"seed {args.seed}"]
        if args.warmup_epochs:
            options.append(f"{args.warmup_epochs:g} epochs of warm-up")
        if r["sync_bn"]:
            options.append("synchronized batch norm")
        self.print(f"{args.arch}, {weights:.1f} M weights | {', '.join(options)}")
        self.print(
            f"global batch = {r['batch_size']} x {self.world_size} = {r['global_batch']} | "
            f"lr {args.lr:g} -> {lr:g}"
        )

    def timed(self, loader, epoch):
        """Return an iterator over a training epoch that measures how long the loop waits for data.

        On a GPU the wait is an upper bound of what data costs: meanwhile the GPU works on earlier
        steps.
        """
        self.epoch = Epoch(epoch, len(loader), self.device)
        batches = self.epoch.batches(iter(loader), self.world_size)
        description = f"epoch {epoch + 1}/{self.args.epochs}"
        return self.console.with_bar(batches, len(loader), description)

    def with_bar(self, batches, count=None):
        """Return an iterator over an evaluation. A terminal counts the batches of a long one."""
        return self.console.with_bar(batches, count, "test", delay=2)

    def due(self, step):
        """Return whether a step, counted from 0, gets a line. All processes agree.

        One in --print-every does, and the last.
        """
        return (step + 1) % self.args.print_every == 0 or step + 1 == self.epoch.steps

    def show_step(self, step, totals):
        """Print loss and accuracy since the start of the epoch, and the speed since the last line.

        Args:
            step: int, counted from 0.
            totals: float (3,) on the device: sum of losses, correct answers and images since the
                last line, of all processes.
        """
        epoch = self.epoch
        since = max(epoch.line, epoch.warm)  # the later Mark: a speed leaves out the first steps
        epoch.end_line(totals.tolist())  # note: this waits for the device
        loss, correct, images = epoch.totals
        loss = loss / images
        speed = epoch.speed(since)
        self.print(
            f"   == step: [{step + 1:3}/{epoch.steps}] [{epoch.number + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | acc: {100 * correct / images:6.3f}% | {speed:.0f} img/s"
        )
        self.console.bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} img/s")

    def show_epoch(self, totals):
        """Print loss and accuracy on the test set, and write the record of an epoch.

        Args:
            totals: float (3,) on the device: sum of losses, correct answers and images of the test
                set, of all processes.
        """
        epoch = self.epoch
        loss, correct, images = totals.tolist()
        loss = loss / images
        self.test_acc = 100 * correct / images
        self.print(
            f"   == test: [{epoch.number + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | acc: {self.test_acc:6.3f}% | "
            f"{epoch.seconds:.1f} s, {epoch.speed(epoch.warm):.0f} img/s, "
            f"{epoch.waited / epoch.seconds:.1%} waiting for data"
        )
        tested = {"test_loss": round(loss, 4), "test_acc": round(self.test_acc, 3)}
        if self.args.log_file and self.console.is_main:
            append_record(self.args.log_file, self.record | epoch.record() | tested)

    def summary(self):
        """Print the last line of a run."""
        seconds = time.perf_counter() - self.started
        self.print(
            f"done: {self.result()} after {self.args.epochs} epochs | "
            f"{seconds:.0f} s | {memory_used(self.device)}"
        )

    def result(self):
        """Return what the last line says of the training."""
        if self.test_acc is None:
            return "nothing left to train"  # in a training that was complete before
        return f"test accuracy {self.test_acc:.2f}%"


class Mark(NamedTuple):
    """A moment of an epoch."""

    seconds: float  # on the clock, when the device had finished its work
    images: int  # of the epoch so far, of all processes


class Epoch:
    """The counts and the clock of one training epoch. It prints nothing.

    It waits for the device before it reads the clock, so its seconds are true. Totals, seconds and
    speed are measured at every printed line. The last step has one, so they are then those of the
    epoch.

    Args:
        number: int, counted from 0.
        steps: int.
        device: torch.device.
    """

    def __init__(self, number, steps, device):
        self.number = number
        self.steps = steps
        self.device = device
        self.images = 0  # that this process and the others have trained on
        self.totals = [0.0, 0.0, 0.0]  # sum of losses, correct answers, images; to the last line
        self.waited = 0.0  # seconds in which the loop waited for data
        self.start = self.mark()
        self.warm = self.start  # Mark: the end of the first steps (compilation, workers that start)
        self.line = self.start  # Mark: the last line

    def batches(self, batches, world_size):
        """Yield batches, and measure how long the loop waits for them."""
        warmup = warmup_steps(self.steps)
        begin = time.perf_counter()
        for count, batch in enumerate(batches, 1):
            self.waited += time.perf_counter() - begin
            self.images += len(batch[1]) * world_size
            yield batch
            if count == warmup:
                self.warm = self.mark()
            begin = time.perf_counter()

    def mark(self):
        """Return the Mark of now."""
        synchronize(self.device)
        return Mark(time.perf_counter(), self.images)

    def end_line(self, totals):
        """Begin another line. The totals are those since the last one: a list of numbers."""
        self.line = self.mark()
        self.totals = [a + b for a, b in zip(self.totals, totals, strict=True)]

    @property
    def seconds(self):
        """From the start of the epoch to the last line."""
        return self.line.seconds - self.start.seconds

    def speed(self, since):
        """Return the images per second of all processes from a Mark to the last line."""
        return (self.line.images - since.images) / (self.line.seconds - since.seconds)

    def record(self):
        """Return what a record says of this epoch and its training: a dict."""
        loss, correct, *_, images = self.totals
        return {
            "epoch": self.number + 1,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.speed(self.warm), 1),
            "data_wait_share": round(self.waited / self.seconds, 4),
            "train_loss": round(loss / images, 4),
            "train_acc": round(100 * correct / images, 3),
        }


def batch_totals(loss, outputs, targets):
    """Return float (3,) on the device: sum of losses, correct answers, images of a batch."""
    correct = (outputs.argmax(dim=1) == targets).sum()
    images = torch.full_like(loss, len(targets))
    return torch.stack([loss.detach() * images, correct, images])


def synchronize(device):
    """Wait until an accelerator has finished its work. A CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def warmup_steps(steps):
    """Return how many steps of an epoch images per second leave out: 5, or a tenth if short."""
    return min(5, steps // 10)
