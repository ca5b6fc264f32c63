"""Start Python in processes of its own, read what it prints, and see that nothing of it stays."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from launchers import VARIABLES

ROOT = Path(__file__).resolve().parents[2]


STARTED = []  # what a test has started, for the fixture that kills what it leaves behind


def start(*command):
    """Start Python with these arguments in a process and a session of its own, which the test's end
    kills.
    """

    def listen_to_ctrl_c():  # a shell makes its background jobs deaf to it, and they hand that on
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {"cwd": ROOT, "start_new_session": True, "preexec_fn": listen_to_ctrl_c}
    STARTED.append(subprocess.Popen([sys.executable, *map(str, command)], **pipes, **options))
    return STARTED[-1]


def start_copy(folder, *command, **variables):
    """Start Python in a folder with a copy of setup_distributed.py, with these variables and no
    others of a launcher. It has one thread, unless OMP_NUM_THREADS is another number, or None: not
    set.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    for name, value in ({"OMP_NUM_THREADS": 1} | variables).items():
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=env, **pipes)


def without_gloo(text):
    """Text without the lines that gloo prints in torch before 2.10, for every connection.

    Two ranks mix the words of these lines where Python writes unbuffered, as torchrun starts it.
    """
    return (
        re.sub(r"^(.*peer ranks.*|.*\[Gloo\].*|\d*)\n", "", text, flags=re.M)
        if "[Gloo]" in text
        else text
    )


def finished(process, timeout=300):
    """Wait for a process; returns its exit code, its output and its errors."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, without_gloo(out), err


def read_until(process, text):
    """Read lines of output until one holds the text; return all that was read."""
    lines = [""]
    while text not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    return "".join(lines)


def workers(pid, count=2):
    """The processes below one that run a rank, in the order of their ranks, once there are so many
    and they train.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        below = psutil.Process(pid).children(recursive=True)
        found = [process for process in below if is_rank(process.cmdline())]
        if len(found) >= count:
            return sorted(found, key=lambda p: p.pid)[:count]
        time.sleep(0.2)
    raise TimeoutError(f"{count} workers of {pid} did not start")


def gone(processes, seconds=60):
    """Whether processes end within so many seconds."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def is_rank(command):
    """Whether a process with this command line runs a script, or was spawned by one."""
    is_script = any(part.endswith(".py") for part in command[1:3])
    return is_script or any("spawn_main" in part for part in command)
