"""06 on three hosts of which something fails, and its launch files without Slurm."""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from needs import need
from processes import ROOT, finished

from tools.lab import hosts as lab_hosts

TEN_STEPS = ["--dummy", "200", "--image-size", "16", "--arch", "mnist_net", "--batch-size", "20"]
TEN_STEPS += ["--epochs", "1", "--eval-every", "0", "--print-every", "1"]
PORT = 29400
TRAINERS = 3  # hosts 0 to 2 train
STORE = 3  # host 3 runs the store
PATIENCE = 180  # seconds to wait for any event, on a machine that may be busy
# A training step takes a tenth of a second on two cores. There are more than a test needs.
TRAINING = (
    "--dummy 1200 --image-size 16 --arch mnist_net --batch-size 24 --epochs 1000 "
    "--eval-every 0 --print-every 1 --timeout 15 --checkpoint-every 20"
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


class JobFailed(Exception):
    """The training did not do what was expected. The message says what it did instead."""


class Event(NamedTuple):
    """A number that the training has printed."""

    time: float  # of time.monotonic()
    number: int


class Job:
    """A training of 06 on three hosts; launch/06_elastic.sh starts one process on each.

    launch/store.py runs on a fourth host.

    Args:
        folder: Path, for checkpoints; every host has its own in it.
    """

    def __init__(self, hosts, folder):
        self.hosts = hosts
        self.folder = folder
        self.flags = TRAINING.split()
        self.settings = SETTINGS | {"STORE": f"{hosts.addresses[STORE]}:{PORT}", "JOB": "elastic"}
        self.running = {}  # host: Popen of launch/06_elastic.sh
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
            disk = self.folder / self.hosts.names[host]
            disk.mkdir(exist_ok=True)
            mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
            self.running[host] = self._popen(host, "sh", "-c", mount, disk, path, *command)

    def start_all(self):
        """Start training on all hosts, and wait for a checkpoint."""
        self.start(*range(TRAINERS))
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

    def kill_worker(self, rank):
        os.kill(self.workers(self.host_of(rank))[rank], signal.SIGKILL)

    def kill_host(self, host):
        """Kill all processes of a host."""
        self.hosts.kill(host)
        if host in self.running:
            self.running.pop(host).wait()

    def checkpoints(self):
        """Return the steps, in order, whose checkpoint is on all hosts that train."""
        names = [self.hosts.names[host] for host in self.running]
        steps = [set(map(step_of, (self.folder / name).glob("step-*.pt"))) for name in names]
        return sorted(set.intersection(*steps))

    # Recovery

    def wait_for(self, condition, what):
        """Wait until condition() is true, and return its value.

        Raises:
            JobFailed: timeout (the message holds the last lines of output), or a mistake.
        """
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()) or self.mistakes:
            if self.mistakes:
                raise JobFailed("; ".join(self.mistakes))
            if time.monotonic() > deadline:
                # neither step lines nor parts of a C++ stack explain a failure
                last = [line for line in self.lines if not re.search(r"== step:|: frame #", line)]
                message = f"timeout: waited {PATIENCE} s for {what}; last lines:"
                raise JobFailed("\n    ".join([message, *last[-30:]]))
            time.sleep(0.02)
        return value

    def wait_for_world(self, world):
        """Wait until this number of processes has completed a training step."""

        def trains():
            return self.world == world and self.steps and self.steps[-1] > self.worlds[-1]

        self.wait_for(trains, f"a training step with {world} processes")

    def wait_for_checkpoint(self):
        """Wait until all hosts have a new checkpoint."""
        begin = self.position
        self.wait_for(lambda: self.checkpoints()[-1:] > [begin], f"a checkpoint after step {begin}")

    def recover(self, fault, world):
        """Cause a fault, wait until the training continues, and return how many steps it repeats.

        Args:
            world: int, the number of processes to expect after the fault.

        Raises:
            JobFailed: the training does not continue, skips steps, or resumes from a checkpoint
                that is older than the newest on all disks.
        """
        safe = max(self.checkpoints(), default=0)
        resumed_before = len(self.resumed)
        fault()

        def has_recovered():
            since = self.resumed[resumed_before:][-1:]
            return self.world == world and since and self.steps[-1].time > since[0].time

        self.wait_for(has_recovered, f"the training to continue with {world} processes")
        restarts = self.resumed[resumed_before:]
        oldest = min(event.number for event in restarts)
        if oldest < safe:
            raise JobFailed(
                f"resumed after step {oldest}, although all hosts had a checkpoint of {safe}"
            )
        last = max(event.number for event in self.steps if event.time < restarts[0].time)
        return max(0, last - oldest)


def step_of(path):
    return int(path.stem[len("step-") :])


@contextlib.contextmanager
def new_job():
    """Yield a Job on new hosts, with a store. The training has not started."""
    with tempfile.TemporaryDirectory() as folder, lab_hosts.Hosts(TRAINERS + 1) as hosts:
        job = Job(hosts, Path(folder))
        job.start_store()
        yield job


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_training_survives_a_lost_process_host_and_store():
    """It resumes from the newest checkpoint, and loses no step when a host joins."""
    need(lab_hosts.missing())
    with new_job() as job:

        def restart_the_store():
            job.kill_host(STORE)
            job.start_store()

        job.start_all()
        assert job.recover(lambda: job.kill_worker(1), 3) <= 40
        job.wait_for_checkpoint()
        host = job.host_of(0)
        assert job.recover(lambda: job.kill_host(host), 2) <= 40
        assert job.recover(lambda: job.start(host), 3) == 0
        job.wait_for_checkpoint()
        job.recover(restart_the_store, 3)
        assert not job.mistakes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stopped_training_goes_on_by_the_same_commands():
    need(lab_hosts.missing())
    with new_job() as job:
        job.start_all()
        for process in job.running.values():
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in job.running.values()]
        assert codes == [128 + signal.SIGTERM] * 3
        stopped = job.position
        assert f"stopped by a signal after step {stopped}: saved" in "".join(job.lines)
        job.flags += ["--epochs", math.ceil((stopped + 1) / 50)]
        job.start(0, 1, 2)
        assert [process.wait(PATIENCE) for process in job.running.values()] == [0, 0, 0]
        assert job.resumed[-1].number == stopped and job.position % 50 == 0
        assert not job.mistakes
        job.start(0)
        assert job.running[0].wait(PATIENCE) == 1
        said = "06_elastic.sh: job elastic is closed: it has finished, or one machine has"
        job.wait_for(lambda: said in "".join(job.lines), "the reason why it does not start")


# Without a store


def with_variables(**variables):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


@pytest.mark.slow
def test_on_one_machine_a_training_goes_on_by_the_same_command(tmp_path):
    given = [ROOT / "launch/06_one_node.sh", *TEN_STEPS, "--checkpoints-path", tmp_path / "saved"]
    for processes, line in (("2", "== step: [  10/10] [1/1]"), ("1", "after step 10 of 10")):
        env = with_variables(PROCESSES=processes)
        options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
        end = subprocess.run(given, timeout=300, **options)
        assert end.returncode == 0, end.stderr
        assert f"world size {processes}" in end.stdout and line in end.stdout
        assert "done: not evaluated after 1 epochs" in end.stdout


@pytest.mark.slow
def test_on_two_machines_each_is_told_its_number(hosts, tmp_path):
    env = with_variables(MASTER=hosts.addresses[0], PROCESSES="1", INTERFACE="eth0")
    given = [*TEN_STEPS, "--checkpoints-path", tmp_path]
    second, first = (
        hosts.popen(k, ROOT / "launch/06_static.sh", k, *given, env=env) for k in (1, 0)
    )
    for process in (first, second):
        code, out, err = finished(process)
        assert code == 0, err
        assert ("world size 2 (1 on this machine)" in out) == (process is first)
    assert (tmp_path / "step-00000010.pt").exists()


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_a_launch_file_names_a_wrong_machine_number_and_a_taken_port():
    for given in ([], ["2"], ["--epochs"]):
        end = run(ROOT / "launch/06_static.sh", *given)
        found = f"06_static.sh: error: machine number '{''.join(given)}': expected 0 to 1 as the"
        assert end.returncode == 2 and end.stderr.startswith(found)
        assert len(end.stderr.splitlines()) == 1
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        end = run(sys.executable, ROOT / "launch/store.py", "--port", str(port))
    assert (end.returncode, end.stdout) == (1, "") and len(end.stderr.splitlines()) == 1
    assert end.stderr.startswith(
        f"store.py: error: port {port}: Address already in use; stop the process that uses it"
    )


def test_a_torchrun_is_started_again_a_limited_number_of_times(tmp_path):
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\necho started\nexit 3\n")
    fake.chmod(0o755)
    env = with_variables(TRIES="2", PAUSE="0") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    end = run(ROOT / "launch/06_elastic.sh", env=env)
    assert (end.returncode, end.stdout) == (3, "started\n" * 3)
    again = "06_elastic.sh: torchrun exited with code 3; restarting in 0 s, {} more tries"
    up = "06_elastic.sh: error: torchrun exited with code 3; giving up after 2 restarts"
    assert end.stderr.splitlines() == [again.format(1), again.format(0), up]
