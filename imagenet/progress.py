"""What 06 prints and records: console lines, TensorBoard, JSON lines.

A Progress only observes: without it, the training is the same.
"""

import time
from typing import NamedTuple

import torch

from common.console import Console, memory_used
from common.records import append_record, count_repeats, environment
from ddp.report import launch_fields, launch_lines
from imagenet.clocks import CommunicationClock, Spans, TimedEpoch


class Evaluation(NamedTuple):
    """The result of an evaluation, on the images of all ranks."""

    loss: float  # mean cross entropy, without label smoothing
    top1: float  # in %
    top5: float  # in %
    images: int


class Progress:
    """The console lines, records and clocks of one run of 06. Only rank 0 prints and writes.

    Args:
        args: the flags of 06.
        d: Distributed.
        sampler: GlobalBatchSampler, of the training set.
        ddp: DistributedDataParallel, or anything else in a world of one.
    """

    def __init__(self, args, d, sampler, ddp):
        self.args = args
        self.d = d
        self.sampler = sampler
        self.started = time.perf_counter()
        self.console = Console(d.is_main)
        # On a GPU the hook of this clock slows the backward pass, so it is measured only if asked
        # for.
        measured = d.world_size > 1 and (d.device.type == "cpu" or args.time_communication)
        self.communication = CommunicationClock(ddp, d.device) if measured else None

        same = ("image_size", "amp", "channels_last", "compile", "sync_bn", "ema", "seed")
        self.record = {name: getattr(args, name) for name in same}
        self.record |= environment(d.device)
        self.record |= launch_fields(d.device, d.launcher, d.world_size, d.local_world_size)
        self.record |= {
            "dataset": f"dummy {args.dummy}" if args.dummy else args.train_path,
            "model": args.arch,
            "global_batch": args.batch_size,
            "accumulate": sampler.accumulate,
            "lr": args.lr * args.batch_size / 256,
        }
        if d.is_main and args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        self.tensorboard = None
        if d.is_main and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes two seconds to import

            self.tensorboard = SummaryWriter(args.tensorboard)
        self.epoch = None  # TimedEpoch: the current one

    def print(self, line):
        self.console.print(line)

    def header(self, model, train_set, val_set):
        """Print what decides the cost and the result of a run. Every rank must call it."""
        r = self.record
        args = self.args
        for line in launch_lines(r, self.d.device):
            self.print(line)
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        self.print(
            f"{r['dataset']}: {len(train_set)} train and {len(val_set)} test images, "
            f"{len(train_set.classes)} classes, seen at {args.image_size}x{args.image_size}"
        )
        self.print(
            f"{args.arch}, {weights:.1f} M weights | lr {args.lr:g} -> {r['lr']:g} | "
            f"{', '.join(self._options())}"
        )
        sizes = " to ".join(str(size) for size in sorted(set(self.sampler.micro_batch_sizes())))
        accumulate = self.sampler.accumulate
        micro = f" in {accumulate} micro-batches" if accumulate > 1 else ""
        self.print(
            f"global batch {args.batch_size}: {sizes} images per process at a time{micro}, "
            f"{self.sampler.steps} steps per epoch"
        )

    def _options(self):
        """Return what the header says about the flags of this run: list of str."""
        args = self.args
        options = [f"amp {args.amp}", f"seed {args.seed}"]
        if args.channels_last:
            options.append("channels last")
        if args.compile:
            options.append("compiled")
        if args.sync_bn and self.d.world_size > 1:
            options.append("synchronized batch norm")
        if args.ema:
            options.append(f"averaged weights {args.ema:g}")
        if args.deterministic:
            options.append("deterministic")
        return options

    def timed(self, loader, epoch, first_step, totals):
        """Return an iterator over a training epoch that measures the wait for data.

        Args:
            first_step: int, above 0 if an earlier process trained the steps before it.
            totals: float (4,), what that process counted; see show_step.
        """
        device = self.d.device
        sampler = self.sampler
        communication = self.communication.spans if self.communication else Spans(device)
        self.epoch = TimedEpoch(
            number=epoch,
            steps=sampler.steps,
            device=device,
            communication=communication,
            totals=totals.tolist(),
            first_step=first_step,
            accumulate=sampler.accumulate,
        )
        batches = self.epoch.batches(iter(loader), sampler.step_size)
        description = f"epoch {epoch + 1}/{self.args.epochs}"
        total = (sampler.steps - first_step) * sampler.accumulate
        return self.console.with_bar(batches, total, description)

    def with_bar(self, loader):
        """Return an iterator over an evaluation. In a terminal, a long one shows a bar."""
        return self.console.with_bar(loader, len(loader), "test", delay=2)

    def backward_done(self):
        """Note that the last backward pass of a step has returned."""
        if self.communication:
            self.communication.backward_done()

    def due(self, step):
        """Return whether this step, counted from 0, gets a line. It is the same on every rank."""
        return (step + 1) % self.args.print_every == 0 or step + 1 == self.sampler.steps

    def show_step(self, step, totals, lr):
        """Print loss, accuracy and speed since the last line, and where the time went.

        Args:
            step: int, counted from 0.
            totals: float (4,) on the device: sum of losses, correct answers, correct answers among
                the first five, images; over all ranks and since the start of the epoch.
            lr: float, of this step.
        """
        epoch = self.epoch
        since = epoch.line
        # note: tolist() waits for the device
        (loss, top1, top5, images), data, communication = epoch.end_line(totals.tolist())
        images = max(1, images)  # all images since the last line may be damaged
        loss = loss / images
        top1 = 100 * top1 / images
        top5 = 100 * top5 / images

        speed = epoch.speed(since)
        parts = f"data {data:.1%}, compute {max(0, 1 - data - communication):.1%}"
        if self.communication or self.d.world_size == 1:
            parts += f", communication {communication:.1%}"
        steps_done = epoch.number * epoch.steps + step + 1
        seconds_per_step = epoch.seconds / (step + 1 - epoch.first_step)
        left = (self.args.epochs * epoch.steps - steps_done) * seconds_per_step
        self.print(
            f"   == step: [{step + 1:4}/{epoch.steps}] [{epoch.number + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | top-1: {top1:6.3f}% | {speed:.0f} img/s\n"
            f"      lr {lr:.4g} | {parts} | {duration(left)} left"
        )
        self.console.bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} img/s")
        scalars = {
            "train/loss": loss,
            "train/top1": top1,
            "train/top5": top5,
            "train/lr": lr,
            "speed/images_per_second": speed,
            "speed/data": data,
            "speed/communication": communication,
        }
        self._write_scalars(steps_done, scalars)

    def show_epoch(self, evaluation):
        """Print loss and accuracy, if the epoch was evaluated, and write the record of the epoch.

        Args:
            evaluation: Evaluation or None.
        """
        epoch = self.epoch
        measured = {"epoch": epoch.number + 1}
        speed = ""
        if epoch.first_step < epoch.steps:  # otherwise an earlier process trained this epoch
            measured = epoch.record()
            speed = f"\n      {epoch.speed(epoch.warm):.0f} img/s, "
            speed += f"{epoch.waited / epoch.seconds:.1%} waiting for data"
        if evaluation:
            loss, top1, top5, images = evaluation
            self.print(
                f"   == test: [{epoch.number + 1}/{self.args.epochs}] | loss: {loss:.3f} | "
                f"top-1: {top1:6.3f}% | top-5: {top5:6.3f}% | {images} images{speed}"
            )
            scalars = {"test/loss": loss, "test/top1": top1, "test/top5": top5}
            self._write_scalars((epoch.number + 1) * epoch.steps, scalars)
            measured |= {
                "test_loss": round(loss, 4),
                "test_acc": round(top1, 3),
                "test_top5": round(top5, 3),
            }
        if self.args.log_file and self.d.is_main:
            append_record(self.args.log_file, self.record | measured)

    def outcome(self, evaluation, best):
        """Return the last line of a run that was not stopped."""
        if self.args.evaluate:
            loss, top1, top5, images = evaluation
            return (
                f"evaluated: loss {loss:.3f}, top-1 {top1:.3f}%, top-5 {top5:.3f}%, {images} images"
            )
        outcome = "not evaluated"
        if evaluation:
            outcome = f"top-1 {evaluation.top1:.3f}%, best {best:.3f}%"
        return f"done: {outcome} after {self.args.epochs} epochs"

    def close(self, line):
        """Print the last line of a run, with its time and its memory."""
        if self.tensorboard:
            self.tensorboard.close()
        seconds = time.perf_counter() - self.started
        if seconds >= 120:
            line += f" | {duration(seconds)}"
        self.print(f"{line} | {seconds:.0f} s | {memory_used(self.d.device)}")

    def _write_scalars(self, step, values):
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()  # a killed process loses what is not on the disk


def duration(seconds):
    """Return seconds in words, to two units."""
    minutes = round(seconds / 60)
    hours = round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def batch_totals(loss, outputs, targets):
    """Return float (4,): sum of losses, correct answers, correct among the first five, images.

    Args:
        loss: float (), the sum over the images of the batch.
    """
    correct = outputs.topk(min(5, outputs.size(1)), dim=1).indices == targets[:, None]
    images = targets >= 0  # a damaged image has a negative target
    return torch.stack([loss.detach(), correct[:, 0].sum(), correct.sum(), images.sum()]).float()
