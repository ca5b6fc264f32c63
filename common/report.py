"""Console lines and run records: what a script prints, and what the charts are drawn from.

A Report also keeps time. The device is synchronised at both ends of an epoch, so seconds are true; the
first steps of an epoch (compilation, autotuning, workers that start) are left out of images per second;
evaluation counts in neither.
"""

import datetime
import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import time

import torch
import torch.distributed as dist
import torchvision

from common.distributed import cpu_count
from common.errors import UserError

PRINT_EVERY = 50  # steps

# The start of the command: with the number of machines, and of processes on each.
LAUNCHERS = {
    "python": "python",
    "torchrun": "torchrun --nnodes={} --nproc-per-node={}",
    "mp.spawn": "python",
    "srun": "srun --nodes={} --ntasks-per-node={} python",
}


class Report:
    """The lines and records of one run; only rank 0 prints and writes.

    Args:
        args: the shared flags.
        device: torch.device.
        rank, world_size, local_world_size: int.
        lr: the learning rate after scaling.
    """

    def __init__(self, args, device, rank, world_size, local_world_size, lr):
        self.args, self.device, self.lr = args, device, lr
        self.is_main = rank == 0
        self.started = time.perf_counter()
        self.test_acc = None
        launcher = launcher_name()
        start = LAUNCHERS[launcher].format(world_size // local_world_size, local_world_size)
        self.record = {
            "script": os.path.basename(sys.argv[0]),
            "command": f"{start} {shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])}",
            "launcher": launcher,
            "dataset": args.dataset,
            "data_dir": args.data_dir if args.dataset != "shapes" else None,
            "limit": args.limit,
            "augment": args.augment,
            "model": args.arch,
            "world_size": world_size,
            "local_world_size": local_world_size,
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "batch_size": args.batch_size,
            "global_batch": args.batch_size * world_size,
            "lr": lr,
            "warmup_epochs": args.warmup_epochs,
            "amp": args.amp,
            "channels_last": args.channels_last,
            "compile": args.compile,
            "sync_bn": getattr(args, "sync_bn", False),
            "seed": args.seed,
        } | environment(device)
        if args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])

    def print(self, line):
        if self.is_main:
            print(line, flush=True)

    def header(self, net, train_set, test_set):
        """Print, once a run, everything that decides what it costs and what it gives."""
        r, args = self.record, self.args
        weights = sum(p.numel() for p in net.parameters()) / 1e6
        size = "x".join(str(n) for n in (train_set.channels, *train_set.image_size))
        held = "in memory" if train_set.in_memory else "read as they come"
        options = [f"amp {args.amp}", f"seed {args.seed}"]
        options += ["channels last"] * args.channels_last + ["compiled"] * args.compile
        options += [f"{args.warmup_epochs:g} epochs of warm-up"] * (args.warmup_epochs > 0)
        options += ["synchronised batch norm"] * r["sync_bn"]
        here = f" ({r['local_world_size']} on this machine)" if r["world_size"] > 1 else ""
        self.print(
            f"{r['script']} | started by {r['launcher']} | world size {r['world_size']}{here} | torch {r['torch']}"
        )
        self.print(f"device: {self.device} ({r['device_name']}, {r['cpu_threads']} CPU threads)")
        self.print(
            f"{args.dataset}: {len(train_set)} train and {len(test_set)} test images of {size}, {held}, "
            f"{train_set.num_classes} classes | {args.arch}, {weights:.1f} M weights"
        )
        self.print(
            f"global batch = {args.batch_size} x {r['world_size']} = {r['global_batch']} | "
            f"lr {args.lr:g} -> {self.lr:g} | {', '.join(options)}"
        )

    def show_split(self, devices):
        """Print and record how DataParallel splits a batch, or refuse what it cannot do on several GPUs.

        Raises:
            UserError: a flag or a batch size that fails, or silently does something else, in its threads.
        """
        size = self.args.batch_size
        self.record["devices"] = max(1, devices)
        if devices < 2:
            self.print(f"DataParallel with {devices} GPU(s): it hands batches on whole, as in 01")
            return
        share = math.ceil(size / devices)
        self.print(f"DataParallel with {devices} GPUs: up to {share} images a step on each")
        if leaves_one_alone(size, devices):
            fix = devices * max(2, share)
            raise UserError(f"--batch-size {size} leaves one of {devices} GPUs a single image: try {fix}")
        if self.args.amp == "bf16" or self.args.compile:
            # Its threads know of autocast, but not of its dtype, and run the network uncompiled.
            raise UserError("DataParallel cannot do --amp bf16 or --compile on several GPUs: use --amp fp16, or 03")

    def batches(self, loader, epoch):
        """Yield the batches of one training epoch, measuring how long the loop waits for each.

        On a GPU the wait is an upper bound of what data costs: meanwhile the device works on earlier steps.
        """
        self.epoch, self.step, self.steps = epoch, 0, len(loader)
        self.waited, self.images = 0.0, 0
        self.begin = self.warm = self.line = self._mark()
        asked = time.perf_counter()
        iterator = iter(loader)
        while self.step < self.steps:
            batch = next(iterator)
            self.waited += time.perf_counter() - asked
            self.step, self.images = self.step + 1, self.images + len(batch[1])
            yield batch
            if self.step == warmup_steps(self.steps):
                self.warm = self.line = self._mark()
            asked = time.perf_counter()

    def due(self):
        """Whether this step gets a line: every 50th, and the last. The same steps on every rank."""
        return self.step % PRINT_EVERY == 0 or self.step == self.steps

    def show_step(self, totals):
        """Print loss and accuracy since the epoch began, and the speed since the line before.

        Args:
            totals: float (3,) on the device: sum of losses, correct answers, images; over all ranks.
        """
        loss, correct, seen = totals.tolist()  # note: this waits for the device
        self.train_loss, self.train_acc = loss / seen, 100 * correct / seen
        self.print(
            f"   == step: [{self.step:3}/{self.steps}] [{self.epoch + 1}/{self.args.epochs}] | "
            f"loss: {self.train_loss:.3f} | acc: {self.train_acc:6.3f}% | {self._speed(self.line):.0f} img/s"
        )
        self.line = self._mark()
        if self.step == self.steps:
            self.seconds, self.images_per_second = self.line[0] - self.begin[0], self._speed(self.warm)

    def show_epoch(self, correct, images):
        """Print the test accuracy of an epoch and write its record.

        Args:
            correct: tensor, the number of test images answered right, over all ranks.
            images: int, the number of test images, over all ranks.
        """
        self.test_acc = 100 * float(correct) / images
        wait_share = self.waited / self.seconds
        self.print(
            f"   == test: [{self.epoch + 1}/{self.args.epochs}] | acc: {self.test_acc:6.3f}% | "
            f"epoch took {self.seconds:.1f} s, {self.images_per_second:.0f} img/s, "
            f"{100 * wait_share:.1f}% of it waiting for data"
        )
        if self.args.log_file and self.is_main:
            measured = {
                "epoch": self.epoch + 1,
                "seconds": round(self.seconds, 3),
                "images_per_second": round(self.images_per_second, 1),
                "data_wait_share": round(wait_share, 4),
                "train_loss": round(self.train_loss, 4),
                "train_acc": round(self.train_acc, 3),
                "test_acc": round(self.test_acc, 3),
                "peak_memory_mib": peak_memory() and round(peak_memory() / 2**20),
            }
            with open(self.args.log_file, "a") as file:
                file.write(json.dumps(self.record | measured) + "\n")

    def summary(self):
        """Print the last line of a run."""
        memory = f"peak memory {peak_memory() / 2**30:.2f} GiB" if peak_memory() else "peak memory unknown"
        if self.device.type == "cuda":
            memory += f", on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        outcome = f"test accuracy {self.test_acc:.2f}% after {self.args.epochs} epochs"
        self.print(f"done: {outcome} | {time.perf_counter() - self.started:.0f} s | {memory}")

    def _mark(self):
        """The time, once the device has finished what it was given, and the images of this process so far."""
        synchronize(self.device)
        return time.perf_counter(), self.images

    def _speed(self, since):
        """Images per second of all processes together since a mark."""
        now, images = self._mark()
        return (images - since[1]) * self.record["world_size"] / (now - since[0])


def launcher_name():
    """Who started the processes, one of LAUNCHERS."""
    if not dist.is_initialized():
        return "python"
    if multiprocessing.parent_process():
        return "mp.spawn"
    return "torchrun" if "LOCAL_RANK" in os.environ else "srun"


def synchronize(device):
    """Wait until the device has finished what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def leaves_one_alone(images, devices):
    """Whether a batch, split over devices as DataParallel splits it, leaves one of them a single image."""
    return images > 0 and (images - 1) % math.ceil(images / devices) == 0


def warmup_steps(steps):
    """How many of an epoch's steps images per second leave out: 5, or a tenth of a short epoch."""
    return min(5, steps // 10)


def environment(device):
    """What a measurement depends on beside its settings: the fields of a record that name hardware and versions."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "cores": cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def device_name(device):
    """The maker's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory():
    """The most memory this process has held, in bytes, its loader workers not counted; None on Windows."""
    try:
        with open("/proc/self/status") as file:  # not getrusage, which counts the parent's memory at its start too
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        if sys.platform == "win32":
            return None
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def count_repeats(log, command):
    """How often this command stands in a log already."""
    try:
        with open(log) as file:
            return len({r["started"] for r in map(json.loads, file) if r["command"] == command})
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--log-file {log} holds lines that are no run records: name another file") from None
