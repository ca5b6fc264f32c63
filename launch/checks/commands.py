"""Run a program of the system that may be missing, fail or hang."""

import contextlib
import subprocess


def run(command, seconds):
    """Return the (exit code, output) of a command. The code is None if it did not end in time.

    Args:
        command: list of str.
        seconds: how long to wait.

    Raises:
        OSError: there is no such program.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits for a broken driver ignores even SIGKILL: do not wait for its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        return None, ""
    return process.returncode, output
