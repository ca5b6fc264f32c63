"""Signals that ask a run to save and leave; imported before torch, whose import takes seconds.

SIGTERM is what torchrun sends when a machine has joined or gone, and Slurm when it wants the machine back; SIGUSR1 is
what sbatch --signal sends ahead of the time limit. Until training has begun there is nothing to save, and they end
the process; from then on they only set `stop.signal`, which the training loop looks at.
"""

import ctypes
import os
import signal
import sys

SIGNALS = [name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]  # Windows has no SIGUSR1
AGAIN = 75  # the exit code of a run that was stopped and can go on: EX_TEMPFAIL of sysexits.h


class Stop:
    """Which signal has asked this process to stop; the handlers are installed when it is made."""

    def __init__(self):
        self.signal = None  # its name
        self.training = False
        for name in SIGNALS:
            signal.signal(getattr(signal, name), self._note)

    def ignore(self):
        """The process ends anyway now; Python, as it ends, would give signals their default back, which kills."""
        for name in SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_IGN)

    def _note(self, number, frame):
        self.signal = signal.Signals(number).name
        if not self.training:
            sys.exit(AGAIN)


def end_with_torchrun():
    """Kill this process when the torchrun that has started it is gone; on Linux alone.

    A torchrun that is killed itself (SIGKILL) cannot end its workers, which would go on training and writing
    checkpoints beside those that replace them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent():
    """Kill this process when the one that has started it is gone; on Linux alone."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of linux/prctl.h
        if os.getppid() != parent:  # it went before that
            os._exit(AGAIN)


stop = Stop()
