"""Fire drills: let something fail while 06_imagenet.py trains, and measure the recovery.

    python tools/lab/drill.py                 run all drills, one after the other in one training
    python tools/lab/drill.py worker hang     run some drills
    python tools/lab/drill.py --list          list the drills

The hosts are network namespaces on this machine; this needs root. Three hosts train, started by
launch/06_elastic.sh with one process per host; launch/store.py runs on a fourth host. Each host has
its own disk for checkpoints, unless --shared. A drill passes if the training continues by itself,
from the newest checkpoint that was on all disks or from a newer one, and skips no training step.

    steps lost    training steps that are repeated: from the checkpoint to the fault.
                  Can exceed --every if the newest checkpoint was not yet on disk; writing takes a
                  few short steps
    seconds       from the fault to the next training step
    processes     number of processes before the fault and after the recovery
"""

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from common.errors import UserError, one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from tools.lab.hosts import Hosts, missing
from tools.records import append

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
        kills: int, how many processes the drill of this name kills.
    """

    def __init__(self, hosts, folder, every=20, shared=False, kills=20):
        self.hosts = hosts
        self.folder = folder
        self.every = every
        self.shared = shared
        self.kills = kills
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


# The drills: what is printed about one is its docstring


def worker(job):
    """a process is killed"""
    return job.recover(lambda: job.signal_worker(random.randrange(TRAINERS)), TRAINERS)


def hang(job):
    """a process hangs (SIGSTOP)"""
    return job.recover(lambda: job.signal_worker(1, signal.SIGSTOP), TRAINERS)


def torchrun(job):
    """a torchrun is killed: its processes end, and the host joins again"""
    host = job.host_of(1)
    orphans = set(job.workers(host).values())
    recovery = job.recover(lambda: job.kill_torchrun(host), TRAINERS)
    if orphans & set(job.hosts.pids(host)):
        raise DrillFailed("a process of the killed torchrun is still running")
    return recovery


def blink(job):
    """a host's link is down for 5 s: all processes wait, none restarts"""
    host = random.randrange(TRAINERS)

    def fault():
        job.hosts.cut(host)
        time.sleep(5)
        job.hosts.mend(host)

    return job.recover(fault, TRAINERS, resumes=False)


def cut(job):
    """a host's link is down: the other hosts continue"""
    host = job.host_of(0)
    recovery = job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    job.hosts.mend(host)
    return recovery


def mend(job):
    """a host's link is up again after the other hosts have continued: the host joins again"""
    host = job.host_of(2)
    job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    return job.recover(lambda: job.hosts.mend(host), TRAINERS)


def host(job):
    """all processes on the host of rank 0 are killed"""
    return job.recover(lambda: job.kill_host(job.host_of(0)), TRAINERS - 1)


def join(job):
    """a host joins a running training"""
    host = job.host_of(1)
    job.recover(lambda: job.kill_host(host), TRAINERS - 1)
    recovery = job.recover(lambda: job.start(host), TRAINERS)
    if recovery.steps_lost:
        raise DrillFailed(f"{recovery.steps_lost} steps lost, although nothing had failed")
    return recovery


def store(job):
    """the store is killed, and started again"""

    def fault():
        job.kill_host(STORE)
        job.start_store()

    return job.recover(fault, TRAINERS)


def damage(job):
    """the newest checkpoint is damaged and a process killed: the checkpoint before it is used"""
    job.wait_for_checkpoint()
    # The training stands still: a newer checkpoint would be used instead.
    job.signal_worker(1, signal.SIGSTOP)
    time.sleep(1)  # until the other processes have written the last one

    def fault():
        job.safe = job.damage_newest_checkpoint()
        job.signal_worker(1)

    recovery = job.recover(fault, TRAINERS)
    used = job.resumed[-1].number
    if used != job.safe:
        raise DrillFailed(f"resumed after step {used}, expected {job.safe}")
    job.wait_for_step(used + 3 * job.every)  # until another has replaced the damaged one
    return recovery


def kills(job):
    """20 processes (or --kills) are killed at random, one in four before the training has
    recovered
    """
    recoveries = []
    for k in range(job.kills):
        job.wait_for_world(TRAINERS)
        rank = random.randrange(TRAINERS)
        if k + 1 < job.kills and random.random() < 0.25:
            job.signal_worker(rank)
            time.sleep(random.uniform(0, 6))
        else:
            recoveries.append(job.recover(lambda rank=rank: job.signal_worker(rank), TRAINERS))
            job.wait_for_step(job.position + random.randrange(2 * job.every))
    most_lost = max(recovery.steps_lost for recovery in recoveries)
    seconds = statistics.median(recovery.seconds for recovery in recoveries)
    return Recovery(most_lost, seconds, TRAINERS, job.world)


DRILLS = (worker, hang, torchrun, blink, cut, mend, host, join, store, damage, kills)
DRILLS = {run.__name__: run for run in DRILLS}  # in the order in which they run


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("drills", nargs="*", metavar="DRILL", help="drills to run; none: all")
    add("--list", action="store_true", help="list the drills")
    add("--every", type=whole_number(1), default=20, metavar="N", help="steps between checkpoints")
    add("--kills", type=whole_number(1), default=20, metavar="N", help="processes to kill in kills")
    add("--shared", action="store_true", help="let all hosts share one folder of checkpoints")
    add("--log-file", type=output_file, metavar="FILE", help="append one JSON line per drill")
    args = parser.parse_args()
    unknown = [name for name in args.drills if name not in DRILLS]
    if unknown:
        raise UserError(f"drill {unknown[0]!r}: expected {', '.join(DRILLS)}; see --list")
    return args


def main(args):
    if args.list:
        for name, run in DRILLS.items():
            print(f"{name:10} {' '.join(run.__doc__.split())}")
        return 0
    if reason := missing():
        raise UserError(
            f"{reason}: expected root on Linux with iproute2; "
            "sudo .venv/bin/python tools/lab/drill.py"
        )
    env = environment(torch.device("cpu"))
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | "
        f"a checkpoint every {args.every} steps"
    )
    print(f"{'drill':10} {'steps lost':>10} {'seconds':>8} {'processes':>10}")
    random.seed(0)
    # exit through the hosts' __exit__, which cleans up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings = {"every": args.every, "shared": args.shared, "kills": args.kills}
    failures = 0
    with contextlib.ExitStack() as stack:
        job = None
        for name in args.drills or DRILLS:
            record = {"drill": name, "checkpoint_every": args.every, "shared": args.shared}
            record |= {"timeout": TIMEOUT} | ({"kills": args.kills} if name == "kills" else {})
            begin = time.monotonic()
            load = os.getloadavg()[0]  # other programs on this machine slow the drills down
            try:
                job = job or stack.enter_context(new_job(**settings))
                job.start_all()
                job.wait_for_step(job.position + random.randrange(job.every))
                recovery = DRILLS[name](job)
                processes = f"{recovery.before} -> {recovery.after}"
                row = (
                    f"{recovery.steps_lost:10} {recovery.seconds:8.1f} {processes:>10}   recovered"
                )
                record |= recovery._asdict() | {"failed": None}
            except DrillFailed as error:
                failures += 1
                row = f"{'failed':>10}   {error}"
                record |= {"failed": str(error)}
                job = None  # start the next drill on new hosts
                stack.close()
            print(f"{name:10} {row}", flush=True)
            record |= {"drill_seconds": time.monotonic() - begin, "load": load}
            append(args.log_file, record | env)
    return 1 if failures else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(parse_args()))
