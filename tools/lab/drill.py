"""Fire drills: what 06_imagenet.py does when a process, a machine or a cable fails, on hosts made of namespaces.

    python tools/lab/drill.py                 all of them, one after the other in one training
    python tools/lab/drill.py worker hang     some
    python tools/lab/drill.py --list          what they are

Three hosts train, started by launch/06_elastic.sh with one process on each; launch/store.py runs on a fourth. Each
has a disk of its own for checkpoints, unless --shared. A drill passes if the training goes on by itself, from
the newest checkpoint that was on all disks or a newer one, and leaves out no step. Needs root.

    steps lost    the last step before the fault, less the one after which the training went on; more than --every are
                  lost if the newest checkpoint was still on its way to the disk, which takes a few of these short steps
    seconds       from the fault to the next step
    processes     before the fault, and when all was over
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
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
from common.flags import whole_number
from common.report import environment
from tools.lab import hosts as hosts_module

PORT = 29400
TRAINERS, STORE = 3, 3  # hosts 0 to 2 train, host 3 keeps the store
# Small enough for a step in a tenth of a second on two cores, and more steps than all drills together take.
TRAINING = "--dummy 1200 --image-size 16 --arch mnist_net --batch-size 24 --epochs 1000 --eval-every 0 --print-every 1"
# For launch/06_elastic.sh. The patience of a drill, which would be too little for machines with much to save.
SETTINGS = {"NODES": f"1:{TRAINERS}", "PROCESSES": 1, "RESTARTS": 1000, "PAUSE": 1, "INTERVAL": 1, "LAST_CALL": 4}
SETTINGS |= {"OMP_NUM_THREADS": 1}
TIMEOUT = 15  # seconds for a rank that does not answer
PATIENCE = 180  # seconds for anything, on a machine that may be busy with something else


class DrillFailed(Exception):
    """The training did not do what the drill expects; the message says what it did instead."""


@dataclasses.dataclass
class Recovery:
    """How a training came through a fault: see the top of this file."""

    steps_lost: int
    seconds: float
    before: int  # processes
    after: int


class Job:
    """One training of 06 on several hosts, and what may happen to it.

    Args:
        hosts: Hosts, the last of which is for the store.
        folder: str or Path, for checkpoints.
        every: int, steps between checkpoints.
        timeout: int, seconds for a rank that does not answer.
        shared: bool, whether all hosts have one folder for checkpoints.
        flags: more flags of 06; of two that differ the later one counts.
        settings: more variables for launch/06_elastic.sh.
    """

    def __init__(self, hosts, folder, every=20, timeout=TIMEOUT, shared=False, flags=(), **settings):
        self.hosts, self.folder, self.every, self.shared = hosts, Path(folder), every, shared
        self.flags = [*TRAINING.split(), "--checkpoint-every", every, "--timeout", timeout, *flags]
        self.settings = SETTINGS | {"STORE": f"{hosts.addresses[STORE]}:{PORT}", "JOB": "drill"} | settings
        self.running = {}  # host -> its supervising loop, a Popen
        self.lines = []  # what all hosts have printed: (time, host, line)
        self.steps = []  # of those, the steps: (time, step)
        self.resumed = []  # the steps after which it went on: (time, step)
        self.worlds = []  # how many processes, each time it started or went on: (time, number)
        self.bad = set()  # the checkpoints that were damaged, as _written knows them
        self.safe = 0  # the step of the newest checkpoint that none can lose
        self.mistakes = []  # a step left out, or too many taken back
        self.news = threading.Condition()

    # The hosts

    def start_store(self):
        """Start the store on its host."""
        begin = len(self.lines)
        self._popen(STORE, "python", "launch/store.py", "--port", PORT)
        self.wait_for(lambda: any("until Ctrl-C" in line for _, _, line in self.lines[begin:]), "the store")

    def start(self, *hosts):
        """Start training on these hosts."""
        for host in hosts:
            path = self.folder / "checkpoints"
            path.mkdir(exist_ok=True)
            command = [ROOT / "launch/06_elastic.sh", *self.flags, "--checkpoints-path", path]
            if not self.shared:
                own = self.folder / self.hosts.names[host]
                own.mkdir(exist_ok=True)
                command = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', own, path, *command]
            self.running[host] = self._popen(host, *command)

    def _popen(self, host, *command):
        process = self.hosts.popen(host, *command, variables=self.settings, stderr=subprocess.STDOUT)
        threading.Thread(target=self._read, args=(host, process.stdout), daemon=True).start()
        return process

    def _read(self, host, pipe):
        for line in pipe:
            with self.news:
                now = time.monotonic()
                self.lines.append((now, host, line.rstrip("\n")))
                if found := re.match(r"   == step: \[ *(\d+)/(\d+)\] \[(\d+)/", line):
                    step, of, epoch = map(int, found.groups())
                    self._note_step(now, (epoch - 1) * of + step)
                elif found := re.match(r"resumed from .*, after step (\d+) of", line):
                    self._note_resumed(now, int(found[1]))
                elif found := re.match(r"06_imagenet\.py \| .* \| world size (\d+)", line):
                    self.worlds.append((now, int(found[1])))
                self.news.notify_all()

    def _note_step(self, now, step):
        last = self.position
        if step != last + 1:
            self.mistakes.append(f"step {step} came after step {last}")
        self.steps.append((now, step))

    def _note_resumed(self, now, step):
        # One more than was printed is no mistake: another host may save a step before rank 0, being killed, prints it.
        if step > self.position + 1:
            self.mistakes.append(f"resumed after step {step}, though step {self.position} was the last")
        self.resumed.append((now, step))

    @property
    def position(self):
        """The step that was taken last, or after which the training went on since."""
        return max(self.steps[-1:] + self.resumed[-1:], default=(0, 0))[1]

    @property
    def world(self):
        """How many processes train."""
        return self.worlds[-1][1] if self.worlds else 0

    # What happens to it

    def workers(self, host):
        """The processes of 06 on a host, as {rank: pid}; while it starts anew there may be none."""
        found = {}
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
        return found

    def host_of(self, rank):
        """The host on which a rank runs, if need be once it runs."""
        found = within(PATIENCE, lambda: [host for host in self.running if rank in self.workers(host)])
        if not found:
            raise DrillFailed(f"no process of rank {rank} for {PATIENCE} s")
        return found[0]

    def signal_worker(self, rank, number=signal.SIGKILL):
        """Send a rank a signal."""
        os.kill(self.workers(self.host_of(rank))[rank], number)

    def kill_torchrun(self, host):
        """Kill a host's torchrun, which then cannot end its workers."""
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(argument.endswith(b"/torchrun") for argument in arguments[:3]):
                    os.kill(pid, signal.SIGKILL)

    def kill_host(self, host):
        """Kill all that runs on a host."""
        self.hosts.kill(host)
        if host in self.running:
            self.running.pop(host).wait()

    def checkpoints(self):
        """The steps of which all hosts that train have a good checkpoint, in order."""
        names = ["checkpoints"] if self.shared else [self.hosts.names[host] for host in self.running]
        found = [
            {
                int(path.stem[5:])
                for path in (self.folder / name).glob("step-*.pt")
                if self._written(path) not in self.bad
            }
            for name in names
        ]
        return sorted(set.intersection(*found))

    def _written(self, path):
        """What tells a file from another of the same name, written when the training passed that step again."""
        with contextlib.suppress(FileNotFoundError):  # it was one too many
            return path, path.stat().st_mtime_ns

    def damage_newest_checkpoint(self):
        """Flip a bit in the middle of the newest checkpoint on each host; returns the step of the one before."""
        before, newest = self.checkpoints()[-2:]
        for path in self.folder.glob(f"*/step-{newest:08}.pt"):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
            self.bad.add(self._written(path))
        return before

    # And what it does then

    def wait_for(self, condition, what, patience=PATIENCE):
        """Wait until the condition is true.

        Raises:
            DrillFailed: it does not come true, with what was printed last; or steps were left out.
        """
        with self.news:
            if not self.news.wait_for(lambda: self.mistakes or condition(), patience):
                self.mistakes.append(f"waited {patience} s in vain for {what}")  # what comes next need not wait as long
                told = [f"{self.hosts.names[host]}: {line}" for _, host, line in self.lines if worth_telling(line)]
                raise DrillFailed("\n    ".join([f"waited {patience} s for {what}; the last lines are", *told[-30:]]))
            self.check()

    def check(self):
        """Raise DrillFailed if steps were left out, or too many taken back."""
        if self.mistakes:
            raise DrillFailed("; ".join(self.mistakes))

    def wait_for_step(self, step):
        """Wait until this step was taken."""
        self.wait_for(lambda: self.steps and self.steps[-1][1] >= step, f"step {step}")

    def wait_for_world(self, world):
        """Wait until so many processes train, and have taken a step."""
        self.wait_for(
            lambda: self.world == world and self.steps and self.steps[-1] > self.worlds[-1],
            f"a step of {world} processes",
        )

    def wait_for_checkpoint(self):
        """Wait until all hosts have a new checkpoint."""
        begin = self.position
        if not within(PATIENCE, lambda: self.checkpoints()[-1:] > [begin]):
            raise DrillFailed(f"no checkpoint later than of step {begin}, after {PATIENCE} s")

    def recover(self, fault, world=None, resumes=True):
        """Let something happen, and wait until the training goes on.

        Args:
            fault: a function, called once.
            world: int, how many processes it shall go on with; None: any number.
            resumes: bool, whether the processes start anew; else they only wait.

        Returns:
            Recovery.

        Raises:
            DrillFailed: it does not go on, or leaves out steps, or goes on from an old checkpoint.
        """
        self.safe = max(self.checkpoints(), default=0)
        before, resumed, begin = self.world, len(self.resumed), time.monotonic()
        fault()
        begin = begin if resumes else time.monotonic()

        def goes_on():
            since = self.resumed[-1][0] if resumes and len(self.resumed) > resumed else begin
            right = world is None or self.world == world
            return right and (len(self.resumed) > resumed or not resumes) and self.steps[-1][0] > since

        self.wait_for(goes_on, f"the training to go on{f' with {world} processes' if world else ''}")
        with self.news:
            new = self.resumed[resumed:]
            first = next(now for now, _ in self.steps if now > (new[0][0] if new else begin))
            last = max((step for now, step in self.steps if now < new[0][0]), default=0) if new else 0
            lost = max(0, last - min(step for _, step in new)) if new else 0
            recovery = Recovery(lost, first - begin, before, self.world)
            if (oldest := min((step for _, step in new), default=self.safe)) < self.safe:
                self.mistakes.append(f"went on after step {oldest}, though all had a checkpoint of step {self.safe}")
            self.check()
        return recovery

    def stop(self):
        """End the training as its user would, by a signal to each supervising loop; returns their exit codes."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return [process.wait(PATIENCE) for process in self.running.values()]


def worth_telling(line):
    """Whether a line may say what went wrong: not a step's, nor one of a C++ stack."""
    return "== step:" not in line and not line.startswith(("frame #", "[W"))


def within(seconds, condition):
    """Ask until the answer is true, and return it, or the last one."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return answer


@contextlib.contextmanager
def drilled(**options):
    """A Job on new hosts, with a store, before it has started."""
    with tempfile.TemporaryDirectory() as folder, hosts_module.Hosts(TRAINERS + 1) as hosts:
        job = Job(hosts, folder, **options)
        job.start_store()
        yield job


def ready(job):
    """Bring all hosts in, and wait until there is a new checkpoint to go back to."""
    job.start(*(host for host in range(TRAINERS) if host not in job.running))
    job.wait_for_world(TRAINERS)
    job.wait_for_checkpoint()


# The drills. Each takes a Job that is ready, and returns a Recovery.


def drill_worker(job):
    """a process is killed"""
    return job.recover(lambda: job.signal_worker(random.randrange(TRAINERS)), TRAINERS)


def drill_hang(job):
    """a process stands still, and is there all the same"""
    return job.recover(lambda: job.signal_worker(1, signal.SIGSTOP), TRAINERS)


def drill_torchrun(job):
    """a torchrun is killed: none of its processes stays, and the host comes back"""
    host = job.host_of(1)
    orphans = job.workers(host).values()

    def fault():
        job.kill_torchrun(host)
        if not within(1, lambda: not set(orphans) & set(job.hosts.pids(host))):
            job.mistakes.append("a process of the killed torchrun ran on for a second")

    return job.recover(fault, TRAINERS)


def drill_blink(job):
    """a host's link is gone for 5 s: all wait for it, none starts anew"""
    host = random.randrange(TRAINERS)

    def fault():
        job.hosts.cut(host)
        time.sleep(5)
        job.hosts.mend(host)

    return job.recover(fault, TRAINERS, resumes=False)


def drill_cut(job):
    """a host's link is gone: the others go on"""
    host = job.host_of(0)
    recovery = job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    job.hosts.mend(host)
    return recovery


def drill_mend(job):
    """a host's link is back after the others went on without it: it comes back too"""
    host = job.host_of(2)
    job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    return job.recover(lambda: job.hosts.mend(host), TRAINERS)


def drill_host(job):
    """the host of rank 0 dies"""
    return job.recover(lambda: job.kill_host(job.host_of(0)), TRAINERS - 1)


def drill_join(job):
    """a host comes to a training that runs"""
    host = job.host_of(1)
    job.recover(lambda: job.kill_host(host), TRAINERS - 1)
    recovery = job.recover(lambda: job.start(host), TRAINERS)
    if recovery.steps_lost:
        raise DrillFailed(f"{recovery.steps_lost} steps lost, though nothing had failed")
    return recovery


def drill_store(job):
    """the host of the store dies, and the store is started again"""

    def fault():
        job.kill_host(STORE)
        job.start_store()

    return job.recover(fault, TRAINERS)


def drill_damage(job):
    """the newest checkpoint is damaged, and then a process killed: it goes on from the one before"""
    job.wait_for_checkpoint()

    def fault():
        job.safe = job.damage_newest_checkpoint()
        job.signal_worker(1)

    recovery = job.recover(fault, TRAINERS)
    if job.resumed[-1][1] != job.safe:
        raise DrillFailed(f"went on after step {job.resumed[-1][1]}, expected {job.safe}")
    return recovery


def drill_kills(job, count):
    """20 processes, or as many as --kills says, are killed at random, one in four before the training has gone on"""
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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("drills", nargs="*", metavar="DRILL", help="which; none: all")
    add("--list", action="store_true", help="say what they are")
    add("--every", type=whole_number(1), default=20, metavar="N", help="steps between checkpoints (default: 20)")
    add("--kills", type=whole_number(1), default=20, metavar="N", help="processes to kill in `kills` (default: 20)")
    add("--shared", action="store_true", help="one folder of checkpoints for all hosts")
    add("--log-file", metavar="FILE", help="append one JSON line a drill to FILE")
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
        raise UserError(f"{missing}: expected root on Linux with iproute2; sudo .venv/bin/python tools/lab/drill.py")
    env = environment(torch.device("cpu"))
    print(f"{env['device_name']}, {env['cores']} cores | torch {env['torch']} | a checkpoint every {args.every} steps")
    print(f"{'drill':10} {'steps lost':>10} {'seconds':>8} {'processes':>10}")
    random.seed(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the hosts' end, which leaves nothing behind
    failures = 0
    with contextlib.ExitStack() as stack:
        job = None
        for name in args.drills or DRILLS:
            begin, load = time.monotonic(), os.getloadavg()[0]  # what else runs here makes everything take longer
            try:
                job = job or stack.enter_context(drilled(every=args.every, shared=args.shared))
                ready(job)
                job.wait_for_step(job.position + random.randrange(job.every))
                recovery = DRILLS[name](job, args.kills) if name == "kills" else DRILLS[name](job)
                outcome = dataclasses.asdict(recovery) | {"failed": None}
                processes = f"{recovery.before} -> {recovery.after}"
                line = f"{recovery.steps_lost:10} {recovery.seconds:8.1f} {processes:>10}   went on by itself"
            except DrillFailed as error:
                failures += 1
                outcome = {"failed": str(error)}
                line = f"{'failed':>10}   {error}"
                job = None  # the next drill gets new hosts
                stack.close()
            print(f"{name:10} {line}", flush=True)
            write(args, name, outcome | {"drill_seconds": time.monotonic() - begin, "load": load} | env)
        if job:
            job.stop()
    return 1 if failures else 0


def write(args, drill, measured):
    """Append one line to --log-file."""
    if not args.log_file:
        return
    os.makedirs(os.path.dirname(args.log_file) or ".", exist_ok=True)
    record = {"command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]), "drill": drill}
    record |= {"checkpoint_every": args.every, "shared": args.shared, "timeout": TIMEOUT}
    record |= {"kills": args.kills} if drill == "kills" else {}
    with open(args.log_file, "a") as file:
        file.write(json.dumps(record | measured) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(parse_args()))
