"""Run a list of parts, some side by side and some alone, each within its time, and record them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = "TOOLS_LAB_PART"  # the processes of a part have this environment variable
PRELUDE = """
set -eo pipefail
python() { "$PYTHON" "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone "$@"; }
"""  # --standalone: before torch 2.12, each torchrun takes the same port without it


class Part(NamedTuple):
    """A row of the list. Its script, for bash, finds an empty folder in $DIR."""

    name: str
    seconds: int  # that it takes, about
    what: str
    script: str
    needs: str = ""  # the variable of a folder


class Running:
    """A part that runs, with its output in a file."""

    def __init__(self, part, variables, log):
        self.part = part
        self.log = log
        self.began = time.monotonic()
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        env = os.environ | variables | dict([self.mark.split("=")])
        env |= {"DIR": self.folder.name, "PYTHON": sys.executable}
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", PRELUDE + part.script],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self):
        return time.monotonic() - self.began

    def output(self):
        """Return its last lines, without this machine's paths."""
        text = self.log.read_text(errors="replace").replace(f"{ROOT}/", "")
        return text.rstrip().splitlines()[-12:]

    def end(self, patience=30):
        """Kill every process that it has left, for `patience` seconds at most.

        torchrun's workers have sessions of their own, and when torchrun is killed they belong to
        nobody: to kill a process group, or a tree of processes, would miss them.
        """
        deadline = time.monotonic() + patience
        found = True
        while found and time.monotonic() < deadline:
            found = False
            for file in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):  # it has just ended, or is another user's
                    if self.mark.encode() in file.read_bytes():
                        os.kill(int(file.parent.name), signal.SIGKILL)
                        found = True
            time.sleep(0.05)
        self.process.wait()
        self.folder.cleanup()


class Runner:
    """Runs parts, and keeps what they said.

    Args:
        name: str, this machine, for the names of files.
        out: Path of the folder of records.
        fields: dict, of a record of a part: the hardware and the sizes.
        variables: {name: str} for the scripts.
        minutes: float. No part begins that would not end within this time.
        limit: function from a part to the seconds after which it is ended.
        tar: path of a file into which the records and logs are packed after each part, or None.
    """

    def __init__(self, name, out, fields, variables, minutes, limit, tar):
        self.name = name
        self.out = out
        self.fields = fields
        self.variables = variables
        self.deadline = time.monotonic() + 60 * minutes
        self.limit = limit
        self.tar = tar
        self.path = out / f"gpu/{name}.jsonl"
        self.rows = {}  # {name of a part: (seconds, verdict or figure)}
        self.failed = {}  # {name of a part: the last lines of its output}

    def passed(self):
        """Return the names of the parts that have passed, in this run or before."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {line["part"] for line in map(json.loads, lines) if line["passed"]}

    def run(self, parts, at_once):
        """Run parts in order, so many at a time. If this process is stopped, they are too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        waiting = list(parts)
        running = []
        try:
            while waiting or running:
                if waiting and len(running) < at_once:
                    part = waiting.pop(0)
                    if reason := self.reason_to_skip(part):
                        self.rows[part.name] = (0, reason)
                        self.print_row(part.name)
                    else:
                        log = self.path.with_name(f"{self.name}-{part.name}.log")
                        running.append(Running(part, self.variables, log))
                    continue
                time.sleep(0.1)
                for one in running:
                    is_late = one.seconds > self.limit(one.part)
                    is_late |= time.monotonic() > self.deadline
                    code = 124 if is_late else one.process.poll()
                    if code is not None:
                        running.remove(one)
                        one.end()
                        self.record(one, code)
                        break
        finally:
            for one in running:
                one.end()
                self.rows[one.part.name] = (one.seconds, "stopped")

    def reason_to_skip(self, part):
        folder = self.variables.get(part.needs, ".")
        if not (ROOT / folder).is_dir():
            return f"not run: no {folder}; see --data"
        if part.seconds > self.deadline - time.monotonic():
            return "not run: no time"
        return ""

    def record(self, one, code):
        """Record how a part ended, print a line, and pack the records."""
        part = one.part
        output = one.output()
        last = output[-1].strip("= ") if output else "no output"
        passed = code == 0
        verdict = f"passed: {last}"
        if code == 124:
            verdict = f"FAILED: not done after {one.seconds:.0f} s; {last}"
        elif code != 0:
            verdict = f"FAILED: {last}"
        elif " skipped" in last and " passed" not in last:  # pytest, without a GPU
            verdict = f"no answer: {last}"
            passed = False
        if verdict.startswith("FAILED"):
            self.failed[part.name] = output
        self.rows[part.name] = (one.seconds, verdict)
        self.print_row(part.name)
        script = textwrap.dedent(part.script).strip()
        record = {"part": part.name, "passed": passed, "verdict": verdict, "script": script}
        record |= {"seconds": round(one.seconds, 1), "output": output}
        with self.path.open("a") as file:
            file.write(json.dumps(record | self.fields) + "\n")
        if self.tar:
            self.pack()

    def pack(self):
        """Pack the records and logs of this machine, all of them or none."""
        new = f"{self.tar}.new"
        with tarfile.open(new, "w:gz") as tar:
            for file in sorted(self.out.glob(f"*/{self.name}*")):
                tar.add(file, file.relative_to(self.out))
        os.replace(new, self.tar)

    def show(self, parts):
        """Print the last lines of each part that failed, then a table of all parts in this run."""
        for name, output in self.failed.items():
            print(f"\n{name}:", *output, sep="\n")
        print(f"\n{self.name}, torch {self.fields['torch']}")
        for part in parts:
            if part.name in self.rows:
                self.print_row(part.name)

    def print_row(self, name):
        seconds, verdict = self.rows[name]
        print(f"{name:10} {seconds:4.0f} s  {verdict}", flush=True)
