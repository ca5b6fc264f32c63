"""What a training of 06 on several hosts has printed, and what that says about it."""

import re
import threading
import time
from typing import NamedTuple

STEP = re.compile(r"   == step: \[ *(\d+)/(\d+)\] \[(\d+)/")
RESUMED = re.compile(r"resumed from .*, after step (\d+) of")
STARTED = re.compile(r"06_imagenet\.py \| .* \| world size (\d+)")


class Line(NamedTuple):
    """A line of output."""

    time: float  # of time.monotonic()
    host: int
    text: str


class Event(NamedTuple):
    """A number that the training has printed."""

    time: float  # of time.monotonic()
    number: int


class Transcript:
    """The output of all hosts, line by line, as it comes."""

    def __init__(self):
        self.lines = []  # of Line
        self.steps = []  # of Event: the number of a training step, counted over all epochs
        self.resumed = []  # of Event: the step of a checkpoint from which the training resumed
        self.worlds = []  # of Event: the world size of a start or restart
        self.mistakes = []  # of str: a step was skipped, or too many steps were repeated
        self.changed = threading.Condition()  # notified after each line

    def follow(self, host, pipe):
        """Read the output of a host, in a thread of its own."""
        threading.Thread(target=self._read, args=(host, pipe), daemon=True).start()

    def _read(self, host, pipe):
        for text in pipe:
            with self.changed:
                self.add(Line(time.monotonic(), host, text.rstrip("\n")))
                self.changed.notify_all()

    def add(self, line):
        """Add a line, and note what it says."""
        self.lines.append(line)
        if match := STEP.match(line.text):
            step, steps_per_epoch, epoch = map(int, match.groups())
            self._add_step(line.time, (epoch - 1) * steps_per_epoch + step)
        elif match := RESUMED.match(line.text):
            self._add_resumed(line.time, int(match[1]))
        elif match := STARTED.match(line.text):
            self.worlds.append(Event(line.time, int(match[1])))
        elif line.text.startswith("store.py: error: "):
            self.mistakes.append(line.text)

    def _add_step(self, now, step):
        last = self.position
        if step != last + 1:
            self.mistakes.append(f"step {step} followed step {last}")
        self.steps.append(Event(now, step))

    def _add_resumed(self, now, step):
        # One step more than printed is correct: another host may save a step that rank 0, being
        # killed, never printed.
        if step > self.position + 1:
            message = f"resumed after step {step}, although the last step was {self.position}"
            self.mistakes.append(message)
        self.resumed.append(Event(now, step))

    @property
    def position(self):
        """The last training step, or that of the checkpoint if the training has resumed since."""
        latest = max(self.steps[-1:] + self.resumed[-1:], default=Event(0, 0))
        return latest.number

    @property
    def world(self):
        """The world size: the number of processes that train."""
        return self.worlds[-1].number if self.worlds else 0

    def has(self, text, host=None, since=0):
        """Return whether a line holds a text.

        Args:
            host: int, of this host; None: of any.
            since: int, the number of lines to leave out.
        """
        return any(
            text in line.text for line in self.lines[since:] if host is None or line.host == host
        )

    def explanation(self, names):
        """Return the last lines that may explain a failure.

        Neither step lines nor parts of a C++ stack do.

        Args:
            names: the names of the hosts.
        """
        informative = [
            f"{names[line.host]}: {line.text}"
            for line in self.lines
            if "== step:" not in line.text and not line.text.startswith(("frame #", "[W"))
        ]
        return informative[-30:]
