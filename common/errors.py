"""What a user sees when something is wrong: one line, and never a traceback for a mistake of theirs."""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException


class UserError(Exception):
    """A mistake of the user: one line that says what was found, what was expected and what works."""

    one_line = True


@contextlib.contextmanager
def one_line_errors():
    """Turn a user's mistake into one line on stderr and exit code 2, the loss of another rank into one and
    code 1, Ctrl-C into one and code 130."""
    try:
        with _ctrl_c_within(1):
            yield
    except ProcessExitedException as error:  # a child of mp.spawn, which has said why unless it was killed
        if error.signal_name:
            _fail(1, f"process {error.error_index} was killed by {error.signal_name}; the others have been ended")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _stop()
    except Exception as error:
        if getattr(error, "one_line", False):
            # A DataLoader worker wraps its error into the text of a traceback, whose last line is the message.
            _fail(2, str(error).splitlines()[-1].rpartition("UserError: ")[-1])
        if reason := lost_peer(error):
            _fail(1, reason)
        raise


def _fail(code, message):
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def lost_peer(error):
    """What to tell a user if this error means that another rank has gone, else None."""
    text = " ".join(str(error).split())
    from_gloo = isinstance(error, RuntimeError) and ("/gloo/" in text or "pair closure" in text)
    from_a_collective = from_gloo or isinstance(error, dist.DistError)
    if not from_a_collective or not re.search("connect|clos|reset by peer|broken pipe|timed out|remote", text, re.I):
        return None
    reason = re.sub(r"\[\S*/gloo/\S*\] ?", "", text.rpartition("Last error:")[2]).strip()[:200]  # NCCL's cause is last
    fix = "its own message or its launcher's, which may stand above, says why"
    if ("127.0." in text and "refused" in text) or "no route" in text.lower():
        name = "NCCL_SOCKET_IFNAME" if "NCCL" in text else "GLOO_SOCKET_IFNAME"
        fix = f"ranks on several machines need export {name}=... on each, the interface that the others reach"
    return f"lost another rank ({reason}): {fix}"


def one_line(error):
    """The text of an exception, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _ctrl_c_within(seconds):
    """End the process so long after Ctrl-C even if Python has not noticed it by then.

    Python raises KeyboardInterrupt between two of its own instructions, and the backward pass of a large
    batch is one instruction that takes many seconds. The wake-up pipe is written at once, whatever runs.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        while signal_number := os.read(reader, 1):
            if signal_number[0] == signal.SIGINT:
                time.sleep(seconds)
                _stop()
        os.close(reader)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _stop():
    """End at once: Python's own way out waits until every loader worker has finished its batch."""
    echo = "\n" if sys.stderr.isatty() else ""  # a terminal shows ^C first
    print(f"{echo}{os.path.basename(sys.argv[0])}: stopped by Ctrl-C", file=sys.stderr, flush=True)
    kill_workers()
    os._exit(130)


def kill_workers():
    """Kill the loader's workers, as this process ends; the DataLoader says nothing of it."""
    with contextlib.suppress(AttributeError, ValueError):  # Windows has no SIGCHLD, a thread may not set it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the DataLoader would complain that its workers die
    for child in multiprocessing.active_children():
        child.kill()
