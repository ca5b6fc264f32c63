"""Errors of scripts with several processes, one of which prints what all have found."""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from common.errors import UserError, exit_now, message_of, one_line, print_line
from common.setup_distributed import LAUNCHERS, LaunchError

PATIENCE = 5  # seconds in which rank 0 most likely prints the mistake that this rank has found too


@contextlib.contextmanager
def one_line_errors():
    """Report a user's mistake in one line, with exit code 2.

    Ctrl-C (exit code 130) and the failure of another rank (1) are one line too. Other errors keep
    their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_now("stopped by Ctrl-C", 130)
    # a process of mp.spawn, which printed its own error unless it was killed
    except ProcessExitedException as error:
        if not error.signal_name:
            exit_now(None, error.exit_code)
        found = f"process {error.error_index} was killed by {error.signal_name}"
        exit_now(f"error: {found}; the others were stopped", 1)
    except Exception as error:
        message, code = explain(error)
        line = message and f"{script_name()}: error: {message}"
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        if code == 2:
            let_rank_0_speak()
        write_error_file(error, line)
        if message is None and not has_peers:
            raise
        if message is None:
            traceback.print_exc()
        else:
            print_line(f"error: {message}")
        if has_peers:  # a normal exit could wait for ranks that wait for this one
            if message and code == 1:
                time.sleep(1)  # the exit code of the rank that was lost is to be seen first
            exit_now(None, code)
        sys.exit(code)


def launched_rank():
    """Return the rank of this process as its launcher says, or 0."""
    if dist.is_initialized():
        return dist.get_rank()
    names = [variables[0] for _, *variables in LAUNCHERS if variables]  # the innermost comes first
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    return int(rank) if rank.isdigit() else 0


def let_rank_0_speak():
    """Wait in other ranks than 0 before they print a mistake, which all ranks may have found.

    Rank 0 prints it and exits, and its launcher stops the others meanwhile. A rank that is still
    there prints it too: it may be the only one.
    """
    if launched_rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # 06 would only note it
        time.sleep(PATIENCE)


def write_error_file(error, text=None):
    """Write an error where torchrun looks for it; it prints the earliest one of all ranks last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = text or "".join(traceback.format_exception(error)).strip()
    # Whole seconds, so the rank that failed first and those that lost it could have the same.
    timestamp = int(time.time()) + 5 * bool(lost_peer(error))
    extra = {"py_callstack": text, "timestamp": str(timestamp)}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def explain(error):
    """Return (message, exit code) of an error.

    The message is None if the error needs its traceback.
    """
    if isinstance(error, UserError | LaunchError):
        return message_of(error), 2
    name = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    if name.startswith("SLURM_"):
        command = f"srun --ntasks=2 python {script_name()}"
        return f"{name} is not set: expected srun to set it; {command}", 2
    if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        command = f"torchrun --nproc-per-node=2 {script_name()}"
        return f"{name} is not set: expected torchrun to set it; {command}", 2
    return lost_peer(error), 1


def script_name():
    return os.path.basename(sys.argv[0])


def lost_peer(error):
    """Return a message if an error means that another rank exited or is out of reach, else None."""
    text = one_line(error)
    from_gloo = isinstance(error, RuntimeError) and ("/gloo/" in text or "pair closure" in text)
    # torch has two implementations, with other classes
    from_nccl = isinstance(error, RuntimeError) and "NCCL" in text
    from_a_collective = from_gloo or from_nccl or isinstance(error, dist.DistError)
    is_lost = "connect|clos|reset by peer|broken pipe|timed out|remote"
    if not from_a_collective or not re.search(is_lost, text, re.I):
        return None
    # NCCL names the cause last; gloo first names a line of its own source. Behind " At:" stand
    # the lines of a hook of DDP.
    cause = re.split("last error:", text, flags=re.I)[-1].partition(" At: /")[0]
    cause = re.sub(r"\[\S*/gloo/\S*\] ?", "", cause).partition(" This is typically")[0]
    cause = cause.strip(". ")[:200]
    remedy = "its own message, or its launcher's, says why; it may stand above"
    if ("127.0." in text and "refused" in text) or "no route" in text.lower():
        name = "NCCL_SOCKET_IFNAME" if "NCCL" in text else "GLOO_SOCKET_IFNAME"
        remedy = (
            f"ranks on several machines need export {name}=... on each, "
            "the interface that the others reach"
        )
    return f"lost another rank ({cause}): {remedy}"
