"""What 06 reports while it trains: console lines, TensorBoard, JSON lines, and where the time of a step goes.

A Progress only observes: without it, the training is the same.
"""

import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from common.report import Report, count_repeats, environment, warmup_steps

# How a recorded command starts, given the number of machines, the processes on each, and all
# processes.
COMMANDS = {
    "python": "python",
    "torchrun": "torchrun --nnodes={} --nproc-per-node={}",
    "srun": "srun --nodes={} --ntasks-per-node={} python",
    "mpirun": "mpirun -n {2} python",
    "nodes": "python",
}


class Progress(Report):
    """The console lines, records and clocks of one run of 06. Only rank 0 prints and writes.

    Args:
        args: the flags of 06.
        d: Distributed.
        sampler: GlobalBatchSampler, of the training set.
        ddp: DistributedDataParallel, or anything else in a world of one.
    """

    def __init__(self, args, d, sampler, ddp):
        self.args, self.device, self.rank = args, d.device, d.rank
        self.sampler, self.steps, self.accumulate = sampler, sampler.steps, sampler.accumulate
        self.started, self.tensorboard = time.perf_counter(), None
        # On a GPU the hook of the clock slows the backward pass, so it is measured only if asked
        # for.
        measured = d.world_size > 1 and (d.device.type == "cpu" or args.time_communication)
        self.communication = CommunicationClock(ddp, d.device) if measured else None
        self.waiting = Spans(d.device)
        machines = d.world_size // d.local_world_size
        start = COMMANDS[d.launcher].format(machines, d.local_world_size, d.world_size)
        script = os.path.basename(sys.argv[0])
        same = ("image_size", "amp", "channels_last", "compile", "sync_bn", "ema", "seed")
        self.record = {name: getattr(args, name) for name in same} | environment(d.device)
        self.record |= {
            "script": script,
            "command": f"{start} {shlex.join([script, *sys.argv[1:]])}",
            "launcher": d.launcher,
            "dataset": f"dummy {args.dummy}" if args.dummy else args.train_path,
            "model": args.arch,
            "world_size": d.world_size,
            "local_world_size": d.local_world_size,
            "backend": d.backend,
            "global_batch": args.batch_size,
            "accumulate": self.accumulate,
            "lr": args.lr * args.batch_size / 256,
        }
        if d.is_main and args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        if d.is_main and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes two seconds to import

            self.tensorboard = SummaryWriter(args.tensorboard)

    def header(self, model, train_set, val_set):
        """Print what decides the cost and the result of a run. Every rank must call it."""
        r, args = self.record, self.args
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        local = f" ({r['local_world_size']} on this machine)" if r["world_size"] > 1 else ""
        pieces = " to ".join(map(str, sorted(set(self.sampler.piece_sizes()))))
        micro = f" in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        options = [f"amp {args.amp}", f"seed {args.seed}"]
        options += ["channels last"] * args.channels_last + ["compiled"] * args.compile
        options += ["synchronized batch norm"] * (args.sync_bn and r["world_size"] > 1)
        options += [f"averaged weights {args.ema:g}"] * bool(args.ema) + [
            "deterministic"
        ] * args.deterministic
        started_by = f"started by {r['launcher']} | world size {r['world_size']}{local}"
        self.print(f"{r['script']} | {started_by} | torch {r['torch']}")
        self.show_devices()
        self.print(
            f"{r['dataset']}: {len(train_set)} train and {len(val_set)} test images, "
            f"{len(train_set.classes)} classes, "
            f"seen at {args.image_size}x{args.image_size} | {args.arch}, {weights:.1f} M weights"
        )
        self.print(
            f"global batch {args.batch_size}: {pieces} images per process at a time{micro}, "
            f"{self.steps} steps per "
            f"epoch | lr {args.lr:g} -> {r['lr']:g} | {', '.join(options)}"
        )

    def backward_done(self):
        """Note that the last backward pass of a step has returned."""
        if self.communication:
            self.communication.backward_done()

    def timed(self, loader, epoch, first_step, totals):
        """Return an iterator over the batches of a training epoch that measures how long the device waits for them.

        Args:
            first_step: int, above 0 if an earlier process trained the steps before it.
            totals: float (4,), what that process counted; see show_step.
        """
        self.epoch, self.first_step, self.images = epoch, first_step, 0
        self.seconds, self.waited, self.communicated = None, 0.0, 0.0
        self.totals = totals.tolist()
        self.epoch_start = self.timing_start = self.line_start = self._mark()
        return self.with_bar(self._timed(iter(loader)), (self.steps - first_step) * self.accumulate)

    def _timed(self, batches):
        steps = self.steps - self.first_step
        for count in range(1, steps * self.accumulate + 1):
            self.waiting.begin()
            batch = next(batches)
            self.waiting.end()
            if count % self.accumulate == 0:
                # Of all ranks: their pieces of a step may differ in size by one image.
                step = self.first_step + count // self.accumulate - 1
                self.images += self.sampler.step_size(step)
            yield batch
            if count == warmup_steps(steps) * self.accumulate:
                self.timing_start = self._mark()

    def _speed(self, start):
        """Return the images per second of all processes since a mark."""
        now, images = self._mark()
        return (images - start[1]) / (now - start[0])

    def due(self, step):
        """Return whether this step, counted from 0, gets a line. It is the same on every rank."""
        return (step + 1) % self.args.print_every == 0 or step + 1 == self.steps

    def show_step(self, step, totals, lr):
        """Print loss, accuracy and speed since the last line, and where the time went.

        Args:
            step: int, counted from 0.
            totals: float (4,) on the device: sum of losses, correct answers, correct answers among
                the first five, images; over all ranks and since the start of the epoch.
            lr: float, of this step.
        """
        before, self.totals = self.totals, totals.tolist()  # note: this waits for the device
        loss, top1, top5, images = (
            now - then for now, then in zip(self.totals, before, strict=True)
        )
        loss, top1, top5 = (
            loss / max(1, images),
            100 * top1 / max(1, images),
            100 * top5 / max(1, images),
        )
        now = time.perf_counter()
        seconds, speed = now - self.line_start[0], self._speed(self.line_start)
        waited, communicated = (
            self.waiting.read(),
            self.communication.spans.read() if self.communication else 0.0,
        )
        waiting, exchanging = waited / seconds, communicated / seconds
        shares = f"data {waiting:.1%}, compute {max(0, 1 - waiting - exchanging):.1%}"
        if self.communication or self.record["world_size"] == 1:
            shares += f", communication {exchanging:.1%}"
        steps_done = self.epoch * self.steps + step + 1
        seconds_per_step = (now - self.epoch_start[0]) / (step + 1 - self.first_step)
        left = (self.args.epochs * self.steps - steps_done) * seconds_per_step
        self.print(
            f"   == step: [{step + 1:4}/{self.steps}] [{self.epoch + 1}/{self.args.epochs}] | "
            f"loss: {loss:.3f} | "
            f"top-1: {top1:6.3f}% | {speed:.0f} img/s | lr {lr:.4g} | {shares} | {duration(left)} "
            "left"
        )
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} img/s")
        scalars = {"train/loss": loss, "train/top1": top1, "train/top5": top5, "train/lr": lr}
        scalars |= {
            "speed/images_per_second": speed,
            "speed/data": waiting,
            "speed/communication": exchanging,
        }
        self._write_scalars(steps_done, scalars)
        self.waited += waited
        self.communicated += communicated
        self.line_start = self._mark()
        if step + 1 == self.steps:
            self.seconds = self.line_start[0] - self.epoch_start[0]
            self.images_per_second = self._speed(self.timing_start)

    def show_epoch(self, accuracy):
        """Print the accuracy, if the epoch was evaluated, and write the record of the epoch.

        Args:
            accuracy: (top-1 in %, top-5 in %, number of images) or None.
        """
        measured, speed = {"epoch": self.epoch + 1}, ""
        if self.seconds:  # otherwise an earlier process trained this epoch
            waited = self.waited / self.seconds
            speed = f" | {self.images_per_second:.0f} img/s, {waited:.1%} waiting for data"
            measured |= {
                "seconds": round(self.seconds, 3),
                "images_per_second": round(self.images_per_second, 1),
                "data_wait_share": round(waited, 4),
                "communication_share": round(self.communicated / self.seconds, 4),
                "train_loss": round(self.totals[0] / self.totals[3], 4),
                "train_acc": round(100 * self.totals[1] / self.totals[3], 3),
            }
        if accuracy:
            top1, top5, images = accuracy
            self.print(
                f"   == test: [{self.epoch + 1}/{self.args.epochs}] | top-1: {top1:6.3f}% | top-5: "
                f"{top5:6.3f}% | "
                f"{images} images{speed}"
            )
            self._write_scalars(
                (self.epoch + 1) * self.steps, {"test/top1": top1, "test/top5": top5}
            )
            measured |= {"test_acc": round(top1, 3), "test_top5": round(top5, 3)}
        self.write(measured)

    def outcome(self, accuracy, best):
        """Return the last line of a run that was not stopped."""
        if self.args.evaluate:
            return "evaluated: top-1 {:.3f}%, top-5 {:.3f}%, {} images".format(*accuracy)
        outcome = f"top-1 {accuracy[0]:.3f}%, best {best:.3f}%" if accuracy else "not evaluated"
        return f"done: {outcome} after {self.args.epochs} epochs"

    def close(self, line):
        """Print the last line of a run, with its time and its memory."""
        if self.tensorboard:
            self.tensorboard.close()
        seconds = time.perf_counter() - self.started
        super().close(line if seconds < 120 else f"{line} | {duration(seconds)}")

    def _write_scalars(self, step, values):
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()  # a killed process loses what is not on the disk


class CommunicationClock:
    """How long a step waits for gradients after its own backward pass: communication that no computation hides.

    DistributedDataParallel sends gradients in buckets while the backward pass computes others. When
    the last bucket is full, this rank has nothing more to compute. The rest is the time of the
    network, and of slower ranks.
    """

    def __init__(self, ddp, device):
        self.spans, self.open = Spans(device), False
        self.side_stream = torch.cuda.Stream() if device.type == "cuda" else None
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _, bucket):
        if bucket.is_last():
            self.spans.begin()
            self.open = True
        if self.side_stream is None:
            return allreduce_hook(dist.group.WORLD, bucket)
        # On a side stream, since get_future() makes the current stream wait for the gradients.
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            return allreduce_hook(dist.group.WORLD, bucket)

    def backward_done(self):
        """Note that the last backward pass of a step has returned."""
        if self.open:
            self.spans.end()
            self.open = False


class Spans:
    """Spans of time on a device. On a GPU, events measure them in its stream, so no step waits for the GPU."""

    def __init__(self, device):
        self.cuda, self.spans = device.type == "cuda", []

    def begin(self):
        self.start = self._now()

    def end(self):
        self.spans.append((self.start, self._now()))

    def read(self):
        """Return the seconds of all spans since the last reading. The device must have finished its work."""
        spans, self.spans = self.spans, []
        return sum(
            begin.elapsed_time(end) / 1000 if self.cuda else end - begin for begin, end in spans
        )

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def duration(seconds):
    """Return seconds in words, to two units."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return (
        f"{hours // 24} d {hours % 24} h"
        if hours >= 48
        else f"{minutes // 60} h {minutes % 60} min"
    )
