"""Messages between ranks, through the store.

It works even if the network between two ranks does not.
"""

import contextlib
import itertools
import json
import threading
import time

import torch

from common.setup_distributed import LaunchError

# Seconds without an answer, until a rank counts as missing. The first use of a GPU takes long.
SILENCE = 60 if torch.cuda.is_available() else 10
PULSE = 0.5  # seconds between two signs of life


class Pulse(threading.Thread):
    """Write twice per second that this process lives, and what it is doing.

    Args:
        store: a connection of its own to the store.
        rank: int.
    """

    def __init__(self, store, rank):
        super().__init__(daemon=True)
        self.store = store
        self.rank = rank
        self.stage = "start"  # what this process is doing
        self.beats = itertools.count()  # so that no two messages are equal
        self.start()

    def run(self):
        with contextlib.suppress(RuntimeError):  # rank 0 has exited, and the store with it
            while True:
                self.at(self.stage)
                time.sleep(PULSE)

    def at(self, stage):
        """Write what this process is doing from now on."""
        self.stage = stage
        self.store.set(f"pulse {self.rank}", f"{next(self.beats)} {stage}")


def collect(store, what, ranks, silence=None):
    """Return {rank: what it wrote} of all ranks, or of those that wrote before a silence.

    Args:
        what: str, the key, which the number of each rank follows.
        ranks: iterable of int.
        silence: seconds in which no rank writes; None: SILENCE.
    """
    silence = SILENCE if silence is None else silence
    answers = {}
    last = time.monotonic()
    while len(answers) < len(ranks) and time.monotonic() - last < silence:
        for rank in ranks:
            key = f"{what} {rank}"
            if rank not in answers and store.check([key]):
                answers[rank] = json.loads(store.get(key))
                last = time.monotonic()
        time.sleep(0.05)
    return answers


def wait_for(store, key):
    """Return what rank 0 wrote, as soon as it has.

    Raises:
        LaunchError: rank 0 shows no sign of life.
    """
    pulse = None
    last = time.monotonic()
    while not store.check([key]):
        newest = store.get("pulse 0") if store.check(["pulse 0"]) else None
        if newest != pulse:
            pulse = newest
            last = time.monotonic()
        if time.monotonic() - last > SILENCE:
            found = f"rank 0 has shown no sign of life for {SILENCE} s"
            raise LaunchError(f"{found}: see on its machine whether it runs")
        time.sleep(0.05)
    return json.loads(store.get(key))
