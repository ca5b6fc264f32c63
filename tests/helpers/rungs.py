"""The scripts of the ladder: their names, their flags as they parse them, and their ranks."""

import argparse
import functools
import os
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from launchers import slurm_step
from processes import ROOT
from ranks import Ranks

from common.flags import shared_flags
from common.machine import PORTS, free_port
from ddp import report

SCRIPTS = [
    "01_snsc.py",
    "02_snmc_dp.py",
    "03_mnmc_ddp_launch.py",
    "04_mnmc_ddp_mp.py",
    "05_mnmc_ddp_slurm.py",
]
# Those from 06 on have flags of their own.
ALL_SCRIPTS = [*SCRIPTS, "06_imagenet.py", "07_fsdp.py", "08_gpt.py"]
IN_PROCESS = [script for script in SCRIPTS if script != "04_mnmc_ddp_mp.py"]  # what `run` can run
# Flags for three training steps; the name of a folder follows.
QUICK = ["--arch", "mnist_net", "--batch-size", "8", "--dataset", "folder", "--data-dir"]


class Parsed(SystemExit):
    """Ends a script that has parsed its flags."""


def parse(monkeypatch, script, *given):
    """The flags of a script, as it parses them when it is run; fails if it refuses them."""
    original = argparse.ArgumentParser.parse_args

    def parse_only(parser, *args, **kwargs):
        raise Parsed(original(parser, *args, **kwargs))

    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script, *map(str, given)])
        patch.setattr("imagenet.signals.install", lambda: None)  # this process keeps its handlers
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(Parsed) as end:
            runpy.run_path(script, run_name="__main__")
    return end.value.code


def flags(*given):
    """The shared flags as a script would parse them."""
    return shared_flags("").parse_args([str(flag) for flag in given])


def fork_rung(folder, script, world_size, given, prepare=None, **options):
    """Fork the ranks of 01, 03, 04, 05 or 07, which learn who they are as from their launcher.

    Returns:
        Ranks, whose other arguments are `prepare` and `options`.
    """
    if script.startswith("04"):
        url = f"tcp://127.0.0.1:{free_port()}"
        given = [*given, "--nproc-per-node", world_size, "--dist-url", url]
    launch = functools.partial(launch_rank, script, world_size, prepare)
    return Ranks(folder, world_size, given, script=script, prepare=launch, **options)


def launch_rank(script, world_size, prepare, rank):
    """Give a forked process what its launcher would give it, in place of what Ranks sets."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names}
    if script[:2] in ("04", "05"):
        for name in names:
            del os.environ[name]
    if script.startswith("04"):
        torch.multiprocessing.spawn = lambda function, args, nprocs: function(rank, *args)
    else:
        report.multiprocessing = SimpleNamespace(parent_process=lambda: None)
    if script.startswith("05"):
        # A task on each of several machines, all of them this one. The port is that of the job.
        step = slurm_step(rank, world_size, f"127.0.0.[1-{world_size}]")
        step |= {"SLURM_JOB_ID": int(before["MASTER_PORT"]) - PORTS[0]}
        step |= {"SLURM_LOCALID": 0, "SLURM_NODEID": rank, "SLURM_STEP_NUM_NODES": world_size}
        step |= {"SLURM_STEP_TASKS_PER_NODE": f"1(x{world_size})", "SLURM_CPUS_ON_NODE": 1}
        os.environ.update({name: str(value) for name, value in step.items()})
    if prepare:
        prepare(rank)
