"""What 06 tells while it trains: console lines, TensorBoard, JSON lines, and where the time of a step goes."""

import json
import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from common.report import count_repeats, environment, peak_memory, synchronize, warmup_steps

COMMANDS = {
    "python": "python",
    "torchrun": "torchrun --nnodes={} --nproc-per-node={}",
    "srun": "srun --nodes={} --ntasks-per-node={} python",
    "mpirun": "mpirun -n {2} python",
    "nodes": "python",
}


class Progress:
    """The lines, records and clocks of one run; only rank 0 prints and writes.

    Args:
        args: the flags of 06.
        d: Distributed.
        steps: int, of an epoch.
        accumulate: int, the micro-batches of a step.
    """

    def __init__(self, args, d, steps, accumulate):
        self.args, self.d, self.steps = args, d, steps
        self.started = time.perf_counter()
        self.communication = CommunicationClock(d.device)
        self.tensorboard = None
        start = COMMANDS[d.launcher].format(d.world_size // d.local_world_size, d.local_world_size, d.world_size)
        self.record = {
            "script": os.path.basename(sys.argv[0]),
            "command": f"{start} {shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])}",
            "launcher": d.launcher,
            "dataset": f"dummy {args.dummy}" if args.dummy else args.train_path,
            "model": args.arch,
            "world_size": d.world_size,
            "local_world_size": d.local_world_size,
            "backend": d.backend,
            "image_size": args.image_size,
            "global_batch": args.batch_size,
            "accumulate": accumulate,
            "lr": args.lr * args.batch_size / 256,
            "amp": args.amp,
            "channels_last": args.channels_last,
            "compile": args.compile,
            "sync_bn": args.sync_bn,
            "ema": args.ema,
            "seed": args.seed,
        } | environment(d.device)
        if d.is_main and args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        if d.is_main and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # two seconds that only those pay who want it

            self.tensorboard = SummaryWriter(args.tensorboard)

    def print(self, line):
        if self.d.is_main:
            print(line, flush=True)

    def header(self, net, train_set, val_set, pieces):
        """Print, once a run, everything that decides what it costs and what it gives.

        Args:
            pieces: (int, int), the fewest and the most images of a micro-batch on one rank.
        """
        r, args = self.record, self.args
        weights = sum(p.numel() for p in net.parameters()) / 1e6
        here = f" ({r['local_world_size']} on this machine)" if r["world_size"] > 1 else ""
        fewest, most = pieces
        each = f"{most}" if fewest == most else f"{fewest} to {most}"
        micro = f" in {r['accumulate']} micro-batches" if r["accumulate"] > 1 else ""
        options = [f"amp {args.amp}", f"seed {args.seed}"]
        options += ["channels last"] * args.channels_last + ["compiled"] * args.compile
        options += ["synchronised batch norm"] * (args.sync_bn and r["world_size"] > 1)
        options += [f"averaged weights {args.ema:g}"] * bool(args.ema) + ["deterministic"] * args.deterministic
        self.print(
            f"{r['script']} | started by {r['launcher']} | world size {r['world_size']}{here} | torch {r['torch']}"
        )
        self.print(f"device: {self.d.device} ({r['device_name']}, {r['cpu_threads']} CPU threads)")
        self.print(
            f"{r['dataset']}: {len(train_set)} train and {len(val_set)} test images, {len(train_set.classes)} classes, "
            f"seen at {args.image_size}x{args.image_size} | {args.arch}, {weights:.1f} M weights"
        )
        self.print(
            f"global batch {args.batch_size}: {each} images a process at a time{micro}, {self.steps} steps an epoch | "
            f"lr {args.lr:g} -> {r['lr']:g} | {', '.join(options)}"
        )

    def epoch_steps(self, epoch, first_step, totals):
        """Yield the steps of an epoch, with the clocks running.

        Args:
            first_step: int, above 0 when an earlier process has taken those before it.
            totals: float (4,), what that process has counted; see show_step.
        """
        self.epoch, self.step, self.images = epoch, first_step, 0
        self.train_loss = self.train_top1 = self.seconds = None
        self.before = totals.tolist()
        self.begin = self.warm = self.line = self._mark()
        self.waited = self.waited_in_epoch = self.communicated_in_epoch = 0.0
        for step in range(first_step, self.steps):
            self.step = step
            yield step
            if step + 1 - first_step == warmup_steps(self.steps - first_step):
                self.warm = self._mark()

    def wait_for(self, batches):
        """The next of the batches, on the clock.

        On a GPU the wait is an upper bound of what data costs: meanwhile the device works on earlier steps.
        """
        asked = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - asked
        self.images += len(batch[1])
        return batch

    def due(self):
        """Whether this step gets a line; the same steps on every rank."""
        return (self.step + 1) % self.args.print_every == 0 or self.step + 1 == self.steps

    def show_step(self, totals, lr):
        """Print loss, accuracy, speed and where the time went since the line before.

        Args:
            totals: float (4,) on the device: sum of losses, correct answers, those among the first five, images;
                over all ranks and since the epoch began.
            lr: float, of this step.
        """
        now = totals.tolist()  # note: this waits for the device
        seconds, speed = time.perf_counter() - self.line[0], self._speed(self.line)
        loss, top1, top5, images = (a - b for a, b in zip(now, self.before, strict=True))
        loss, top1, top5 = loss / max(1, images), 100 * top1 / max(1, images), 100 * top5 / max(1, images)
        communicated = self.communication.read()
        waiting, exchanging = self.waited / seconds, communicated / seconds
        done = self.epoch * self.steps + self.step + 1
        a_step = (time.perf_counter() - self.begin[0]) / (self.step + 1 - self.begin[2])
        left = (self.args.epochs * self.steps - done) * a_step
        self.print(
            f"   == step: [{self.step + 1:4}/{self.steps}] [{self.epoch + 1}/{self.args.epochs}] | loss: {loss:.3f} | "
            f"top-1: {top1:6.3f}% | {speed:.0f} img/s | lr {lr:.4g} | data {waiting:.1%}, "
            f"compute {max(0, 1 - waiting - exchanging):.1%}, communication {exchanging:.1%} | {duration(left)} left"
        )
        self._scalars(
            done,
            {"train/loss": loss, "train/top1": top1, "train/top5": top5, "train/lr": lr}
            | {"speed/images_per_second": speed, "speed/data": waiting, "speed/communication": exchanging},
        )
        self.waited_in_epoch += self.waited
        self.communicated_in_epoch += communicated
        self.line, self.before, self.waited = self._mark(), now, 0.0
        if self.step + 1 == self.steps:
            self.seconds, self.images_per_second = self.line[0] - self.begin[0], self._speed(self.warm)
            self.train_loss, self.train_top1 = now[0] / now[3], 100 * now[1] / now[3]

    def show_epoch(self, result):
        """Print the test accuracy, if there was a test, and write the record of an epoch.

        Args:
            result: (top-1 in %, top-5 in %, images tested) or None.
        """
        measured = {"epoch": self.epoch + 1}
        here = ""
        if self.seconds:  # else the steps were another process's
            here = f" | {self.images_per_second:.0f} img/s, {self.waited_in_epoch / self.seconds:.1%} waiting for data"
            measured |= {
                "seconds": round(self.seconds, 3),
                "images_per_second": round(self.images_per_second, 1),
                "data_wait_share": round(self.waited_in_epoch / self.seconds, 4),
                "communication_share": round(self.communicated_in_epoch / self.seconds, 4),
                "train_loss": round(self.train_loss, 4),
                "train_acc": round(self.train_top1, 3),
                "peak_memory_mib": peak_memory() and round(peak_memory() / 2**20),
            }
        if result:
            top1, top5, images = result
            self.print(
                f"   == test: [{self.epoch + 1}/{self.args.epochs}] | top-1: {top1:6.3f}% | top-5: {top5:6.3f}% | "
                f"{images} images{here}"
            )
            self._scalars((self.epoch + 1) * self.steps, {"test/top1": top1, "test/top5": top5})
            measured |= {"test_acc": round(top1, 3), "test_top5": round(top5, 3)}
        if self.d.is_main and self.args.log_file:
            with open(self.args.log_file, "a") as file:
                file.write(json.dumps(self.record | measured) + "\n")

    def close(self, line):
        """Print the last line of a run."""
        if self.tensorboard:
            self.tensorboard.close()
        memory = f"peak memory {peak_memory() / 2**30:.2f} GiB" if peak_memory() else "peak memory unknown"
        if self.d.device.type == "cuda":
            memory += f", on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        self.print(f"{line} | {duration(time.perf_counter() - self.started)} | {memory}")

    def _scalars(self, step, values):
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()  # what is not on the disk is lost with the process

    def _mark(self):
        """The time, once the device has finished what it was given; this process's images so far; the step."""
        synchronize(self.d.device)
        return time.perf_counter(), self.images, self.step

    def _speed(self, since):
        """Images per second of all processes together since a mark."""
        now, images, _ = self._mark()
        return (images - since[1]) * self.d.world_size / (now - since[0])


class CommunicationClock:
    """How long a step waits for gradients when its own backward pass is done: communication that nothing hides.

    DistributedDataParallel sends gradients in buckets while the backward pass still computes others. When the last
    bucket is full, this rank has no more to compute, and what time is left is exposed: the network's, and that of
    slower ranks.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.ready, self.pairs = None, []

    def attach(self, ddp):
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, _, bucket):
        if bucket.is_last():
            self.ready = self._now()
        return allreduce_hook(dist.group.WORLD, bucket)

    def backward_done(self):
        """Call it when the step's last backward pass has returned."""
        if self.ready is not None:
            self.pairs.append((self.ready, self._now()))
            self.ready = None

    def read(self):
        """The seconds since the last reading; the device must have been waited for."""
        pairs, self.pairs = self.pairs, []
        if self.cuda:
            return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
        return sum(end - begin for begin, end in pairs)

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def duration(seconds):
    """Seconds in words, to two units."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else f"{minutes // 60} h {minutes % 60} min"
