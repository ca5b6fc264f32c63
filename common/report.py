"""What 01 to 05 and 07 print and record, and the clocks of an epoch, which 06 has too.

A Report only observes: without it a script trains the same model.
"""

import dataclasses
import multiprocessing
import os
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.console import Console, memory_used
from common.images import find_splits
from common.records import append_record, count_repeats, run_fields
from common.setup_distributed import find_launcher


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
        flags = ("dataset", "data_dir", "limit", "augment", "warmup_epochs", "seed")
        self.record = {name: getattr(args, name) for name in flags}
        self.record |= run_fields(device, launcher_name(), world_size, local_world_size)
        self.record |= {
            "model": args.arch,
            "batch_size": args.batch_size // world_size,
            "global_batch": args.batch_size,
            "amp": getattr(args, "amp", "none"),
            "sync_bn": getattr(args, "sync_bn", False),
        }
        if args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        self.epoch = None  # Epoch: the current one
        self.test_acc = None  # in %, after the last epoch

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
            f"global batch = {r['batch_size']} x {self.world_size} = {r['global_batch']} | "
            f"lr {args.lr:g} -> {lr:g} | {', '.join(options)}"
        )

    def timed(self, loader, epoch):
        """Return an iterator over a training epoch that measures how long the loop waits for data.

        On a GPU the wait is an upper bound of what data costs: meanwhile the GPU works on earlier
        steps.
        """
        clocks = {"data_wait": Spans(torch.device("cpu"))}
        self.epoch = Epoch(epoch, len(loader), self.device, clocks, totals=[0.0, 0.0, 0.0])
        batches = self.epoch.batches(iter(loader), lambda _, batch: len(batch[1]) * self.world_size)
        description = f"epoch {epoch + 1}/{self.args.epochs}"
        return self.console.with_bar(batches, len(loader), description)

    def due(self, step):
        """Return whether a step, counted from 0, gets a line. All ranks agree.

        One in --print-every does, and the last.
        """
        return (step + 1) % self.args.print_every == 0 or step + 1 == self.epoch.steps

    def show_step(self, step, totals):
        """Print loss and accuracy since the start of the epoch, and the speed since the last line.

        Args:
            step: int, counted from 0.
            totals: float (3,) on the device: sum of losses, correct answers and images since the
                last line, over all ranks.
        """
        epoch = self.epoch
        since = max(epoch.line, epoch.warm)  # the later Mark: a speed leaves out the first steps
        new = totals.tolist()  # note: this waits for the device
        epoch.measure_line([a + b for a, b in zip(epoch.totals, new, strict=True)])
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
                set, over all ranks.
        """
        epoch = self.epoch
        loss, correct, images = totals.tolist()
        loss = loss / images
        self.test_acc = 100 * correct / images
        self.print(
            f"   == test: [{epoch.number + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | acc: {self.test_acc:6.3f}% | "
            f"epoch took {epoch.seconds:.1f} s, {epoch.speed(epoch.warm):.0f} img/s, "
            f"{epoch.share('data_wait'):.1%} of it waiting for data"
        )
        tested = {"test_loss": round(loss, 4), "test_acc": round(self.test_acc, 3)}
        if self.args.log_file and self.console.rank == 0:
            append_record(self.args.log_file, self.record | epoch.record() | tested)

    def summary(self):
        """Print the last line of a run."""
        seconds = time.perf_counter() - self.started
        result = "nothing left to train"  # in a training that was complete before
        if self.test_acc is not None:
            result = f"test accuracy {self.test_acc:.2f}%"
        self.print(
            f"done: {result} after {self.args.epochs} epochs | "
            f"{seconds:.0f} s | {memory_used(self.device)}"
        )


class Mark(NamedTuple):
    """A moment of an epoch."""

    seconds: float  # on the clock, when the device had finished its work
    images: int  # of the epoch so far, on all ranks


@dataclasses.dataclass
class Epoch:
    """The counts and the clocks of one training epoch. It prints nothing.

    It waits for the device before it reads the clock, so its seconds are true. Totals, seconds,
    speed and shares are measured at every printed line. The last step has one, so they are then
    those of the epoch.
    """

    number: int  # counted from 0
    steps: int
    device: torch.device
    clocks: dict  # {name: Spans}, of parts of the time; "data_wait" is the wait for the loader
    totals: list  # sum of losses, correct answers (perhaps others), images; up to the last line
    first_step: int = 0  # above 0 if an earlier process trained the steps before it
    accumulate: int = 1  # batches of a step

    def __post_init__(self):
        self.images = 0  # that all ranks have trained on in this process
        self.seconds_of = dict.fromkeys(self.clocks, 0.0)  # up to the last line
        self.start = self.mark()
        self.warm = self.start  # Mark: the end of the first steps (compilation, workers that start)
        self.line = self.start  # Mark: the last line

    def batches(self, batches, images_of):
        """Yield batches, and measure how long the loop waits for them.

        Args:
            images_of: function of a step, counted from 0, and its last batch: images on all ranks.
        """
        warmup = warmup_steps(self.steps - self.first_step) * self.accumulate
        waiting = self.clocks["data_wait"]
        waiting.begin()
        for count, batch in enumerate(batches, 1):
            waiting.end()
            if count % self.accumulate == 0:
                step = self.first_step + count // self.accumulate - 1
                self.images += images_of(step, batch)
            yield batch
            if count == warmup:
                self.warm = self.mark()
            waiting.begin()

    def mark(self):
        """Return the Mark of now."""
        synchronize(self.device)
        return Mark(time.perf_counter(), self.images)

    def measure_line(self, totals):
        """Begin another line.

        Args:
            totals: list of numbers, since the start of the epoch.

        Returns:
            (totals, shares) since the last line; shares is {name of a clock: its part of the time}.
        """
        before = self.line
        self.line = self.mark()
        new = [now - then for now, then in zip(totals, self.totals, strict=True)]
        self.totals = totals
        shares = {}
        for name, clock in self.clocks.items():
            seconds = clock.read()
            self.seconds_of[name] += seconds
            shares[name] = seconds / (self.line.seconds - before.seconds)
        return new, shares

    @property
    def seconds(self):
        """From the start of the epoch to the last line."""
        return self.line.seconds - self.start.seconds

    def speed(self, since):
        """Return the images per second on all ranks from a Mark to the last line."""
        return (self.line.images - since.images) / (self.line.seconds - since.seconds)

    def share(self, name):
        """Return the part of the epoch's time that a clock has measured."""
        return self.seconds_of[name] / self.seconds

    def record(self):
        """Return what a record says of this epoch and its training: a dict."""
        loss, correct, *_, images = self.totals
        shares = {f"{name}_share": round(self.share(name), 4) for name in self.clocks}
        return {
            "epoch": self.number + 1,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.speed(self.warm), 1),
            **shares,
            "train_loss": round(loss / images, 4),
            "train_acc": round(100 * correct / images, 3),
        }


class Spans:
    """Spans of time on a device.

    On a GPU, events measure them in its stream, so no step waits for the GPU.

    Args:
        device: torch.device.
    """

    def __init__(self, device):
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.start = None  # of the span that is open
        self.spans = []  # (start, end), since the last reading

    def begin(self):
        self.start = self._now()

    def end(self):
        self.spans.append((self.start, self._now()))

    def read(self):
        """Return the seconds of all spans since the last reading.

        The device must have finished its work.
        """
        spans = self.spans
        self.spans = []
        if self.is_cpu:
            return sum(end - start for start, end in spans)
        return sum(start.elapsed_time(end) / 1000 for start, end in spans)

    def _now(self):
        if self.is_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


def batch_totals(loss, outputs, targets):
    """Return float (3,) on the device: sum of losses, correct answers, images of a batch."""
    correct = (outputs.argmax(dim=1) == targets).sum()
    images = torch.full_like(loss, len(targets))
    return torch.stack([loss.detach() * images, correct, images])


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
