"""Ranks of a script without the seconds of importing torch: forked from a process that has imported it already.

They are real processes that join a real process group, and can be killed. Each of 06 tells what it trains on, line by
line: one for every micro-batch, with its epoch, step, rate and targets.
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

from common.distributed import free_port

ROOT = Path(__file__).resolve().parents[2]
# What a rank imports, but for what handles signals as soon as it is imported.
PRELOAD = ["torch", "torchvision", "torch.distributed.nn", "torch.nn.parallel", "torch.optim.swa_utils"]
PRELOAD += ["torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torchvision.transforms.v2"]
PRELOAD += ["common.data", "common.models", "common.report", "common.flags", "imagenet.flags"]
PRELOAD += ["imagenet.data", "imagenet.elastic", "imagenet.model", "imagenet.progress", "imagenet.resume"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class Ranks:
    """The processes of one run.

    Args:
        folder: Path, for their output and what they tell; the runs of one folder add to each other.
        world_size: int.
        flags: of the script.
        kill: {rank: global step} at which one kills itself.
        nodes: int, how many machines to pretend.
        env: more variables.
        prepare: a function of the rank, called in each process before the script.
        script: which to run; one outside of the repository too.
    """

    def __init__(self, folder, world_size, flags, kill=None, nodes=1, env=None, prepare=None, script="06_imagenet.py"):
        self.folder, here = folder, world_size // nodes
        self.run = len(list(folder.glob("run*-rank0.out")))
        port, self.processes = free_port(), []
        for rank in range(world_size):
            variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1} | (env or {})
            out = self._out(rank)
            step = (kill or {}).get(rank)
            arguments = script, variables, [str(flag) for flag in flags], out, step, prepare
            self.processes.append(context.Process(target=_run, args=arguments))
        for process in self.processes:
            process.start()

    def _out(self, rank):
        return self.folder / f"run{self.run}-rank{rank}.out"

    def wait(self, timeout=90):
        """Wait for the end; returns the exit codes."""
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

    def wait_for(self, pattern, timeout=60):
        """Wait until rank 0 has printed it."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.output()):
            assert time.monotonic() < deadline and self.processes[0].is_alive(), self.output()
            time.sleep(0.05)

    def signal(self, rank, name):
        os.kill(self.processes[rank].pid, getattr(signal, name))


def told(folder):
    """What the runs of a folder have trained on: {(epoch, step): {"targets": all ranks', "lr": ..., "loss": ...}}.

    A step that was taken again, because the run had been killed after it, counts as it was taken last.
    """
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    last = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        step = last.setdefault((line["epoch"], line["step"]), {})
        if line["run"] != step.get("run"):
            step |= {"run": line["run"], "targets": [], "loss": 0.0, "lr": line["lr"], "pieces": []}
        step["targets"] += line["targets"]
        step["loss"] += line["loss"]
        step["pieces"].append(len(line["targets"]))
    return last


def _run(script, env, flags, out, kill, prepare):
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({name: str(value) for name, value in env.items()})
    os.chdir(ROOT)
    sys.argv = [os.path.basename(script), *flags]

    import torch

    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # the variable was another one when torch was imported
    if script == "06_imagenet.py":
        _tell(out, kill)
    if prepare:
        prepare(env["RANK"])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def _tell(out, kill):
    """Make the loss tell what it is given; in training it is train_epoch that calls it."""
    import torch

    tell = open(out.with_suffix(".jsonl"), "a", buffering=1)  # noqa: SIM115

    def forward(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
        loss = original(self, outputs, targets)
        frame = sys._getframe()
        while frame.f_code.co_name != "train_epoch":
            frame = frame.f_back
        at = frame.f_locals
        line = {"run": out.stem.split("-")[0], "time": time.time(), "epoch": at["epoch"], "step": at["step"]}
        line |= {"lr": at["lr"], "targets": targets.tolist(), "loss": loss.item()}
        tell.write(json.dumps(line) + "\n")
        if kill == at["run"].step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    torch.nn.CrossEntropyLoss.forward = forward
