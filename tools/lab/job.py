"""A training of 06 on several hosts: what it prints, the faults that can be caused in it, and its
recovery.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tools.lab.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
TRAINERS = 3  # hosts 0 to 2 train
STORE = 3  # host 3 runs the store
TIMEOUT = 15  # seconds until a rank that does not answer counts as lost
PATIENCE = 180  # seconds to wait for any event, on a machine that may be busy
# A training step takes a tenth of a second on two cores, and there are more steps than all drills
# together need.
TRAINING = (
    "--dummy 1200 --image-size 16 --arch mnist_net --batch-size 24 --epochs 1000 "
    f"--eval-every 0 --print-every 1 --timeout {TIMEOUT}"
)
# Variables for launch/06_elastic.sh. The timeouts are too short for machines that save large
# checkpoints.
SETTINGS = {
    "NODES": f"1:{TRAINERS}",
    "PROCESSES": 1,
    "RESTARTS": 1000,
    "PAUSE": 1,
    "INTERVAL": 1,
    "LAST_CALL": 4,
    "OMP_NUM_THREADS": 1,
}
STEP = re.compile(r"   == step: \[ *(\d+)/(\d+)\] \[(\d+)/")
RESUMED = re.compile(r"resumed from .*, after step (\d+) of")
STARTED = re.compile(r"06_imagenet\.py \| .* \| world size (\d+)")


class DrillFailed(Exception):
    """The training did not do what the drill expects. The message says what it did instead."""


class Event(NamedTuple):
    """A number that the training has printed."""

    time: float  # of time.monotonic()
    number: int


class Recovery(NamedTuple):
    """The cost of a fault."""

    steps_lost: int  # training steps that are repeated
    seconds: float  # from the fault to the next training step
    before: int  # number of processes
    after: int


class Job:
    """One training of 06 on several hosts, of which the last runs the store.

    Args:
        folder: Path, for checkpoints; every host has its own in it, unless `shared`.
        every: int, training steps between checkpoints.
    """

    def __init__(self, hosts, folder, every=20, shared=False):
        self.hosts = hosts
        self.folder = folder
        self.every = every
        self.shared = shared
        self.flags = [*TRAINING.split(), "--checkpoint-every", every]
        self.settings = SETTINGS | {"STORE": f"{hosts.addresses[STORE]}:{PORT}", "JOB": "drill"}
        self.running = {}  # host: Popen of launch/06_elastic.sh
        self.safe = 0  # step of the newest checkpoint that is on all disks
        self.lines = []  # of output, of all hosts
        self.steps = []  # of Event: the number of a training step, counted over all epochs
        self.resumed = []  # of Event: the step of a checkpoint from which the training resumed
        self.worlds = []  # of Event: the number of processes of a start or restart
        self.mistakes = []  # of str: a step was skipped, or too many steps were repeated

    # The hosts

    def start_store(self):
        """Run launch/store.py on its host."""
        begin = len(self.lines)
        self._popen(STORE, "python", "launch/store.py", "--port", PORT)
        self.wait_for(lambda: "until Ctrl-C" in "".join(self.lines[begin:]), "the store")

    def start(self, *hosts):
        """Start training on these hosts."""
        path = self.folder / "checkpoints"
        path.mkdir(exist_ok=True)
        for host in hosts:
            command = [ROOT / "launch/06_elastic.sh", *self.flags, "--checkpoints-path", path]
            if not self.shared:
                disk = self.folder / self.hosts.names[host]
                disk.mkdir(exist_ok=True)
                mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
                command = ["sh", "-c", mount, disk, path, *command]
            self.running[host] = self._popen(host, *command)

    def start_all(self):
        """Start training on all hosts on which it does not run, and wait for a new checkpoint."""
        self.start(*(host for host in range(TRAINERS) if host not in self.running))
        self.wait_for_world(TRAINERS)
        self.wait_for_checkpoint()

    def _popen(self, host, *command):
        process = self.hosts.popen(
            host, *command, variables=self.settings, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._read, args=(host, process.stdout), daemon=True).start()
        return process

    # What it prints

    def _read(self, host, pipe):
        for line in pipe:
            self.note(line.rstrip("\n"), self.hosts.names[host])

    def note(self, line, host):
        """Note what a line of output says."""
        now = time.monotonic()
        self.lines.append(f"{host}: {line}")
        if match := STEP.match(line):
            step, steps_per_epoch, epoch = map(int, match.groups())
            step += (epoch - 1) * steps_per_epoch
            if step != self.position + 1:
                self.mistakes.append(f"step {step} followed step {self.position}")
            self.steps.append(Event(now, step))
        elif match := RESUMED.match(line):
            step = int(match[1])
            # One step more than printed is correct: another host may save a step that rank 0, being
            # killed, never printed.
            if step > self.position + 1:
                self.mistakes.append(
                    f"resumed after step {step}, although the last step was {self.position}"
                )
            self.resumed.append(Event(now, step))
        elif match := STARTED.match(line):
            self.worlds.append(Event(now, int(match[1])))
        elif line.startswith("store.py: error: "):
            self.mistakes.append(line)

    @property
    def position(self):
        """The last training step, or that of the checkpoint if the training has resumed since."""
        return max(self.steps[-1:] + self.resumed[-1:], default=Event(0, 0)).number

    @property
    def world(self):
        """The number of processes that train."""
        return self.worlds[-1].number if self.worlds else 0

    def steps_lost(self, restarts):
        """Return how many training steps are repeated after these Events of `resumed`."""
        if not restarts:
            return 0
        last = max((e.number for e in self.steps if e.time < restarts[0].time), default=0)
        return max(0, last - min(event.number for event in restarts))

    # Faults

    def workers(self, host):
        """Return the processes of 06 on a host, {rank: pid}. It may be empty during a restart."""
        pids = {}
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                pids |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
        return pids

    def host_of(self, rank):
        """Return the host on which a rank runs. Wait until the rank runs."""

        def found():
            return [host for host in self.running if rank in self.workers(host)]

        return self.wait_for(found, f"a process of rank {rank}")[0]

    def signal_worker(self, rank, number=signal.SIGKILL):
        """Send a signal to a rank."""
        os.kill(self.workers(self.host_of(rank))[rank], number)

    def kill_torchrun(self, host):
        """Kill the torchrun of a host, so that it cannot end its workers."""
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(argument.endswith(b"/torchrun") for argument in arguments[:3]):
                    os.kill(pid, signal.SIGKILL)

    def kill_host(self, host):
        """Kill all processes of a host."""
        self.hosts.kill(host)
        if host in self.running:
            self.running.pop(host).wait()

    def damage_newest_checkpoint(self):
        """Flip a bit in the newest checkpoint on each host. Return the step of the one before."""
        newest = max(map(step_of, self.folder.glob("*/step-*.pt")))  # of any host
        before = max(step for step in self.checkpoints() if step < newest)
        for path in self.folder.glob(f"*/step-{newest:08}.pt"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        return before

    def checkpoints(self):
        """Return the steps, in order, whose checkpoint is on all hosts that train."""
        names = ["checkpoints"]
        if not self.shared:
            names = [self.hosts.names[host] for host in self.running]
        steps = [set(map(step_of, (self.folder / name).glob("step-*.pt"))) for name in names]
        return sorted(set.intersection(*steps))

    # Recovery

    def wait_for(self, condition, what):
        """Wait until condition() is true, and return its value.

        Raises:
            DrillFailed: timeout (the message holds the last lines of output), or a mistake.
        """
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()) or self.mistakes:
            if self.mistakes:
                raise DrillFailed("; ".join(self.mistakes))
            if time.monotonic() > deadline:
                # neither step lines nor parts of a C++ stack explain a failure
                last = [line for line in self.lines if not re.search(r"== step:|: frame #", line)]
                message = f"timeout: waited {PATIENCE} s for {what}; last lines:"
                raise DrillFailed("\n    ".join([message, *last[-30:]]))
            time.sleep(0.02)
        return value

    def wait_for_step(self, step):
        """Wait until the training has reached a step."""
        self.wait_for(lambda: self.steps and self.steps[-1].number >= step, f"step {step}")

    def wait_for_world(self, world):
        """Wait until this number of processes has completed a training step."""

        def trains():
            return self.world == world and self.steps and self.steps[-1] > self.worlds[-1]

        self.wait_for(trains, f"a training step with {world} processes")

    def wait_for_checkpoint(self):
        """Wait until all hosts have a new checkpoint."""
        begin = self.position
        self.wait_for(lambda: self.checkpoints()[-1:] > [begin], f"a checkpoint after step {begin}")

    def recover(self, fault, world, resumes=True):
        """Cause a fault, and wait until the training continues.

        Args:
            world: int, the number of processes to expect after the fault.
            resumes: bool, whether to expect that the processes restart; otherwise they only wait.

        Returns:
            Recovery.

        Raises:
            DrillFailed: the training does not continue, skips steps, or resumes from an old
                checkpoint.
        """
        self.safe = max(self.checkpoints(), default=0)
        before = self.world
        resumed_before = len(self.resumed)
        begin = time.monotonic()
        fault()
        if not resumes:
            begin = time.monotonic()

        def has_recovered():
            since = self.resumed[resumed_before:][-1:] if resumes else [Event(begin, 0)]
            return self.world == world and since and self.steps[-1].time > since[0].time

        self.wait_for(has_recovered, f"the training to continue with {world} processes")
        restarts = self.resumed[resumed_before:]
        oldest = min((event.number for event in restarts), default=self.safe)
        if oldest < self.safe:
            raise DrillFailed(
                f"resumed after step {oldest}, although all hosts had a checkpoint of {self.safe}"
            )
        since = restarts[0].time if restarts else begin
        first = next(event.time for event in self.steps if event.time > since)
        return Recovery(self.steps_lost(restarts), first - begin, before, self.world)


def step_of(path):
    return int(path.stem[len("step-") :])


@contextlib.contextmanager
def new_job(**options):
    """Yield a Job on new hosts, with a store. The training has not started."""
    with tempfile.TemporaryDirectory() as folder, Hosts(TRAINERS + 1) as hosts:
        job = Job(hosts, Path(folder), **options)
        job.start_store()
        yield job
