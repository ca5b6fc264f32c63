"""Fire drills: let a process, a host or a link fail while 06_imagenet.py trains, and measure the recovery.

    python tools/lab/drill.py                 run all drills, one after the other in one training
    python tools/lab/drill.py worker hang     run some drills
    python tools/lab/drill.py --list          list the drills

The hosts are network namespaces on this machine; this needs root. Three hosts train, started by
launch/06_elastic.sh with one process per host; launch/store.py runs on a fourth host. Each host has
its own disk for checkpoints, unless --shared. A drill passes if the training continues by itself,
from the newest checkpoint that was on all disks or from a newer one, and skips no training step.

    steps lost    training steps that are repeated: the last step before the fault minus the step of the checkpoint.
                  Can exceed --every if the newest checkpoint was not yet on disk; writing takes a
                  few short steps
    seconds       from the fault to the next training step
    processes     number of processes before the fault and after the recovery
"""

import argparse
import contextlib
import dataclasses
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from common.errors import UserError, one_line_errors
from common.flags import output_file, whole_number
from common.records import environment
from tools.lab import hosts as hosts_module
from tools.records import append

PORT = 29400
TRAINERS, STORE = 3, 3  # hosts 0 to 2 train, host 3 runs the store
# A training step takes a tenth of a second on two cores, and there are more steps than all drills
# together need.
TRAINING = (
    "--dummy 1200 --image-size 16 --arch mnist_net --batch-size 24 --epochs 1000 --eval-every 0 "
    "--print-every 1"
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
}
SETTINGS |= {"OMP_NUM_THREADS": 1}
TIMEOUT = 15  # seconds until a rank that does not answer counts as lost
PATIENCE = 180  # seconds to wait for any event, on a machine that may be busy


class DrillFailed(Exception):
    """The training did not do what the drill expects. The message says what it did instead."""


@dataclasses.dataclass
class Recovery:
    """The cost of a fault: see the top of this file."""

    steps_lost: int
    seconds: float
    before: int  # number of processes
    after: int


class Job:
    """One training of 06 on several hosts, and the faults that can be caused in it.

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
        self.hosts, self.folder, self.every, self.shared = hosts, Path(folder), every, shared
        self.flags = [*TRAINING.split(), "--checkpoint-every", every, "--timeout", timeout, *flags]
        self.settings = (
            SETTINGS | {"STORE": f"{hosts.addresses[STORE]}:{PORT}", "JOB": "drill"} | settings
        )
        self.running = {}  # host: Popen of launch/06_elastic.sh
        self.lines = []  # output of all hosts: (time, host, line)
        self.steps = []  # training steps in this output: (time, step)
        self.resumed = []  # steps of the checkpoints from which the training resumed: (time, step)
        self.worlds = []  # world sizes, one per start or restart: (time, world size)
        self.damaged = set()  # damaged checkpoints, as returned by _file_version
        self.safe = 0  # step of the newest checkpoint that is on all disks
        self.mistakes = []  # messages: a step was skipped, or too many steps were repeated
        self.changed = threading.Condition()  # notified after each line of output

    # The hosts

    def start_store(self):
        """Run launch/store.py on its host."""
        begin = len(self.lines)
        self._popen(STORE, "python", "launch/store.py", "--port", PORT)

        def answers():
            said = [line for _, host, line in self.lines[begin:] if host == STORE]
            self.mistakes += [line for line in said if line.startswith("store.py: error: ")]
            return self.mistakes or any("until Ctrl-C" in line for line in said)

        self.wait_for(answers, "the store")

    def start(self, *hosts):
        """Start training on these hosts."""
        for host in hosts:
            path = self.folder / "checkpoints"
            path.mkdir(exist_ok=True)
            command = [ROOT / "launch/06_elastic.sh", *self.flags, "--checkpoints-path", path]
            if not self.shared:
                disk = self.folder / self.hosts.names[host]
                disk.mkdir(exist_ok=True)
                command = [
                    "sh",
                    "-c",
                    'mount --bind "$0" "$1" && shift && exec "$@"',
                    disk,
                    path,
                    *command,
                ]
            self.running[host] = self._popen(host, *command)

    def _popen(self, host, *command):
        process = self.hosts.popen(
            host, *command, variables=self.settings, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._read, args=(host, process.stdout), daemon=True).start()
        return process

    def _read(self, host, pipe):
        for line in pipe:
            with self.changed:
                now = time.monotonic()
                self.lines.append((now, host, line.rstrip("\n")))
                if match := re.match(r"   == step: \[ *(\d+)/(\d+)\] \[(\d+)/", line):
                    step, steps_per_epoch, epoch = map(int, match.groups())
                    self._add_step(now, (epoch - 1) * steps_per_epoch + step)
                elif match := re.match(r"resumed from .*, after step (\d+) of", line):
                    self._add_resumed(now, int(match[1]))
                elif match := re.match(r"06_imagenet\.py \| .* \| world size (\d+)", line):
                    self.worlds.append((now, int(match[1])))
                self.changed.notify_all()

    def _add_step(self, now, step):
        last = self.position
        if step != last + 1:
            self.mistakes.append(f"step {step} followed step {last}")
        self.steps.append((now, step))

    def _add_resumed(self, now, step):
        # One step more than printed is correct: another host may save a step that rank 0, being
        # killed, never printed.
        if step > self.position + 1:
            self.mistakes.append(
                f"resumed after step {step}, although the last step was {self.position}"
            )
        self.resumed.append((now, step))

    @property
    def position(self):
        """The last training step, or the step of the checkpoint if the training has resumed since."""
        return max(self.steps[-1:] + self.resumed[-1:], default=(0, 0))[1]

    @property
    def world(self):
        """The world size: the number of processes that train."""
        return self.worlds[-1][1] if self.worlds else 0

    # Faults

    def workers(self, host):
        """Return the processes of 06 on a host, as {rank: pid}. It may be empty during a restart."""
        pids = {}
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                pids |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
        return pids

    def host_of(self, rank):
        """Return the host on which a rank runs. Wait until the rank runs."""
        hosts = within(
            PATIENCE, lambda: [host for host in self.running if rank in self.workers(host)]
        )
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

    def checkpoints(self):
        """Return the steps, in order, whose undamaged checkpoint is on all hosts that train."""
        names = (
            ["checkpoints"] if self.shared else [self.hosts.names[host] for host in self.running]
        )
        steps = [
            {
                int(path.stem[5:])
                for path in (self.folder / name).glob("step-*.pt")
                if self._file_version(path) not in self.damaged
            }
            for name in names
        ]
        return sorted(set.intersection(*steps))

    def _file_version(self, path):
        """Return the path and its time: a later file of the same name, from a repeated step, is another version."""
        with contextlib.suppress(FileNotFoundError):  # 06 has deleted an old checkpoint
            return path, path.stat().st_mtime_ns

    def damage_newest_checkpoint(self):
        """Flip a bit in the newest checkpoint on each host; return the step of the checkpoint before it."""
        newest = max(int(path.stem[5:]) for path in self.folder.glob("*/step-*.pt"))  # of any host
        before = max(step for step in self.checkpoints() if step < newest)
        for path in self.folder.glob(f"*/step-{newest:08}.pt"):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
            self.damaged.add(self._file_version(path))
        return before

    # Recovery

    def wait_for(self, condition, what, patience=PATIENCE):
        """Wait until condition() is true.

        Raises:
            DrillFailed: timeout (the message contains the last lines of output), or a step was
                skipped.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self.mistakes or condition(), patience):
                # the next wait fails at once
                self.mistakes.append(f"timeout: waited {patience} s for {what}")
                lines = [
                    f"{self.hosts.names[host]}: {line}"
                    for _, host, line in self.lines
                    if is_informative(line)
                ]
                raise DrillFailed(
                    "\n    ".join(
                        [f"timeout: waited {patience} s for {what}; last lines:", *lines[-30:]]
                    )
                )
            self.check()

    def check(self):
        """Raise DrillFailed if a step was skipped, or too many steps were repeated."""
        if self.mistakes:
            raise DrillFailed("; ".join(self.mistakes))

    def wait_for_step(self, step):
        """Wait until the training has reached a step."""
        self.wait_for(lambda: self.steps and self.steps[-1][1] >= step, f"step {step}")

    def wait_for_world(self, world):
        """Wait until this number of processes has completed a training step."""
        self.wait_for(
            lambda: self.world == world and self.steps and self.steps[-1] > self.worlds[-1],
            f"a training step with {world} processes",
        )

    def wait_for_checkpoint(self):
        """Wait until all hosts have a new checkpoint."""
        begin = self.position
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
        self.safe = max(self.checkpoints(), default=0)
        before, resumed, begin = self.world, len(self.resumed), time.monotonic()
        fault()
        begin = begin if resumes else time.monotonic()

        def has_recovered():
            since = self.resumed[-1][0] if resumes and len(self.resumed) > resumed else begin
            world_is_right = world is None or self.world == world
            return (
                world_is_right
                and (len(self.resumed) > resumed or not resumes)
                and self.steps[-1][0] > since
            )

        self.wait_for(
            has_recovered, f"the training to continue{f' with {world} processes' if world else ''}"
        )
        with self.changed:
            restarts = self.resumed[resumed:]
            first = next(
                now for now, _ in self.steps if now > (restarts[0][0] if restarts else begin)
            )
            last = (
                max((step for now, step in self.steps if now < restarts[0][0]), default=0)
                if restarts
                else 0
            )
            lost = max(0, last - min(step for _, step in restarts)) if restarts else 0
            recovery = Recovery(lost, first - begin, before, self.world)
            if (oldest := min((step for _, step in restarts), default=self.safe)) < self.safe:
                self.mistakes.append(
                    f"resumed after step {oldest}, although all hosts had a checkpoint of "
                    f"{self.safe}"
                )
            self.check()
        return recovery

    def stop(self):
        """Stop the training as a user would: signal each launch/06_elastic.sh. Return their exit codes."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return [process.wait(PATIENCE) for process in self.running.values()]


def is_informative(line):
    """Return whether a line may explain a failure: it is neither a step line nor part of a C++ stack."""
    return "== step:" not in line and not line.startswith(("frame #", "[W"))


def within(seconds, condition):
    """Poll until condition() is true or the time is over; return its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def drilled(**options):
    """Yield a Job on new hosts, with a store. The training has not started."""
    with tempfile.TemporaryDirectory() as folder, hosts_module.Hosts(TRAINERS + 1) as hosts:
        job = Job(hosts, folder, **options)
        job.start_store()
        yield job


def ready(job):
    """Start the training on all hosts, and wait for a new checkpoint."""
    job.start(*(host for host in range(TRAINERS) if host not in job.running))
    job.wait_for_world(TRAINERS)
    job.wait_for_checkpoint()


# The drills. Each takes a Job that is ready and returns a Recovery. The docstrings appear in --list
# and in the book.


def drill_worker(job):
    """a process is killed"""
    return job.recover(lambda: job.signal_worker(random.randrange(TRAINERS)), TRAINERS)


def drill_hang(job):
    """a process hangs (SIGSTOP)"""
    return job.recover(lambda: job.signal_worker(1, signal.SIGSTOP), TRAINERS)


def drill_torchrun(job):
    """a torchrun is killed: its processes end, and the host joins again"""
    host = job.host_of(1)
    orphans = job.workers(host).values()

    def fault():
        job.kill_torchrun(host)
        if not within(10, lambda: not set(orphans) & set(job.hosts.pids(host))):
            job.mistakes.append(
                "a process of the killed torchrun was still running after ten seconds"
            )

    return job.recover(fault, TRAINERS)


def drill_blink(job):
    """a host's link is down for 5 s: all processes wait, none restarts"""
    host = random.randrange(TRAINERS)

    def fault():
        job.hosts.cut(host)
        time.sleep(5)
        job.hosts.mend(host)

    return job.recover(fault, TRAINERS, resumes=False)


def drill_cut(job):
    """a host's link is down: the other hosts continue"""
    host = job.host_of(0)
    recovery = job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    job.hosts.mend(host)
    return recovery


def drill_mend(job):
    """a host's link is up again after the other hosts have continued: the host joins again"""
    host = job.host_of(2)
    job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    return job.recover(lambda: job.hosts.mend(host), TRAINERS)


def drill_host(job):
    """all processes on the host of rank 0 are killed"""
    return job.recover(lambda: job.kill_host(job.host_of(0)), TRAINERS - 1)


def drill_join(job):
    """a host joins a running training"""
    host = job.host_of(1)
    job.recover(lambda: job.kill_host(host), TRAINERS - 1)
    recovery = job.recover(lambda: job.start(host), TRAINERS)
    if recovery.steps_lost:
        raise DrillFailed(f"{recovery.steps_lost} steps lost, although nothing had failed")
    return recovery


def drill_store(job):
    """the store is killed, and started again"""

    def fault():
        job.kill_host(STORE)
        job.start_store()

    return job.recover(fault, TRAINERS)


def drill_damage(job):
    """the newest checkpoint is damaged and a process killed: the checkpoint before it is used"""
    job.wait_for_checkpoint()
    # the training stands still: a newer checkpoint would be used instead
    job.signal_worker(1, signal.SIGSTOP)
    time.sleep(1)  # until the other processes have written the last one

    def fault():
        job.safe = job.damage_newest_checkpoint()
        job.signal_worker(1)

    recovery = job.recover(fault, TRAINERS)
    if job.resumed[-1][1] != job.safe:
        raise DrillFailed(f"resumed after step {job.resumed[-1][1]}, expected {job.safe}")
    return recovery


def drill_kills(job, count):
    """20 processes (or --kills) are killed at random, one in four before the training has recovered"""
    recoveries = []
    for k in range(count):
        job.wait_for_world(TRAINERS)
        rank = random.randrange(TRAINERS)
        if k + 1 < count and random.random() < 0.25:
            job.signal_worker(rank)
            time.sleep(random.uniform(0, 6))
        else:
            recoveries.append(job.recover(lambda rank=rank: job.signal_worker(rank), TRAINERS))
            job.wait_for_step(job.position + random.randrange(2 * job.every))
    seconds = statistics.median(recovery.seconds for recovery in recoveries)
    return Recovery(max(r.steps_lost for r in recoveries), seconds, TRAINERS, job.world)


DRILLS = {name[6:]: drill for name, drill in list(globals().items()) if name.startswith("drill_")}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("drills", nargs="*", metavar="DRILL", help="drills to run (default: all)")
    add("--list", action="store_true", help="list the drills")
    add(
        "--every",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="steps between checkpoints (default: 20)",
    )
    add(
        "--kills",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="processes to kill in `kills` (default: 20)",
    )
    add("--shared", action="store_true", help="let all hosts share one folder of checkpoints")
    add(
        "--log-file",
        type=output_file,
        metavar="FILE",
        help="append one JSON line per drill to FILE",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.drills if name not in DRILLS]:
        raise UserError(f"drill {unknown[0]!r}: expected {', '.join(DRILLS)}; see --list")
    return args


def main(args):
    if args.list:
        for name, drill in DRILLS.items():
            print(f"{name:10} {drill.__doc__}")
        return 0
    if missing := hosts_module.missing():
        raise UserError(
            f"{missing}: expected root on Linux with iproute2; sudo .venv/bin/python "
            "tools/lab/drill.py"
        )
    env = environment(torch.device("cpu"))
    print(
        f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | a checkpoint every "
        f"{args.every} steps"
    )
    print(f"{'drill':10} {'steps lost':>10} {'seconds':>8} {'processes':>10}")
    random.seed(0)
    # exit through the hosts' __exit__, which cleans up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failures = 0
    with contextlib.ExitStack() as stack:
        job = None
        for name in args.drills or DRILLS:
            # other programs on this machine slow the drills down
            begin, load = time.monotonic(), os.getloadavg()[0]
            try:
                job = job or stack.enter_context(drilled(every=args.every, shared=args.shared))
                ready(job)
                job.wait_for_step(job.position + random.randrange(job.every))
                recovery = DRILLS[name](job, args.kills) if name == "kills" else DRILLS[name](job)
                outcome = dataclasses.asdict(recovery) | {"failed": None}
                processes = f"{recovery.before} -> {recovery.after}"
                line = (
                    f"{recovery.steps_lost:10} {recovery.seconds:8.1f} {processes:>10}   recovered"
                )
            except DrillFailed as error:
                failures += 1
                outcome = {"failed": str(error)}
                line = f"{'failed':>10}   {error}"
                job = None  # start the next drill on new hosts
                stack.close()
            print(f"{name:10} {line}", flush=True)
            write(
                args,
                name,
                outcome | {"drill_seconds": time.monotonic() - begin, "load": load} | env,
            )
        if job:
            job.stop()
    return 1 if failures else 0


def write(args, drill, measured):
    """Append one line to --log-file."""
    record = {
        "drill": drill,
        "checkpoint_every": args.every,
        "shared": args.shared,
        "timeout": TIMEOUT,
    }
    record |= {"kills": args.kills} if drill == "kills" else {}
    append(args.log_file, record | measured)


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(parse_args()))
