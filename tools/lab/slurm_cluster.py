"""Run a real Slurm cluster of several nodes on this machine, to try and test launch files.

    # run a command on the cluster
    sudo .venv/bin/python tools/lab/slurm_cluster.py srun --nodes=2 hostname
    # open a shell with srun and sbatch
    sudo .venv/bin/python tools/lab/slurm_cluster.py bash

Each node is a slurmd with its own namespaces for the host name and the mounts. Its jobs see the
node's name from `hostname` and all nodes in /etc/hosts, while the machine's own name and file do
not change. The nodes claim more CPUs than the machine has, and tasks are not bound to CPUs.
Timeouts are long enough for a busy machine: a node counts as lost after two minutes.
"""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import psutil
except ImportError:
    sys.exit("slurm_cluster.py: error: psutil is not installed: pip install psutil")

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["slurmctld", "slurmd", "munged", "unshare"]
COMMANDS += ["sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"]
ENDED = ["COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE"]
ENDED += ["FAILED", "BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY"]

CONFIG = """\
ClusterName=tests
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={job}
SlurmUser=root
SlurmdUser=root
TaskEpilog={folder}/task_epilog
Epilog={folder}/epilog
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
ReturnToService=2
MinJobAge=1000000
KillWait=30
InactiveLimit=0
MessageTimeout=30
TCPTimeout=10
BatchStartTimeout=60
SlurmdTimeout=120
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs=4 RealMemory=64000 "
    "Gres=gpu:4 State=UNKNOWN\n"
)

# A cgroup would kill the processes that a task or a batch script leaves behind. Without cgroups,
# Slurm loses a process whose parent was killed first, and waits for a minute if that process holds
# the task's output open. So TASK_EPILOG kills them at the end of each task, and EPILOG at the end
# of each job, on each of its nodes. The launcher port identifies a Slurm step on this machine; a
# batch script has no such port.
TASK_EPILOG = """\
#!/bin/sh
[ "$SLURM_STEP_LAUNCHER_PORT" ] || exit 0
step=$(grep -lsxz "SLURM_STEP_LAUNCHER_PORT=$SLURM_STEP_LAUNCHER_PORT" /proc/[0-9]*/environ)
for pid in $(grep -lsxz "SLURM_PROCID=$SLURM_PROCID" $step | cut -d/ -f3); do
    [ $pid = $$ ] || kill -9 $pid
done
exit 0
"""
EPILOG = """\
#!/bin/sh
for pid in $(grep -lsxz "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ | cut -d/ -f3); do
    if [ $pid != $$ ] && [ /proc/$pid/ns/uts -ef /proc/$$/ns/uts ]; then kill -9 $pid; fi
done
exit 0
"""

# Runs in the namespaces of a node. No core files: a core file of a process with torch takes 850 MB.
BECOME_NODE = 'ulimit -c 0; hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'


def missing():
    """Return why a cluster cannot run on this machine, or None if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    if absent := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode != 0:
        return "this machine does not allow namespaces (unshare --uts --mount)"
    return None


def free_ports(count):
    """Return the first of `count` consecutive free ports, below the range from which the kernel
    assigns ports.
    """
    for _ in range(100):
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise RuntimeError(f"found no {count} consecutive free ports between 10000 and 30000")


def wait_until(condition, seconds):
    """Poll until condition() is true or the time is over. Return whether it is true."""
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(done)


class SlurmCluster:
    """A cluster that exists during a `with` block, with its files in a folder.

    The folder's path must be short, because it contains sockets: at most 80 characters.
    """

    nodes = ("n01", "n02", "n03", "gpu-a01")
    config = CONFIG
    # Slurm detects the cgroup version even if it uses no cgroups, and exits if it cannot. So
    # set it.
    cgroup = "CgroupPlugin=cgroup/v1\n"

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        self.conf = str(self.folder / "slurm.conf")
        self.daemons = {}  # name: Popen
        # UTS namespaces of the nodes, to find the processes that run on them
        self.namespaces = set()
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        path = os.pathsep.join([os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)])
        self.env = inherited | {"SLURM_CONF": self.conf, "PATH": path}

    # Start and stop

    def __enter__(self):
        try:
            self._write_config()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        self._stop()

    def _write_config(self):
        for name in ["state", "logs", *(f"spool/{node}" for node in self.nodes)]:
            (self.folder / name).mkdir(parents=True)
        port = free_ports(1 + len(self.nodes))
        # Jobs of one id, of two clusters on this machine, would listen at the same port.
        job = random.randrange(1, 10**6)
        config = self.config.format(
            folder=self.folder, hostname=socket.gethostname().split(".")[0], port=port, job=job
        )
        hosts = Path("/etc/hosts").read_text().rstrip("\n") + "\n"
        for i, name in enumerate(self.nodes, start=1):
            config += NODE.format(name=name, address=f"127.0.1.{i}", port=port + i)
            hosts += f"127.0.1.{i} {name}\n"
        Path(self.conf).write_text(config)
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "cgroup.conf").write_text(self.cgroup)
        # Four GPUs per node, which Slurm gives to jobs, although the machine may have none:
        # /dev/null stands for each.
        for k in range(4):
            (self.folder / f"nvidia{k}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/nvidia[0-3]\n")
        for name, script in {"task_epilog": TASK_EPILOG, "epilog": EPILOG}.items():
            (self.folder / name).write_text(script)
            (self.folder / name).chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start(self):
        deadline = time.monotonic() + 30
        kinds = ("key", "pid", "log", "seed")
        options = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in kinds]
        options += [f"--socket={self.folder}/munge.socket"]
        options += ["--foreground", "--force"]  # accept any mode of the folder
        self._start_daemon("munged", "munged", *options)
        self._wait_until(lambda: (self.folder / "munge.socket").is_socket(), deadline)
        self._start_daemon("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            node = ["sh", "-c", BECOME_NODE, "sh", name, str(self.folder / "hosts")]
            self._start_daemon(name, "unshare", "--uts", "--mount", *node)
        self._wait_until(self._is_idle, deadline)
        self.namespaces = {
            os.readlink(f"/proc/{self.daemons[name].pid}/ns/uts") for name in self.nodes
        }

    def _start_daemon(self, name, *command):
        """Start a daemon in the foreground, as our child, in a new session that a terminal's Ctrl-C
        does not reach.
        """
        with open(self.folder / "logs" / name, "w") as log:
            options = {"cwd": self.folder, "env": self.env, "start_new_session": True}
            options |= {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.daemons[name] = subprocess.Popen(command, **options)

    def _is_idle(self):
        """Return whether all nodes wait for jobs."""
        command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
        # sinfo waits if slurmctld does not answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.run(*command, timeout=5).stdout.split() == ["idle"] * len(self.nodes)
        return False

    def _wait_until(self, condition, deadline):
        def ended():
            return [name for name, daemon in self.daemons.items() if daemon.poll() is not None]

        if not wait_until(lambda: ended() or condition(), deadline - time.monotonic()) or ended():
            lines = [f"the Slurm cluster did not start; ended: {', '.join(ended()) or 'nothing'}"]
            for log in sorted(self.folder.glob("logs/*")):
                lines += [f"--- {log.name}", *log.read_text().splitlines()[-15:]]
            raise RuntimeError("\n".join(lines))

    def _stop(self):
        if self.namespaces:  # the cluster has started
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                self.clear(timeout=20)
        for names in [self.nodes, ["slurmctld"], ["munged"]]:
            daemons = [self.daemons.pop(name) for name in names if name in self.daemons]
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                try:
                    daemon.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        wait_until(self._kill_remaining, 10)

    def _kill_remaining(self):
        """Kill the processes that the daemons left behind; return whether there were none.

        slurmstepd ignores SIGTERM and overwrites its environment, so it is found by its namespace.
        """
        remaining = [process for process, _ in self._processes()]
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not remaining

    # Processes of the cluster

    def _processes(self):
        """Yield (psutil.Process, environment) of each running process of the cluster."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                namespace = os.readlink(f"/proc/{process.pid}/ns/uts")
                env = process.environ()
                if namespace in self.namespaces or env.get("SLURM_CONF") == self.conf:
                    yield process, env

    def processes(self):
        """Return the pids of the running processes of jobs."""
        return [process.pid for process, env in self._processes() if "SLURM_JOB_ID" in env]

    def tasks(self):
        """Return the running processes that srun has started, and their children."""
        return [process for process, env in self._processes() if "SLURM_STEP_ID" in env]

    # Commands

    def run(self, *command, timeout=120, cwd=ROOT):
        """Run a command such as srun or scontrol, and wait until it ends."""
        command = list(map(str, command))
        return subprocess.run(
            command, timeout=timeout, cwd=cwd, env=self.env, capture_output=True, text=True
        )

    def popen(self, *command, cwd=ROOT, **options):
        """Start a command in a new session, with pipes for its output by default."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        return subprocess.Popen(
            list(map(str, command)), cwd=cwd, env=self.env, start_new_session=True, **options
        )

    def sbatch(self, script, *args, options=()):
        """Submit a script and return the job ID. output() returns the job's output."""
        arguments = [f"--output={self.folder}/job-%j.out", *options, script, *args]
        submitted = self.run("sbatch", "--parsable", *arguments)
        if submitted.returncode != 0:
            raise RuntimeError(
                f"sbatch exited with {submitted.returncode}: {submitted.stderr.strip()}"
            )
        return int(submitted.stdout)

    def show(self, job):
        """Return Slurm's facts about a job, running or ended: {"JobState": "RUNNING", ...}."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        if shown.returncode != 0:
            raise RuntimeError(f"no job {job}: {shown.stderr.strip()}")
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    def output(self, job):
        """Return the output of a batch job up to now."""
        file = Path(self.show(job)["StdOut"])
        return file.read_text() if file.exists() else ""

    def wait(self, job, timeout=120):
        """Wait until a job ends; return its state and its exit code, for example -15 if signal 15
        ended it.
        """
        if not wait_until(lambda: self.show(job)["JobState"] in ENDED, timeout):
            shown = self.run("scontrol", "show", "job", job).stdout
            raise TimeoutError(
                f"job {job} has not ended after {timeout} s:\n{shown}\n{self.output(job)}"
            )
        shown = self.show(job)
        code, by_signal = map(int, shown["ExitCode"].split(":"))
        return shown["JobState"], -by_signal if by_signal else code

    def restart(self, job, timeout=120):
        """Start a requeued job now.

        By default, Slurm waits until the job's credentials have expired.
        """
        wait_until(lambda: self.show(job)["JobState"] in ["PENDING", *ENDED], timeout)
        if (state := self.show(job)["JobState"]) != "PENDING":
            raise RuntimeError(
                f"job {job} is {state}, expected PENDING within {timeout} s:\n{self.output(job)}"
            )
        # Nodes refuse credentials that are not newer, in whole seconds, than the credentials they
        # have revoked.
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2seconds")

    def cancel(self, job):
        """Cancel a job, without waiting for its end: see wait()."""
        self.run("scancel", job)

    def clear(self, timeout=60):
        """Cancel all jobs and wait until they have ended, so that the next test starts with an
        empty cluster.
        """

        def empty():  # a job may still be in submission, so cancel repeatedly
            self.run("scancel", "--user=root", timeout=timeout)
            return not self.run("squeue", "--noheader", timeout=timeout).stdout

        if not wait_until(empty, timeout):
            raise TimeoutError(
                f"jobs remain {timeout} s after scancel:\n{self.run('squeue').stdout}"
            )


def main():
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(f"slurm_cluster.py: error: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(folder) as cluster:
        try:
            sys.exit(subprocess.run(sys.argv[1:], env=cluster.env, cwd=ROOT).returncode)
        except FileNotFoundError:
            sys.exit(
                f"slurm_cluster.py: error: {sys.argv[1]!r} not found: "
                "expected a command such as srun or bash"
            )
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
