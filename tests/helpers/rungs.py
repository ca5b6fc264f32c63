"""The scripts of the ladder: their names, and their flags as they parse them."""

import argparse
import runpy
import sys

import pytest
from processes import ROOT

from common.flags import shared_flags

SCRIPTS = [
    "01_snsc.py",
    "02_snmc_dp.py",
    "03_mnmc_ddp_launch.py",
    "04_mnmc_ddp_mp.py",
    "05_mnmc_ddp_slurm.py",
]
ALL_SCRIPTS = [*SCRIPTS, "06_imagenet.py", "07_fsdp.py"]  # which have flags of their own
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
