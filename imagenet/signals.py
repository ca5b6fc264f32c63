"""Signals that ask a run to save and exit.

SIGTERM: torchrun sends it when a machine joins or fails, Slurm when it needs the machine for
another job. SIGUSR1: Slurm sends it before the time limit, if the job asked for it (sbatch
--signal).

install() sets the handlers. Before training starts there is nothing to save, so a signal ends the
process at once. Afterwards it is only noted in `stop.signal`, which the training loop checks in
every step. This file does not import torch: 06 calls install() first, because importing torch takes
seconds in which a signal may already arrive.
"""

import ctypes
import os
import signal
import sys
import time

# Windows has no SIGUSR1
SIGNALS = [name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
EXIT_REQUEUE = 75  # the exit code of a run that saved and can continue: EX_TEMPFAIL in sysexits.h
DELAY = 10  # seconds: within them, torchrun's own signal arrives at all its workers


class StopRequest:
    """The request of a signal to stop this process."""

    def __init__(self):
        self.signal = None  # the name of the signal, once it has arrived
        self.training = False  # set to True when training starts


stop = StopRequest()


def install():
    """Handle SIGTERM and SIGUSR1 in this process."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), _note)


def ignore():
    """Ignore both signals.

    When Python exits it restores the default handlers, which would kill the process.
    """
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _note(number, frame):
    stop.signal = signal.Signals(number).name
    if not stop.training:
        sys.exit(EXIT_REQUEUE)


def exit_for_requeue(launcher):
    """Exit with code 75 when torchrun does not count it as a failure. The state must be saved.

    When a machine joins, each torchrun stops its own workers, some a little later than others. A
    worker that exits before its torchrun has sent the signal counts as crashed, so it waits for the
    signal.
    """
    deadline = time.monotonic() + DELAY
    while launcher == "torchrun" and stop.signal is None and time.monotonic() < deadline:
        time.sleep(0.05)
    ignore()
    sys.exit(EXIT_REQUEUE)


def exit_when_torchrun_dies():
    """Kill this process when the torchrun that started it dies. Linux only.

    A torchrun that is killed (SIGKILL) cannot stop its workers. They would continue to train and to
    write checkpoints beside the workers that replace them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        exit_when_parent_dies()


def exit_when_parent_dies():
    """Kill this process when the process that started it dies. Linux only."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG in linux/prctl.h
        if os.getppid() != parent:  # it died before the call
            os._exit(EXIT_REQUEUE)
