"""A real Slurm cluster of several nodes on this one machine, to try launch files and to test them.

    sudo .venv/bin/python tools/lab/slurm_cluster.py srun --nodes=2 hostname    a command on it
    sudo .venv/bin/python tools/lab/slurm_cluster.py bash                       a shell in which srun and sbatch work

Each node is a slurmd in namespaces of its own for the host name and the mounts, so that its jobs see the node's name
from `hostname` and every node's address in /etc/hosts, while the machine's own name and file stay as they are. The
nodes claim more CPUs than there are, and nothing binds a task to a CPU. Times are set for a machine that is busy:
a node counts as lost after two minutes only.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue", "unshare"]
ENDED = ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"]

CONFIG = """\
ClusterName=tests
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=64000 State=UNKNOWN\n"

# A cgroup would kill what a task or a batch script leaves. Without one, Slurm loses sight of a process whose parent was
# killed before it, and waits for a minute if that process holds the task's output. So these two run at the end of each
# task and, on each of its nodes, of each job. A step's port is its own on this machine; a batch script has none.
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

# In the namespaces of a node. Without a core file: one of a process that has loaded torch takes 850 MB.
BECOME_NODE = 'ulimit -c 0; hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'


def missing():
    """Why a cluster cannot run here, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    if absent := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode != 0:
        return "this machine permits no namespaces (unshare --uts --mount)"
    return None


def free_ports(count):
    """The first of so many free ports in a row, below those that the kernel hands out itself."""
    for _ in range(100):
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise RuntimeError(f"found no {count} free ports in a row between 10000 and 30000")


def wait_until(happened, seconds):
    """Poll until it has happened; returns whether it has."""
    deadline = time.monotonic() + seconds
    while not (done := happened()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(done)


class SlurmCluster:
    """A cluster that lives as long as its `with` block, with its files in a folder.

    The folder's path must be short, since sockets lie in it: 80 characters are fine.
    """

    def __init__(self, folder, nodes=("n01", "n02", "n03", "gpu-a01"), cpus=4):
        self.folder, self.nodes, self.cpus = Path(folder).resolve(), tuple(nodes), cpus
        self.conf = str(self.folder / "slurm.conf")
        self.daemons = {}  # by name
        self.namespaces = set()  # of the nodes' host names: whatever runs on a node is in one of them
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        path = os.pathsep.join([os.path.dirname(sys.executable), ours.get("PATH", os.defpath)])
        self.env = ours | {"SLURM_CONF": self.conf, "PATH": path}

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
        config = CONFIG.format(folder=self.folder, hostname=socket.gethostname().split(".")[0], port=port)
        hosts = Path("/etc/hosts").read_text().rstrip("\n") + "\n"
        for i, name in enumerate(self.nodes, start=1):
            config += NODE.format(name=name, address=f"127.0.1.{i}", port=port + i, cpus=self.cpus)
            hosts += f"127.0.1.{i} {name}\n"
        Path(self.conf).write_text(config)
        (self.folder / "hosts").write_text(hosts)
        # Slurm asks for the kind of cgroups even if it uses none, and ends where it cannot tell.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name, script in {"task_epilog": TASK_EPILOG, "epilog": EPILOG}.items():
            (self.folder / name).write_text(script)
            (self.folder / name).chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start(self):
        deadline = time.monotonic() + 30
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        self._start_daemon("munged", "munged", "--foreground", "--force", *options)  # whatever the folder's mode is
        self._wait_until(lambda: (self.folder / "munge.socket").is_socket(), deadline)
        self._start_daemon("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            node = ["sh", "-c", BECOME_NODE, "sh", name, str(self.folder / "hosts")]
            self._start_daemon(name, "unshare", "--uts", "--mount", *node)
        self._wait_until(lambda: self._states() == ["idle"] * len(self.nodes), deadline)
        self.namespaces = {os.readlink(f"/proc/{self.daemons[name].pid}/ns/uts") for name in self.nodes}

    def _start_daemon(self, name, *command):
        """Start it in the foreground, so that its process is our child, but out of reach of a terminal's Ctrl-C."""
        with open(self.folder / "logs" / name, "w") as log:
            options = {"cwd": self.folder, "env": self.env, "start_new_session": True, "stdin": subprocess.DEVNULL}
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, **options)

    def _states(self):
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a slurmctld that is not there
            shown = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T", timeout=5)
            return shown.stdout.split()
        return []

    def _wait_until(self, happened, deadline):
        def ended():
            return [name for name, daemon in self.daemons.items() if daemon.poll() is not None]

        if not wait_until(lambda: ended() or happened(), deadline - time.monotonic()) or ended():
            reason = f"{', '.join(ended())} ended" if ended() else "not all nodes were idle after 30 s"
            raise RuntimeError(f"the Slurm cluster did not start: {reason}\n{self.logs()}")

    def logs(self, lines=15):
        """The end of each daemon's log, for an error message."""
        tails = [(log.name, log.read_text().splitlines()[-lines:]) for log in sorted(self.folder.glob("logs/*"))]
        return "\n".join("\n".join([f"--- {name}", *tail]) for name, tail in tails)

    def _stop(self):
        if self.namespaces:  # it had started
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
        wait_until(self._kill_the_rest, 10)

    def _kill_the_rest(self):
        """Kill what the daemons have left: slurmstepd ignores SIGTERM, lives on, and overwrites its environment."""
        left = [pid for pid, namespace, env in self._processes() if namespace in self.namespaces or self._is_ours(env)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    # Its processes

    def _is_ours(self, env):
        return env.get("SLURM_CONF") == self.conf

    @staticmethod
    def _processes():
        """The machine's living processes: pid, namespace of the host name, environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                yield process.pid, os.readlink(f"/proc/{process.pid}/ns/uts"), process.environ()

    def processes(self):
        """The pids of the living processes of jobs."""
        return [pid for pid, _, env in self._processes() if self._is_ours(env) and "SLURM_JOB_ID" in env]

    def tasks(self):
        """The living processes that srun has started, and theirs, as psutil.Process."""
        ours = [(pid, env) for pid, _, env in self._processes() if self._is_ours(env)]
        return [psutil.Process(pid) for pid, env in ours if "SLURM_STEP_ID" in env]

    # Commands

    def run(self, *command, timeout=120, cwd=ROOT, env_extra=None):
        """Run a command such as srun or scontrol to its end."""
        env = self.env | (env_extra or {})
        command = list(map(str, command))
        return subprocess.run(command, timeout=timeout, cwd=cwd, env=env, capture_output=True, text=True)

    def popen(self, *command, cwd=ROOT, env_extra=None, **options):
        """Start a command in a session of its own, with pipes for its output unless the options say otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        env = self.env | (env_extra or {})
        return subprocess.Popen(list(map(str, command)), cwd=cwd, env=env, start_new_session=True, **options)

    def sbatch(self, script, *args, options=()):
        """Submit a script, and return the job's number. Its output goes to the cluster's folder: see output()."""
        given = [f"--output={self.folder}/job-%j.out", *options, script, *args]
        submitted = self.run("sbatch", "--parsable", *given)
        if submitted.returncode != 0:
            raise RuntimeError(f"sbatch ended with {submitted.returncode}: {submitted.stderr.strip()}")
        return int(submitted.stdout)

    def show(self, job):
        """What Slurm knows of a job, for as long as the cluster lives: {"JobState": "RUNNING", ...}."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        if shown.returncode != 0:
            raise RuntimeError(f"no job {job}: {shown.stderr.strip()}")
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    def output(self, job):
        """What a batch job has written so far."""
        file = Path(self.show(job)["StdOut"])
        return file.read_text() if file.exists() else ""

    def wait(self, job, timeout=120):
        """Wait for a job's end; returns its state and its exit code, which is -15 for one that signal 15 ended."""
        if not wait_until(lambda: self.show(job)["JobState"] in ENDED, timeout):
            shown = self.run("scontrol", "show", "job", job).stdout
            raise TimeoutError(f"job {job} has not ended after {timeout} s:\n{shown}\n{self.output(job)}")
        shown = self.show(job)
        code, by_signal = map(int, shown["ExitCode"].split(":"))
        return shown["JobState"], -by_signal if by_signal else code

    def restart(self, job, timeout=120):
        """Start a job as soon as it has been requeued; Slurm would let it wait until its credentials have expired."""
        wait_until(lambda: self.show(job)["JobState"] in ["PENDING", *ENDED], timeout)
        if (state := self.show(job)["JobState"]) != "PENDING":
            raise RuntimeError(f"job {job} is {state} after {timeout} s or less, not requeued:\n{self.output(job)}")
        # Nodes refuse credentials that are as old, in whole seconds, as those that they have revoked, or older.
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2seconds")

    def cancel(self, job):
        """Ask for a job's end, which wait() waits for."""
        self.run("scancel", job)

    def clear(self, timeout=60):
        """Cancel every job and wait until all have ended, so that a test leaves the next one an empty cluster."""

        def empty():  # a job may still be on its way here, so cancel again and again
            self.run("scancel", "--user=root", timeout=timeout)
            return not self.run("squeue", "--noheader", timeout=timeout).stdout

        if not wait_until(empty, timeout):
            raise TimeoutError(f"jobs were left {timeout} s after scancel:\n{self.run('squeue').stdout}")


def main():
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if reason := missing():
        sys.exit(f"slurm_cluster.py: error: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(folder) as cluster:
        try:
            sys.exit(subprocess.run(sys.argv[1:], env=cluster.env, cwd=ROOT).returncode)
        except FileNotFoundError:
            sys.exit(f"slurm_cluster.py: error: no command {sys.argv[1]!r}: expected one such as srun, sbatch or bash")
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
