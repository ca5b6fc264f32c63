"""Run scripts on the pretend accelerator: see accelerator/pretend.py."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from accelerator import build
from filelock import FileLock
from needs import need
from processes import ROOT


def built():
    """Return the folder of the accelerator, built once for this torch and this source text.

    Skip the test where it cannot be built.
    """
    need(build.missing())
    text = "".join((build.SOURCE / name).read_text() for name in build.FILES)
    name = f"{torch.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(sys.prefix, "pretend", name)
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(name + ".lock")):  # pytest runs several files at a time
        if not folder.exists():
            new = folder.with_name(name + ".new")
            subprocess.run([sys.executable, build.SOURCE / "build.py", new], check=True)
            new.rename(folder)
    return folder


class Accelerator:
    """What a process must be given to find the accelerator.

    Args:
        folder: Path, from built().
        report: Path of the file to which each process appends a line at its end.
    """

    def __init__(self, folder, report):
        self.folder = folder
        self.report_file = report

    def variables(self, devices):
        """Return the environment variables for so many devices."""
        return {
            "PRETEND_DEVICES": str(devices),
            "PRETEND_REPORT": str(self.report_file),
            "OMP_NUM_THREADS": "1",
        }

    def environment(self, devices):
        """Return the environment of a process that is started."""
        return os.environ | self.variables(devices) | {"PYTHONPATH": f"{self.folder}:{ROOT}"}

    def prepare(self, rank):
        """Load it in a process that was forked after torch was imported: for Ranks(prepare=...)."""
        sys.path.insert(0, str(self.folder))
        import pretend

        pretend.load()

    def reports(self):
        """Return the lines of the processes that have ended, {rank: the newest line}."""
        lines = [json.loads(line) for line in self.report_file.read_text().splitlines()]
        return {int(line["rank"]): line for line in lines if line["rank"] is not None}


def learned(output):
    """Return the losses and accuracies that a script has printed, without speeds."""
    return re.findall(r"(?:loss|acc|top-1|accuracy):? +[0-9.]+%?|nan", output)
