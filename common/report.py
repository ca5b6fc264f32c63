"""Console lines and run records: what a script prints, and what the charts are drawn from.

A Report only observes: without it a script trains the same model. It waits for the device before it
reads the clock, so its seconds are true. Images per second leave out the first steps of an epoch
(compilation, workers that start) and evaluation.
"""

import datetime
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from tqdm import tqdm

from common.errors import UserError

# How a recorded command starts, given the number of machines and the processes on each.
COMMANDS = {
    "python": "python",
    "torchrun": "torchrun --nnodes={} --nproc-per-node={}",
    "mp.spawn": "python",
    "srun": "srun --nodes={} --ntasks-per-node={} python",
}
MAX_HOSTS = 16  # lines of the header that name hosts


class Report:
    """The console lines and the records of one run. Only rank 0 prints and writes.

    Args:
        args: the shared flags.
        device: torch.device.
        local_world_size: int, the processes on this machine.
    """

    def __init__(self, args, device, local_world_size=1):
        self.args, self.device, self.started = args, device, time.perf_counter()
        self.rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        launcher = launcher_name()
        start = COMMANDS[launcher].format(world_size // local_world_size, local_world_size)
        script = os.path.basename(sys.argv[0])
        flags = ("dataset", "data_dir", "limit", "augment", "batch_size", "warmup_epochs", "seed")
        self.record = {name: getattr(args, name) for name in flags} | environment(device)
        self.record |= {
            "script": script,
            "command": f"{start} {shlex.join([script, *sys.argv[1:]])}",
            "launcher": launcher,
            "model": args.arch,
            "world_size": world_size,
            "local_world_size": local_world_size,
            "global_batch": args.batch_size * world_size,
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "amp": "none",
            "sync_bn": getattr(args, "sync_bn", False),
        }
        if args.log_file:
            self.record["repeat"] = count_repeats(args.log_file, self.record["command"])
        self.bar = None

    def print(self, line):
        if self.rank == 0:
            tqdm.write(line)  # above the progress bar, if there is one
            sys.stdout.flush()

    def with_bar(self, batches, total):
        """Yield batches. On a terminal, rank 0 shows the progress of the epoch meanwhile."""
        is_hidden = self.rank > 0 or not sys.stdout.isatty()
        description = f"epoch {self.epoch + 1}/{self.args.epochs}"
        with tqdm(
            total=total,
            desc=description,
            unit="batch",
            leave=False,
            disable=is_hidden,
            file=sys.stdout,
        ) as self.bar:
            for batch in batches:
                yield batch
                self.bar.update()

    def header(self, model, train_set, test_set, lr):
        """Print what decides the cost and the result of a run. Every rank must call it.

        Args:
            lr: float, the learning rate after scaling.
        """
        r, args, self.test_images = self.record, self.args, len(test_set)
        r["lr"] = lr
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        size = "x".join(str(n) for n in (train_set.channels, *train_set.image_size))
        storage = "in memory" if train_set.in_memory else "read from files"
        options = [f"seed {args.seed}"]
        if args.warmup_epochs:
            options.append(f"{args.warmup_epochs:g} epochs of warm-up")
        if r["sync_bn"]:
            options.append("synchronized batch norm")
        local = f" ({r['local_world_size']} on this machine)" if r["world_size"] > 1 else ""
        started_by = f"started by {r['launcher']} | world size {r['world_size']}{local}"
        self.print(f"{r['script']} | {started_by} | torch {r['torch']}")
        self.show_devices()
        self.print(
            f"{args.dataset}: {len(train_set)} train and {len(test_set)} test images of {size}, "
            f"{storage}, "
            f"{train_set.num_classes} classes | {args.arch}, {weights:.1f} M weights"
        )
        self.print(
            f"global batch = {args.batch_size} x {r['world_size']} = {r['global_batch']} | "
            f"lr {args.lr:g} -> {lr:g} | {', '.join(options)}"
        )

    def show_devices(self):
        """Print the ranks of each host and their devices. Every rank must call it."""
        r = self.record
        if r["world_size"] == 1:
            self.print(
                f"device: {self.device} ({r['device_name']}, {r['cpu_threads']} CPU threads)"
            )
            return
        everyone = [None] * r["world_size"]
        dist.all_gather_object(
            everyone, (platform.node(), self.device, r["device_name"], r["cpu_threads"])
        )
        lines = host_lines(everyone)
        for line in lines[:MAX_HOSTS]:
            self.print(line)
        if len(lines) > MAX_HOSTS:
            self.print(f"... and {len(lines) - MAX_HOSTS} more hosts")

    def timed(self, loader, epoch):
        """Return an iterator over the batches of a training epoch that measures how long the loop waits for each.

        On a GPU the wait is an upper bound of what data costs: meanwhile the GPU works on earlier
        steps.
        """
        self.epoch, self.steps, self.images, self.waited = epoch, len(loader), 0, 0.0
        self.totals = [0.0, 0.0, 0.0]
        self.epoch_start = self.timing_start = self.line_start = self._mark()
        return self.with_bar(self._timed(iter(loader)), self.steps)

    def _timed(self, batches):
        step, asked = 0, time.perf_counter()
        # to its end: RandomSampler draws a last random number there
        while batch := next(batches, None):
            self.waited += time.perf_counter() - asked
            self.images += len(batch[1])
            yield batch
            step += 1
            if step == warmup_steps(self.steps):
                self.timing_start = self.line_start = self._mark()
            asked = time.perf_counter()

    def due(self, step):
        """Return whether a step, counted from 0, gets a line: one in --print-every, and the last. All ranks agree."""
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
        self.train_loss, self.train_acc, speed = (
            loss / images,
            100 * correct / images,
            self._speed(self.line_start),
        )
        self.print(
            f"   == step: [{step + 1:3}/{self.steps}] [{self.epoch + 1}/{self.args.epochs}] | "
            f"loss: {self.train_loss:.3f} | acc: {self.train_acc:6.3f}% | {speed:.0f} img/s"
        )
        self.bar.set_postfix_str(f"loss {self.train_loss:.3f}, {speed:.0f} img/s")
        self.line_start = self._mark()
        if step + 1 == self.steps:
            self.seconds = self.line_start[0] - self.epoch_start[0]
            self.images_per_second = self._speed(self.timing_start)

    def show_epoch(self, correct):
        """Print the accuracy on the test set, and write the record of an epoch.

        Args:
            correct: tensor, the number of correct answers over all ranks.
        """
        self.test_acc = 100 * float(correct) / self.test_images
        wait_share = self.waited / self.seconds
        self.print(
            f"   == test: [{self.epoch + 1}/{self.args.epochs}] | acc: {self.test_acc:6.3f}% | "
            f"epoch took {self.seconds:.1f} s, {self.images_per_second:.0f} img/s, "
            f"{100 * wait_share:.1f}% of it waiting for data"
        )
        measured = {
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 1),
        }
        measured |= {
            "data_wait_share": round(wait_share, 4),
            "train_loss": round(self.train_loss, 4),
        }
        measured |= {"train_acc": round(self.train_acc, 3), "test_acc": round(self.test_acc, 3)}
        self.write({"epoch": self.epoch + 1} | measured)

    def write(self, measured):
        """Append one line to --log-file: the settings of the run and what was measured."""
        if self.args.log_file and self.rank == 0:
            measured["peak_memory_mib"] = round(peak_memory() / 2**20)
            with open(self.args.log_file, "a") as file:
                file.write(json.dumps(self.record | measured) + "\n")

    def summary(self):
        """Print the last line of a run."""
        self.close(f"done: test accuracy {self.test_acc:.2f}% after {self.args.epochs} epochs")

    def close(self, line):
        """Print a line, and with it the seconds and the memory of the run."""
        memory = (
            f"peak memory {peak_memory() / 2**30:.2f} GiB"
            if peak_memory()
            else "peak memory unknown"
        )
        if self.device.type == "cuda":
            memory += f", on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        self.print(f"{line} | {time.perf_counter() - self.started:.0f} s | {memory}")

    def _mark(self):
        """Return the time when the device has finished its work, and the images of this process so far."""
        synchronize(self.device)
        return time.perf_counter(), self.images

    def _speed(self, start):
        """Return the images per second of all processes since a mark."""
        now, images = self._mark()
        return (images - start[1]) * self.record["world_size"] / (now - start[0])


def batch_totals(loss, outputs, targets):
    """Return float (3,) on the device: sum of losses, correct answers, images of a batch."""
    correct = (outputs.argmax(dim=1) == targets).sum()
    return torch.stack([loss.detach() * len(targets), correct, torch.full_like(loss, len(targets))])


def host_lines(everyone):
    """Return a line per host, such as "ranks 0-7 on node1: cuda:0-7 (NVIDIA H100, 12 CPU threads each)".

    A host has more than one line if its devices or threads differ.

    Args:
        everyone: for each rank (host, torch.device, name of the device, CPU threads).
    """
    groups = {}
    for rank, (host, device, name, threads) in enumerate(everyone):
        groups.setdefault((host, device.type, name, threads), []).append((rank, device.index))
    lines = []
    for (host, device, name, threads), members in groups.items():
        ranks, indices = zip(*members, strict=True)
        device += "" if device == "cpu" else f":{number_range(indices)}"
        plural, each = ("s", " each") if len(ranks) > 1 else ("", "")
        threads = f"{threads} CPU thread{'s' * (threads > 1)}{each}"
        lines.append(f"rank{plural} {number_range(ranks)} on {host}: {device} ({name}, {threads})")
    return lines


def number_range(numbers):
    """Return numbers as text: "0-3" if they follow each other, else "0,2,3"."""
    first, last = numbers[0], numbers[-1]
    follow = len(numbers) > 1 and list(numbers) == list(range(first, last + 1))
    return f"{first}-{last}" if follow else ",".join(map(str, numbers))


def launcher_name():
    """Return what started the processes, one of COMMANDS."""
    if not dist.is_initialized():
        return "python"
    if multiprocessing.parent_process():
        return "mp.spawn"
    return "torchrun" if "LOCAL_RANK" in os.environ else "srun"


def synchronize(device):
    """Wait until an accelerator has finished its work. A CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def warmup_steps(steps):
    """Return how many steps of an epoch images per second leave out: 5, or a tenth of a short epoch."""
    return min(5, steps // 10)


def environment(device):
    """Return the fields of a record that name hardware and versions."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    } | (gpu_software(device) if device.type == "cuda" else {})


def gpu_software(device):
    """Return the fields of a record that name the software of a GPU, and whether it rounds float32 to TF32."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _read_proc("driver/nvidia/version", r"Kernel Module.*?\s(\d[\d.]+)"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        # torch has several
        "nccl_class": type(dist.group.WORLD._get_backend(device)).__name__ if nccl else None,
        "tf32_matmul": torch.get_float32_matmul_precision() != "highest",
        "tf32_conv": torch.backends.cudnn.allow_tf32,
    }


def device_name(device):
    """Return the manufacturer's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        _read_proc("cpuinfo", r"model name\s*: (.*)") or platform.processor() or platform.machine()
    )


def peak_memory():
    """Return the peak memory of this process in bytes, without its loader workers; 0 if there is no /proc."""
    return int(_read_proc("self/status", r"VmHWM:\s*(\d+)") or 0) * 1024


def _read_proc(name, pattern):
    path = Path("/proc", name)
    found = path.exists() and re.search(pattern, path.read_text())
    return found[1] if found else None


def count_repeats(log, command):
    """Return how many runs of this command a log holds."""
    try:
        with open(log) as file:
            return len({r["started"] for r in map(json.loads, file) if r["command"] == command})
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"--log-file {log} holds lines that are not run records: name another file"
        ) from None
