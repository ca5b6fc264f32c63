"""Simulate several hosts on this machine, to test launches over a network.

Each host is a network namespace with its own address. A bridge in another namespace connects the
hosts, so the machine's own network does not change. A process on a host sees the host's name as
hostname, and all hosts in /etc/hosts.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["ip", "nsenter", "unshare"]

# Runs in the namespaces of a host: sets its name and its hosts file, then starts the command. A
# shell makes its background jobs ignore Ctrl-C, and their children inherit this;
# --default-signal=INT undoes it.
BECOME_HOST = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec env --default-signal=INT "$@"'
)


def missing():
    """Return why hosts cannot run on this machine, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 util-linux)"
    enter = ["unshare", "--net", "--uts", "--mount", "true"]
    if subprocess.run(enter, capture_output=True).returncode != 0:
        return "this machine does not allow namespaces (unshare --net --uts --mount)"
    return None


def ip(arguments):
    """Run ip with these arguments, separated by spaces, and return its output."""
    command = ["ip", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"ip {arguments}: {done.stderr.strip()}")
    return done.stdout


def other_threads(pid):
    """Return the IDs of the threads of a process that still run, besides the first."""
    try:
        return set(os.listdir(f"/proc/{pid}/task")) - {str(pid)}
    except (FileNotFoundError, ProcessLookupError):
        return set()


class Hosts:
    """Hosts that exist during a `with` block: host1 at 10.77.0.1, host2 at 10.77.0.2 and so on."""

    counter = itertools.count()

    def __init__(self, count=2):
        # several networks of hosts can exist at the same time
        suffix = f"{os.getpid()}-{next(self.counter)}"
        self.names = [f"host{i}" for i in range(1, count + 1)]
        self.addresses = [f"10.77.0.{i}" for i in range(1, count + 1)]
        self.namespaces = [f"{name}-{suffix}" for name in self.names]
        self.switch = f"switch-{suffix}"
        self.folder = None

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        self._stop()

    def _start(self):
        self.folder = tempfile.TemporaryDirectory()
        switch = self.switch
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        lines = ["127.0.0.1 localhost"]
        for name, address, host in zip(self.names, self.addresses, self.namespaces, strict=True):
            lines.append(f"{address} {name}")
            ip(f"netns add {host}")
            # Create both ends in their namespaces, so that the machine itself gets no new
            # interface.
            ip(f"-n {host} link add eth0 type veth peer name {name} netns {switch}")
            ip(f"-n {switch} link set {name} master bridge up")
            ip(f"-n {host} address add {address}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {host} link set lo up")
        Path(self.folder.name, "hosts").write_text("\n".join(lines) + "\n")

    def _stop(self):
        existing = ip("netns list").split()
        for i, namespace in enumerate(self.namespaces):
            if namespace in existing:
                self.kill(i)
        for namespace in [*self.namespaces, self.switch]:
            if namespace in existing:
                ip(f"netns delete {namespace}")
        if self.folder:
            self.folder.cleanup()

    def pids(self, host):
        """Return the process IDs of a host."""
        return [int(pid) for pid in ip(f"netns pids {self.namespaces[host]}").split()]

    def kill(self, host):
        """Kill all processes of a host.

        Its network stays up and resets their connections, as after a crash.
        """
        deadline = time.monotonic() + 10
        killed = set()
        # A process leaves the namespace when its first thread ends; another may still hold its
        # ports.
        while (
            (pids := self.pids(host)) or any(map(other_threads, killed))
        ) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(pids)
            time.sleep(0.05)

    def cut(self, host):
        """Take a host's link down at the switch: packets are lost without an error, as when a cable
        is pulled.
        """
        ip(f"-n {self.switch} link set {self.names[host]} down")

    def popen(self, host, *command, variables=None, **options):
        """Start a command on a host in a new session, with pipes for its output by default.

        `python` and `torchrun` belong to the Python environment that runs this code.

        Args:
            host: number of the host.
            command: program and arguments.
            variables: dict of additional environment variables.
            options: more options of subprocess.Popen, which replace the defaults.
        """
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        more = {name: str(value) for name, value in (variables or {}).items()}
        defaults = {"cwd": ROOT, "env": os.environ | {"PATH": path} | more}
        defaults |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        defaults |= {"start_new_session": True}
        namespace = f"/run/netns/{self.namespaces[host]}"
        enter = ["nsenter", f"--net={namespace}", "unshare", "--uts", "--mount"]
        become = ["sh", "-c", BECOME_HOST, "sh", self.names[host], f"{self.folder.name}/hosts"]
        return subprocess.Popen([*enter, *become, *map(str, command)], **(defaults | options))
