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
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from common.errors import UserError, one_line_errors
from common.flags import Parser, output_file, whole_number
from common.records import environment
from tools.lab import hosts as hosts_module
from tools.lab.job import STORE, TIMEOUT, TRAINERS, DrillFailed, Recovery, new_job
from tools.records import append


class Drill(NamedTuple):
    """A fault in a training, and what should happen."""

    what: str  # in --list and in the book
    run: object  # function from a Job that trains on all hosts to a Recovery


DRILLS = {}  # {name: Drill}, in the order in which they run


def drill(what):
    """Return a decorator that adds a function to DRILLS."""

    def add(run):
        DRILLS[run.__name__] = Drill(what, run)
        return run

    return add


@drill("a process is killed")
def worker(job):
    return job.recover(lambda: job.signal_worker(random.randrange(TRAINERS)), TRAINERS)


@drill("a process hangs (SIGSTOP)")
def hang(job):
    return job.recover(lambda: job.signal_worker(1, signal.SIGSTOP), TRAINERS)


@drill("a torchrun is killed: its processes end, and the host joins again")
def torchrun(job):
    host = job.host_of(1)
    orphans = set(job.workers(host).values())
    recovery = job.recover(lambda: job.kill_torchrun(host), TRAINERS)
    if orphans & set(job.hosts.pids(host)):
        raise DrillFailed("a process of the killed torchrun is still running")
    return recovery


@drill("a host's link is down for 5 s: all processes wait, none restarts")
def blink(job):
    host = random.randrange(TRAINERS)

    def fault():
        job.hosts.cut(host)
        time.sleep(5)
        job.hosts.mend(host)

    return job.recover(fault, TRAINERS, resumes=False)


@drill("a host's link is down: the other hosts continue")
def cut(job):
    host = job.host_of(0)
    recovery = job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    job.hosts.mend(host)
    return recovery


@drill("a host's link is up again after the other hosts have continued: the host joins again")
def mend(job):
    host = job.host_of(2)
    job.recover(lambda: job.hosts.cut(host), TRAINERS - 1)
    return job.recover(lambda: job.hosts.mend(host), TRAINERS)


@drill("all processes on the host of rank 0 are killed")
def host(job):
    return job.recover(lambda: job.kill_host(job.host_of(0)), TRAINERS - 1)


@drill("a host joins a running training")
def join(job):
    host = job.host_of(1)
    job.recover(lambda: job.kill_host(host), TRAINERS - 1)
    recovery = job.recover(lambda: job.start(host), TRAINERS)
    if recovery.steps_lost:
        raise DrillFailed(f"{recovery.steps_lost} steps lost, although nothing had failed")
    return recovery


@drill("the store is killed, and started again")
def store(job):
    def fault():
        job.kill_host(STORE)
        job.start_store()

    return job.recover(fault, TRAINERS)


@drill("the newest checkpoint is damaged and a process killed: the checkpoint before it is used")
def damage(job):
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


@drill(
    "20 processes (or --kills) are killed at random, one in four before the training has recovered"
)
def kills(job, count=20):
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
    most_lost = max(recovery.steps_lost for recovery in recoveries)
    seconds = statistics.median(recovery.seconds for recovery in recoveries)
    return Recovery(most_lost, seconds, TRAINERS, job.world)


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
        for name, drill in DRILLS.items():
            print(f"{name:10} {drill.what}")
        return 0
    missing = hosts_module.missing()
    if missing:
        raise UserError(
            f"{missing}: expected root on Linux with iproute2; "
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
    failures = 0
    with contextlib.ExitStack() as stack:
        job = None
        for name in args.drills or DRILLS:
            begin = time.monotonic()
            load = os.getloadavg()[0]  # other programs on this machine slow the drills down
            try:
                job = job or stack.enter_context(new_job(every=args.every, shared=args.shared))
                outcome = run_drill(name, job, args) | {"failed": None}
            except DrillFailed as error:
                failures += 1
                outcome = {"failed": str(error)}
                print(f"{name:10} {'failed':>10}   {error}", flush=True)
                job = None  # start the next drill on new hosts
                stack.close()
            record = {"drill": name, "checkpoint_every": args.every, "shared": args.shared}
            record |= {"timeout": TIMEOUT, **({"kills": args.kills} if name == "kills" else {})}
            record |= outcome | {"drill_seconds": time.monotonic() - begin, "load": load}
            append(args.log_file, record | env)
    return 1 if failures else 0


def run_drill(name, job, args):
    """Run a drill and print its outcome. Return it as a dict."""
    job.start_all()
    job.wait_for_step(job.position + random.randrange(job.every))
    options = {"count": args.kills} if name == "kills" else {}
    recovery = DRILLS[name].run(job, **options)
    processes = f"{recovery.before} -> {recovery.after}"
    print(
        f"{name:10} {recovery.steps_lost:10} {recovery.seconds:8.1f} {processes:>10}   recovered",
        flush=True,
    )
    return recovery._asdict()


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(parse_args()))
