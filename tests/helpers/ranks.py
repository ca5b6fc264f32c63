"""Start the ranks of a script quickly: fork them from a process that has already imported torch.

The ranks are real processes that join a real process group, and they can be killed. Each rank of 06
logs its training as JSON lines: one per micro-batch, with its epoch, training step, learning rate
and targets.
"""

import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

from common.machine import free_port

ROOT = Path(__file__).resolve().parents[2]
# What a rank imports, and what torch imports late; without modules that install signal handlers.
PRELOAD = ["torch.distributed.fsdp"]
PRELOAD += ["common.data", "common.models", "ddp.report", "ddp.flags"]
PRELOAD += ["common.torchvision_sets", "common.folder", "fsdp.flags", "fsdp.sharded"]
PRELOAD += ["torch.distributed.tensor.parallel", "gpt.flags", "gpt.checkpoint", "gpt.parallel"]
PRELOAD += ["imagenet.flags", "imagenet.loader", "imagenet.checks", "imagenet.sampler"]
PRELOAD += ["imagenet.votes", "imagenet.model", "imagenet.progress"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class Ranks:
    """The processes of one run.

    Args:
        folder: Path, for output and logs. Several runs can use the same folder.
        world_size: int.
        flags: flags for the script.
        kill: {rank: global step} at which the rank kills itself.
        nodes: int, the number of machines to simulate.
        env: dict of additional environment variables.
        prepare: function of the rank, called in each process before the script.
        script: path of the script, inside or outside the repository.
    """

    def __init__(
        self,
        folder,
        world_size,
        flags,
        kill=None,
        nodes=1,
        env=None,
        prepare=None,
        script="06_imagenet.py",
    ):
        self.folder = folder
        local_world_size = world_size // nodes
        self.run = len(list(folder.glob("run*-rank0.out")))
        port = free_port()
        self.processes = []
        for rank in range(world_size):
            # That of the test: the process that forks has the environment of the first test.
            variables = os.environ | {"RANK": rank, "WORLD_SIZE": world_size}
            variables |= {
                "LOCAL_RANK": rank % local_world_size,
                "LOCAL_WORLD_SIZE": local_world_size,
            }
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1} | (
                env or {}
            )
            out = self._out(rank)
            step = (kill or {}).get(rank)
            arguments = script, variables, [str(flag) for flag in flags], out, step, prepare
            self.processes.append(context.Process(target=_run, args=arguments))
        for process in self.processes:
            process.start()

    def _out(self, rank):
        return self.folder / f"run{self.run}-rank{rank}.out"

    def wait(self, timeout=300):
        """Wait until all ranks have exited; return their exit codes."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.end()
        assert None not in codes, self.output()
        return codes

    def end(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()

    def output(self, rank=0):
        return self._out(rank).read_text() if self._out(rank).exists() else ""

    def wait_for(self, pattern, timeout=300):
        """Wait until rank 0 has printed text that matches the pattern."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.output()):
            assert time.monotonic() < deadline and self.processes[0].is_alive(), self.output()
            time.sleep(0.05)

    def signal(self, rank, name):
        os.kill(self.processes[rank].pid, getattr(signal, name))


def training_log(folder):
    """Return the log of the runs in a folder: {(epoch, step): {"targets": of all ranks, "lr": ...,
    "loss": ...}}.

    If a run was killed and repeated a step, the last repetition counts.
    """
    lines = [
        json.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    last = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        step = last.setdefault((line["epoch"], line["step"]), {})
        if line["run"] != step.get("run"):
            step |= {"run": line["run"], "targets": [], "loss": 0.0, "lr": None, "pieces": []}
        if "lr" in line:  # of a step line, by any rank
            step["lr"] = line["lr"]
            continue
        step["targets"] += line["targets"]
        step["loss"] += line["loss"]
        step["pieces"].append(len(line["targets"]))
    return last


def _run(script, env, flags, out, kill, prepare):
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update({name: str(value) for name, value in env.items()})
    os.chdir(ROOT)
    sys.argv = [os.path.basename(script), *flags]

    import torch

    # torch read OMP_NUM_THREADS when it was imported
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if script == "06_imagenet.py":
        _log_training(out, kill)
    if prepare:
        prepare(env["RANK"])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def _log_training(out, kill):
    """Log each micro-batch when its loss is computed, and the learning rate of each step line."""
    import torch

    from imagenet.progress import Progress
    from imagenet.sampler import GlobalBatchSampler

    log = open(out.with_suffix(".jsonl"), "a", buffering=1)  # noqa: SIM115
    sampler = None  # of the epoch that trains
    count = 0  # micro-batches of this epoch so far

    def write(epoch, step, **what):
        line = {"run": out.stem.split("-")[0], "time": time.time(), "epoch": epoch, "step": step}
        log.write(json.dumps(line | what) + "\n")

    def set_epoch(self, epoch, first_step=0, original=GlobalBatchSampler.set_epoch):
        nonlocal sampler, count
        original(self, epoch, first_step)
        sampler = self
        count = 0

    def forward(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
        nonlocal count
        loss = original(self, outputs, targets)
        step = sampler.first_step + count // sampler.accumulate
        count += 1
        write(sampler.epoch, step, targets=targets.tolist(), loss=loss.item())
        if kill == sampler.epoch * sampler.steps + step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def show_step(self, step, totals, lr, original=Progress.show_step):
        write(self.epoch.number, step, lr=lr)
        original(self, step, totals, lr)

    GlobalBatchSampler.set_epoch = set_epoch
    torch.nn.CrossEntropyLoss.forward = forward
    Progress.show_step = show_step
