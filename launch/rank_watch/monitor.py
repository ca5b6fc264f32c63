"""Read what the ranks record, find out whether they hang, and print the findings.

Rank 0 starts this process: monitor.py LISTENER TOKEN WORLD_SIZE PID. It outlives a rank that
aborts, so that what was seen is not lost.
"""

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rank_watch.before import compare
from rank_watch.calls import differences, join
from rank_watch.colors import colored
from rank_watch.findings import judge
from rank_watch.runs import Run
from rank_watch.watched.collectives import explain_failure

SILENCE = 2  # seconds without a step of any rank, after which they are asked where they are
STILL = 30  # seconds without any use of the CPU, after which a rank does not go on by itself
ARRIVAL = 120  # seconds in which all ranks must connect
FAREWELL = 8  # seconds to go on after the process that started this one, rank 0, has ended


class Rank:
    """The connection to a rank, and what it has sent."""

    def __init__(self, connection):
        self.connection = connection
        self.number = None
        self.text = b""  # of a line that is not complete
        self.events = []
        self.answer = None  # to the last question: {"at": ..., "calls": ..., "cpu": ...}
        self.still_since = None  # when it was first seen at this place with this use of the CPU
        self.closed = False

    def end(self):
        """Return the event with which the rank ended, or None."""
        return next((event for event in self.events[-1:] if event["kind"] == "done"), None)

    def is_done(self):
        return self.closed or self.end() is not None

    def is_cut_short(self):
        """Return whether the rank is done before the end of its script."""
        return self.closed or (self.is_done() and self.end()["why"] != "end")

    def is_still(self):
        return self.still_since and time.monotonic() - self.still_since > STILL

    def is_stuck(self):
        """Return whether the rank waits in a collective of its own, and will not end it."""
        return self.is_still() and any(not done for *_, done, _ in self.answer["calls"])

    def take(self, answer):
        """Note an answer to a question, and whether the rank has done anything since the last."""
        before = self.answer
        same = before and all(before[key] == answer[key] for key in ("at", "calls"))
        moved = before and answer["cpu"] - before["cpu"] > 0.05
        if not same or moved:
            self.still_since = time.monotonic()
        self.answer = answer

    def send(self, message):
        try:
            self.connection.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self.closed = True


class Monitor:
    def __init__(self, listener, token, world_size, parent=None):
        self.listener = listener
        self.token = token
        self.world_size = world_size
        self.ranks = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.last_event = time.monotonic()
        self.last_question = 0
        self.difference = None  # seen in the last answers: reported if the next ones repeat it
        self.parent = parent or os.getppid()
        self.orphan_since = None  # when rank 0 had ended

    def run(self):
        """Collect events until all ranks are done, or hang."""
        started = time.monotonic()
        hang = None
        while hang is None:
            for key, _ in self.selector.select(timeout=0.5):
                if key.fileobj is self.listener:
                    self.accept()
                else:
                    self.receive(key.data)
            now = time.monotonic()
            if len(self.ranks) == self.world_size:
                if all(rank.is_done() for rank in self.ranks.values()):
                    break
                if now - self.last_event > SILENCE and now - self.last_question > 1:
                    hang = self.find_hang()
                    self.ask()
            elif now - started > ARRIVAL:
                missing = set(range(self.world_size)) - self.ranks.keys()
                hang = f"{join(missing)} did not connect to rank 0: is another port closed?"
            if os.getppid() != self.parent:
                self.orphan_since = self.orphan_since or now
                if now - self.orphan_since > FAREWELL:
                    hang = ""
        self.finish(hang)

    def accept(self):
        connection, _ = self.listener.accept()
        connection.settimeout(5)
        rank = Rank(connection)
        self.selector.register(connection, selectors.EVENT_READ, rank)

    def receive(self, rank):
        try:
            data = rank.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            rank.closed = True
            self.selector.unregister(rank.connection)
            self.last_event = time.monotonic()
            return
        *lines, rank.text = (rank.text + data).split(b"\n")
        if lines and rank.number is None and self.token.encode() not in lines[0]:  # a port scan
            self.selector.unregister(rank.connection)
            rank.connection.close()
            return
        for line in lines:
            self.read(rank, json.loads(line))

    def read(self, rank, event):
        if rank.number is None:
            rank.number = event["rank"]
            self.ranks[rank.number] = rank
            rank.send({"kind": "welcome"})
        if event["kind"] == "calls" and "question" in event:
            rank.take(event)
            return
        self.last_event = time.monotonic()
        rank.answer = rank.still_since = self.difference = None
        rank.events.append(event)

    def ask(self):
        self.last_question = time.monotonic()
        for rank in self.ranks.values():
            if not rank.is_done():
                rank.send({"kind": "question"})

    def find_hang(self):
        """Return a sentence if the ranks wait for each other for ever, or None: not known yet.

        The sentence is empty if they wait for a rank that has failed, or made its last step.
        """
        answers = {}
        for number, rank in self.ranks.items():
            if rank.is_done():
                calls = [event["calls"] for event in rank.events if event["kind"] == "calls"]
                answers[number] = {"at": where_it_ended(rank), "calls": calls[-1] if calls else []}
            elif rank.answer:
                answers[number] = rank.answer
        if all(self.ranks[number].is_done() for number in answers):
            return None
        seen = None
        for difference in differences(answers):
            missing = [self.ranks[number] for number in difference.missing]
            never = any(map(Rank.is_done, missing)) or all(map(Rank.is_stuck, missing))
            if difference.kind == "differs" or (difference.kind == "missing" and never):
                seen = "" if any(map(Rank.is_cut_short, missing)) else difference.text
                break
            if difference.kind == "missing" and all(map(Rank.is_still, missing)):
                # It may wait for another process, which prepares the data.
                print_once(f"note: no progress for {STILL} seconds: {difference.text}")
        repeated = seen is not None and seen == self.difference
        self.difference = seen
        if not repeated:
            return None
        return seen and f"the ranks wait for each other for ever: {seen} (docs/hangs.md)"

    def finish(self, hang):
        """Print the findings, and tell all ranks to end."""
        if not self.ranks:
            print("\nrank 0 was killed or has aborted before a rank connected", flush=True)
            return
        runs = [Run(number, rank.events) for number, rank in sorted(self.ranks.items())]
        for run in runs:
            rank = self.ranks[run.rank]
            if hang == "" and not rank.is_done():
                at = rank.answer["at"] if rank.answer else "an unknown place"
                run.end = {"why": "waits", "at": at}
        judgment = judge(runs)
        compare.check(runs, judgment, complete=hang is None)
        hang = hang or explain_failure(runs)
        found = [hang, *judgment.found] if hang else judgment.found
        failures = failures_of(runs, hang)
        lines = ["", *(f"found: {text}" for text in found), *failures]
        steps = max((len(run.steps) for run in runs), default=0)
        if not found and not failures:
            seen = "; ".join(judgment.compared)
            count = f"{steps} training step{'s' * (steps != 1)} on {len(runs)} ranks"
            if steps:
                lines.append(f"ok: {count}: {seen}; nothing suspicious")
            else:
                lines.append(
                    "note: no step of an optimizer of torch.optim was seen, so weights, learning "
                    f"rates and dropout were not compared; compared: {seen or 'nothing'}"
                )
        lines += [f"note: {text}" for text in judgment.notes]
        print(colored("\n".join(lines)), flush=True)
        code = int(bool(found))
        verdict = {"kind": "verdict", "code": code, "text": "\n".join(lines[1:])}
        # First to the ranks that wait: the end of the others is an error in their collective.
        for rank in sorted(self.ranks.values(), key=Rank.is_done):
            rank.send(verdict | {"now": not rank.is_done()})
        for rank in self.ranks.values():  # one may still answer a question, before it reads this
            with contextlib.suppress(OSError):
                while rank.connection.recv(1 << 20):
                    pass


@functools.cache
def print_once(text):
    print(text, flush=True)


def where_it_ended(rank):
    """Return what a rank that is done did last, for a sentence: "rank 1 is at ..."."""
    end = rank.end()
    if end is None:
        return "its end: the process was killed or has aborted"
    if end["why"] == "steps":
        return f"its training step {end['steps']}, the last one that is watched"
    if end["why"] == "failed":
        return f"its end: {end['error']} at {end['line']}"
    return "its end: the script has ended"


def failures_of(runs, hang):
    """Return a line for each rank whose script failed, or whose process ended without a word."""
    lines = []
    waiting = []
    if any(run.end and "KeyboardInterrupt" in run.end.get("error", "") for run in runs):
        return ["interrupted"]
    for run in runs:
        if needs_gpu := run.end and run.end.get("needs_gpu"):
            return [needs_gpu]
        if run.end and "StopIteration" in run.end.get("error", "") and run.is_cut:
            return ["the script counts its batches itself: expected a run without --epoch-steps"]
        steps = f"after {len(run.steps)} training steps"
        if run.end and run.end["why"] == "failed":
            lines.append(f"rank {run.rank} failed {steps}: {run.end['error']} ({run.end['line']})")
        elif run.end and run.end["why"] == "waits":
            waiting.append(f"rank {run.rank} waited for it {steps}, at {run.end['at']}")
        elif run.end is None and not hang:
            lines.append(f"rank {run.rank} was killed or has aborted {steps}")
    return lines and lines + waiting


if __name__ == "__main__":
    # What ends the ranks ends this process once it has reported.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, token, world_size, parent = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    Monitor(listener, token, int(world_size), int(parent)).run()
