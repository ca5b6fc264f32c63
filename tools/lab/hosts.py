"""Several hosts on this one machine, for tests and drills of launches over a network.

Each host is a network namespace with an address of its own, joined to the others by a bridge that lies in one more
namespace, so that the machine's own network stays as it is. What starts on a host sees the host's name as its own,
and every host's name in /etc/hosts.
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

# In the namespaces of a host: its name, the hosts file, and then the command. It hears Ctrl-C
# even if this process is one of a shell's background jobs, which are deaf to it and hand that on.
BECOME_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec env --default-signal=INT "$@"'


def missing():
    """Why hosts cannot run here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 util-linux)"
    if subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode != 0:
        return "this machine permits no namespaces (unshare --net --uts --mount)"
    return None


def ip(*arguments):
    """Run ip, and return what it prints."""
    done = subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Hosts that live as long as their `with` block: host1 at 10.77.0.1, host2 at 10.77.0.2 and so on."""

    counter = itertools.count()

    def __init__(self, count=2):
        own = f"{os.getpid()}-{next(self.counter)}"  # there may be several networks of hosts at a time
        self.names = [f"host{i}" for i in range(1, count + 1)]
        self.addresses = [f"10.77.0.{i}" for i in range(1, count + 1)]
        self.namespaces = [f"{name}-{own}" for name in self.names]
        self.switch = f"switch-{own}"
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
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names, strict=True))]
        Path(self.folder.name, "hosts").write_text("\n".join(lines) + "\n")
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for name, address, namespace in zip(self.names, self.addresses, self.namespaces, strict=True):
            ip("netns", "add", namespace)
            # Both ends are made in their namespaces: no interface of the machine itself is made or renamed.
            ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", self.switch)
            ip("-n", self.switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _stop(self):
        there = ip("netns", "list").split()
        for i, namespace in enumerate(self.namespaces):
            if namespace in there:
                self.kill(i)
        for namespace in [*self.namespaces, self.switch]:
            if namespace in there:
                ip("netns", "delete", namespace)
        if self.folder:
            self.folder.cleanup()

    def pids(self, host):
        """The processes of a host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespaces[host]).split()]

    def kill(self, host):
        """Kill every process of a host. The host's network lives on and answers for them, as after a crash."""
        deadline = time.monotonic() + 10
        while (pids := self.pids(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut(self, host):
        """Take a host's link down at the switch: packets are lost without a word, as when a cable is pulled."""
        ip("-n", self.switch, "link", "set", self.names[host], "down")

    def mend(self, host):
        """Take a host's link up again."""
        ip("-n", self.switch, "link", "set", self.names[host], "up")

    def popen(self, host, *command, variables=None, **options):
        """Start a command on a host, in a session of its own, with pipes unless the options say otherwise.

        Its `python` and `torchrun` are those of the Python that runs this. `variables` are added to its environment.
        """
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        environment = os.environ | {"PATH": path} | {name: str(value) for name, value in (variables or {}).items()}
        defaults = {"cwd": ROOT, "env": environment, "start_new_session": True}
        defaults |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        enter = ["nsenter", f"--net=/run/netns/{self.namespaces[host]}", "unshare", "--uts", "--mount"]
        become = ["sh", "-c", BECOME_HOST, "sh", self.names[host], f"{self.folder.name}/hosts"]
        return subprocess.Popen([*enter, *become, *map(str, command)], **(defaults | options))
