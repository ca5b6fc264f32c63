"""A training of 06 on several hosts, the faults that can be caused in it, and its recovery."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tools.lab.hosts import Hosts
from tools.lab.transcript import Transcript

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
TRAINERS = 3  # hosts 0 to 2 train
STORE = 3  # host 3 runs the store
# A training step takes a tenth of a second on two cores, and there are more steps than all drills
# together need.
TRAINING = (
    "--dummy 1200 --image-size 16 --arch mnist_net --batch-size 24 --epochs 1000 "
    "--eval-every 0 --print-every 1"
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
TIMEOUT = 15  # seconds until a rank that does not answer counts as lost
PATIENCE = 180  # seconds to wait for any event, on a machine that may be busy


class DrillFailed(Exception):
    """The training did not do what the drill expects. The message says what it did instead."""


class Recovery(NamedTuple):
    """The cost of a fault."""

    steps_lost: int  # training steps that are repeated
    seconds: float  # from the fault to the next training step
    before: int  # number of processes
    after: int


class Job:
    """One training of 06 on several hosts.

    Args:
        hosts: Hosts; the last host runs the store.
        folder: str or Path, for checkpoints.
        every: int, training steps between checkpoints.
        timeout: int, seconds until a rank that does not answer counts as lost.
        shared: bool, whether all hosts share one folder for checkpoints.
        flags: more flags for 06; they override the flags of the drills.
        settings: more variables for launch/06_elastic.sh.
    """

    def __init__(
        self, hosts, folder, every=20, timeout=TIMEOUT, shared=False, flags=(), **settings
    ):
        self.hosts = hosts
        self.folder = Path(folder)
        self.every = every
        self.shared = shared
        self.flags = [*TRAINING.split(), "--checkpoint-every", every, "--timeout", timeout, *flags]
        store = f"{hosts.addresses[STORE]}:{PORT}"
        self.settings = SETTINGS | {"STORE": store, "JOB": "drill"} | settings
        self.transcript = Transcript()
        self.running = {}  # host: Popen of launch/06_elastic.sh
        self.damaged = set()  # damaged checkpoints, as file_version() names them
        self.safe = 0  # step of the newest checkpoint that is on all disks

    # The hosts

    def start_store(self):
        """Run launch/store.py on its host."""
        begin = len(self.transcript.lines)
        self._popen(STORE, "python", "launch/store.py", "--port", PORT)
        self.wait_for(lambda: self.transcript.has("until Ctrl-C", STORE, begin), "the store")

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

    def stop(self):
        """Stop the training as a user would: signal each launch/06_elastic.sh.

        Returns:
            their exit codes.
        """
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return [process.wait(PATIENCE) for process in self.running.values()]

    def _popen(self, host, *command):
        process = self.hosts.popen(
            host, *command, variables=self.settings, stderr=subprocess.STDOUT
        )
        self.transcript.follow(host, process.stdout)
        return process

    # Faults

    def workers(self, host):
        """Return the processes of 06 on a host, as {rank: pid}.

        It may be empty during a restart.
        """
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

        hosts = within(PATIENCE, found)
        if not hosts:
            raise DrillFailed(f"found no process of rank {rank} for {PATIENCE} s")
        return hosts[0]

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
        """Flip a bit in the newest checkpoint on each host.

        Returns:
            int, the step of the checkpoint before it.
        """
        newest = max(step_of(path) for path in self.folder.glob("*/step-*.pt"))  # of any host
        before = max(step for step in self.checkpoints() if step < newest)
        for path in self.folder.glob(f"*/step-{newest:08}.pt"):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
            self.damaged.add(file_version(path))
        return before

    def checkpoints(self):
        """Return the steps, in order, whose undamaged checkpoint is on all hosts that train."""
        names = ["checkpoints"]
        if not self.shared:
            names = [self.hosts.names[host] for host in self.running]
        steps = []
        for name in names:
            paths = (self.folder / name).glob("step-*.pt")
            steps.append(
                {step_of(path) for path in paths if file_version(path) not in self.damaged}
            )
        return sorted(set.intersection(*steps))

    # Recovery

    def wait_for(self, condition, what, patience=PATIENCE):
        """Wait until condition() is true.

        Raises:
            DrillFailed: timeout (the message holds the last lines of output), or a mistake.
        """
        transcript = self.transcript
        with transcript.changed:
            if not transcript.changed.wait_for(
                lambda: transcript.mistakes or condition(), patience
            ):
                message = f"timeout: waited {patience} s for {what}"
                transcript.mistakes.append(message)  # the next wait fails at once
                lines = [f"{message}; last lines:", *transcript.explanation(self.hosts.names)]
                raise DrillFailed("\n    ".join(lines))
            self.check()

    def check(self):
        """Raise DrillFailed if a step was skipped, or too many steps were repeated."""
        if self.transcript.mistakes:
            raise DrillFailed("; ".join(self.transcript.mistakes))

    def wait_for_step(self, step):
        """Wait until the training has reached a step."""
        steps = self.transcript.steps
        self.wait_for(lambda: steps and steps[-1].number >= step, f"step {step}")

    def wait_for_world(self, world):
        """Wait until this number of processes has completed a training step."""
        seen = self.transcript

        def trains():
            return seen.world == world and seen.steps and seen.steps[-1] > seen.worlds[-1]

        self.wait_for(trains, f"a training step with {world} processes")

    def wait_for_checkpoint(self):
        """Wait until all hosts have a new checkpoint."""
        begin = self.transcript.position
        if not within(PATIENCE, lambda: self.checkpoints()[-1:] > [begin]):
            raise DrillFailed(f"no checkpoint newer than step {begin} after {PATIENCE} s")

    def recover(self, fault, world=None, resumes=True):
        """Cause a fault, and wait until the training continues.

        Args:
            fault: function, called once.
            world: int, the world size to expect after the fault; None: any.
            resumes: bool, whether to expect that the processes restart; otherwise they only wait.

        Returns:
            Recovery.

        Raises:
            DrillFailed: the training does not continue, skips steps, or resumes from an old
                checkpoint.
        """
        seen = self.transcript
        self.safe = max(self.checkpoints(), default=0)
        before = seen.world
        resumed_before = len(seen.resumed)
        begin = time.monotonic()
        fault()
        if not resumes:
            begin = time.monotonic()

        def has_recovered():
            if world is not None and seen.world != world:
                return False
            if not resumes:
                return seen.steps[-1].time > begin
            has_resumed = len(seen.resumed) > resumed_before
            return has_resumed and seen.steps[-1].time > seen.resumed[-1].time

        what = "the training to continue"
        self.wait_for(has_recovered, f"{what} with {world} processes" if world else what)
        with seen.changed:
            restarts = seen.resumed[resumed_before:]
            oldest = min((event.number for event in restarts), default=self.safe)
            if oldest < self.safe:
                seen.mistakes.append(
                    f"resumed after step {oldest}, "
                    f"although all hosts had a checkpoint of {self.safe}"
                )
            self.check()
            since = restarts[0].time if restarts else begin
            first = next(event.time for event in seen.steps if event.time > since)
            return Recovery(steps_lost(seen.steps, restarts), first - begin, before, seen.world)


def steps_lost(steps, restarts):
    """Return how many training steps are repeated after some restarts.

    Args:
        steps: list of Event.
        restarts: list of Event: the steps of the checkpoints that were used.
    """
    if not restarts:
        return 0
    last = max((event.number for event in steps if event.time < restarts[0].time), default=0)
    return max(0, last - min(event.number for event in restarts))


def step_of(path):
    return int(path.stem[len("step-") :])


def file_version(path):
    """Return the path of a checkpoint and its time.

    A later file of the same name, from a repeated step, is another version.
    """
    with contextlib.suppress(FileNotFoundError):  # 06 has deleted an old checkpoint
        return path, path.stat().st_mtime_ns


def within(seconds, condition):
    """Poll until condition() is true or the time is over; return its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def new_job(**options):
    """Yield a Job on new hosts, with a store. The training has not started."""
    with tempfile.TemporaryDirectory() as folder, Hosts(TRAINERS + 1) as hosts:
        job = Job(hosts, folder, **options)
        job.start_store()
        yield job
