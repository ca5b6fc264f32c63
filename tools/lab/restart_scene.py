"""Record how 06_imagenet.py continues after one of two machines has died, for docs/see/.

record() starts launch/store.py and two torchruns, which stand for two machines, each with one
process of this file. A process runs 06 and writes down each of its lines that the scene names. At
the line of "dies", rank 1 kills its torchrun and itself with SIGKILL: its machine loses power. What
the other torchrun and its process do then is their own work.

The images are numbered, so that a frame can say which ones a rank has. The ranks vote in each
step: steps this short would have a vote only now and then, depending on the clock.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from common.machine import free_port
from imagenet import datasets, votes

SCRIPT = ROOT / "06_imagenet.py"
LIMIT = 300  # seconds for everything, on a machine that may be busy
TORCHRUN = (
    "--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --local-addr=127.0.0.1 "
    "--rdzv-backend=c10d --rdzv-id=scene "
    "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=4"
)


def program():
    """Return the part of 06 that is shown: main() and train_epoch(), and what precedes them."""
    return SCRIPT.read_text().partition("\n\n\n@torch.no_grad()")[0] + "\n"


def record(scene):
    """Run the scene. Returns the events of each rank, a list of lists.

    Raises:
        RuntimeError: the training did not continue. The message holds its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [sys.executable, ROOT / "launch/store.py", "--port", str(port)]
        store = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        machines = [start(Path(folder), machine, scene, port) for machine in range(2)]
        try:
            codes = sorted(machine.wait(LIMIT) for machine in machines)
        finally:
            for process in (store, *machines):
                process.kill()
                process.wait()
        if codes != [-signal.SIGKILL, 0]:
            logs = "\n".join(file.read_text() for file in Path(folder).glob("*.log"))
            raise RuntimeError(f"exit codes {codes}\n{logs}")
        events = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in Path(folder).glob("*.jsonl")
        ]
    begin = min(found[0]["ms"] for found in events)  # of 06: torchrun itself starts for seconds
    for event in (event for found in events for event in found):
        event["ms"] -= begin
    return sorted(events, key=lambda found: found[0]["rank"])


def start(folder, machine, scene, port):
    """Start the torchrun of a machine. Returns its Popen."""
    checkpoints = ["--checkpoints-path", folder / "checkpoints"]
    command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN.split()]
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", __file__, *scene["flags"].split()]
    variables = {
        "SCENE": json.dumps(scene),
        "SCENE_FILE": str(folder / f"{machine}.jsonl"),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with open(folder / f"{machine}.log", "w") as log:
        return subprocess.Popen(
            [*command, *checkpoints], env=os.environ | variables, stdout=log, stderr=log
        )


def values_at(frame, watch):
    """Return what the expressions of a scene are worth in a Python frame: {label: value}."""
    found = {}
    for label, expression in watch.items():
        with contextlib.suppress(NameError, AttributeError, IndexError):  # it is not there yet
            found[label] = eval(expression, frame.f_globals, frame.f_locals)
    return found


class Witness:
    """Writes down what a process of 06 does, each event at once: the process may be killed."""

    def __init__(self, scene):
        self.scene = scene
        self.rank = int(os.environ["RANK"])
        self.is_restart = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        self.lines = SCRIPT.read_text().splitlines()
        self.calls = {}  # {name of a collective: how many}
        self.waits = None  # the event of the collective that has not returned
        self.failed = False

    def trace(self, frame, kind, _):
        code = frame.f_code
        if code.co_filename == str(SCRIPT) and code.co_name in self.scene["functions"]:
            return self.follow
        return None

    def follow(self, frame, kind, _):
        if kind == "exception" and self.waits:
            self.failed = True
            self.waits = None
            self.write(frame, "failed")
        elif kind == "line" and not self.failed:
            if self.waits:
                self.write(frame, "done", line=self.waits["line"], keys=self.waits["keys"])
                self.waits = None
            self.at_line(frame, self.lines[frame.f_lineno - 1])
        elif kind == "return" and frame.f_code.co_name == "main" and not self.failed:
            self.write(frame, "return")
        return self.follow

    def at_line(self, frame, text):
        stops = [name for where, name in self.scene["stops"].items() if where in text]
        if any(stops) and os.environ["WORLD_SIZE"] != "1":  # alone, it waits for nobody
            name = stops[0]
            self.calls[name] = self.calls.get(name, 0) + 1
            key = [name, int(self.is_restart), self.calls[name]]
            self.waits = {"line": frame.f_lineno, "keys": [key]}
            self.write(frame, "wait", keys=[key])
        elif stops:
            self.write(frame, "line")
        dies = self.scene["dies"]
        here = dies["line"] in text and frame.f_locals.get("step") == dies["step"]
        if here and self.rank == dies["rank"] and not self.is_restart:
            self.die(frame)

    def die(self, frame):
        """End this machine, once the last checkpoint is on the disk."""
        folder = Path(sys.argv[sys.argv.index("--checkpoints-path") + 1])
        while not (folder / self.scene["dies"]["after"]).exists():
            time.sleep(0.05)
        self.write(frame, "killed")
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, frame, kind, **more):
        event = {"kind": kind, "rank": self.rank, "ms": round(1000 * time.time()), "values": {}}
        if frame:
            event |= {"line": frame.f_lineno, "values": values_at(frame, self.scene["watch"])}
        with open(os.environ["SCENE_FILE"], "a") as file:
            file.write(json.dumps(event | more) + "\n")


def number_images():
    init = datasets.DummyImages.__init__

    def init_with_numbers(dataset, *args, **options):
        init(dataset, *args, **options)
        dataset.targets = torch.arange(len(dataset.targets))

    datasets.DummyImages.__init__ = init_with_numbers


def main():
    witness = Witness(json.loads(os.environ["SCENE"]))
    number_images()
    votes.MAX_COST = float("inf")
    sys.argv[0] = str(SCRIPT)
    code = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    witness.write(None, "restarted" if witness.is_restart else "started", fresh=True)
    sys.settrace(witness.trace)
    exec(code, {"__name__": "__main__", "__file__": str(SCRIPT)})


if __name__ == "__main__":
    main()
