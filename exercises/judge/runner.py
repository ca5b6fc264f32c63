"""Start the ranks of a program, notice when they wait for each other forever, and stop them.

The ranks are forked from a server process that has imported torch once, so that a check takes a
second, not ten. They get the environment variables that torchrun would set.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from exercises.sentences import Sentence, say

LIMIT = 60  # seconds for a program that computes; one that waits is stopped earlier
STILL = 3  # seconds without progress of any rank after which they are said to hang
TOGETHER = 10  # the same if all are in one line, as when they meet and a name server is slow
IDLE = 0.05  # fraction of a core below which a rank waits; its reports need less
GRACE = 2  # seconds that the other ranks have after one has failed, to fail too
MODULES = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "exercises.judge.recorder",
    "exercises.judge.judging",
]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(MODULES)


class Setup(NamedTuple):
    """How to start a program."""

    local_ranks: tuple = (0, 1)  # of each rank: (0, 1, 0, 1) acts as two machines
    environment: dict = {}  # noqa: RUF012  more variables
    program: str = ""  # in the folder of the exercise, to compare with; "": the reader's
    run: Sentence | str = ""  # how the run differs from the first one, for an answer


# The program again, for random numbers that follow from the time or the process: a day, an hour, a
# minute and a second later
LATER = Setup(environment={"LATER": 90061})
THREE_RANKS = Setup((0, 1, 2), {"WORLD_SIZE": 3}, run=say("With three ranks"))
FOUR_RANKS = Setup(local_ranks=(0, 1, 2, 3), environment={"WORLD_SIZE": 4})
ODD_MODEL = Setup(local_ranks=(0, 1, 2), environment={"WORLD_SIZE": 3, "ODD_MODEL": 1})
# The program again on four ranks, in exercises that measure the memory
MEASURED = Setup(environment={"MEASURES": 1})
FOUR_MEASURED = FOUR_RANKS._replace(environment={"WORLD_SIZE": 4, "MEASURES": 1})
# The program again, with other images, for a result that is written in it
OTHER_IMAGES = Setup(environment={"OTHER_IMAGES": 1}, run=say("In a second run, with other images"))


class Rank:
    """A process that runs the program, and what it last reported."""

    def __init__(self, program, rank, setup, port, folder):
        size = len(setup.local_ranks)
        environment = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": setup.local_ranks[rank],
            "LOCAL_WORLD_SIZE": max(setup.local_ranks) + 1,
            "GROUP_RANK": setup.local_ranks[: rank + 1].count(0) - 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # as torchrun: no rank hosts it
            "TORCHELASTIC_RESTART_COUNT": 0,
        } | setup.environment
        environment = {name: str(value) for name, value in environment.items()}
        self.connection, other = context.Pipe()
        arguments = (program, rank, environment, folder, other)
        self.process = context.Process(target=run_rank, args=arguments)
        self.process.start()
        other.close()
        self.reports = []  # (seconds, line, events, CPU seconds), newest last

    @property
    def exit_code(self):
        return self.process.exitcode

    def read_reports(self):
        with contextlib.suppress(EOFError, OSError):  # the rank has ended
            while self.connection.poll():
                self.reports.append((time.monotonic(), *self.connection.recv()))

    def waits(self, seconds=STILL):
        """Return whether the rank has reported for so many seconds that it does nothing."""
        now = time.monotonic()
        recent = [one for one in self.reports if one[0] > now - seconds]
        if not recent or self.reports[0][0] > now - seconds or len(recent) < 5:
            return False  # too young, or the machine is so busy that the reports are late
        (_, line, events, cpu), last = recent[0], recent[-1]
        is_still = last[1:3] == (line, events) and last[3] - cpu < IDLE * seconds
        return is_still and not is_busy(self.process.pid)

    def stop(self):
        with contextlib.suppress(OSError):
            self.connection.send("stop")

    def end(self):
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.read_reports()
        self.connection.close()


def is_busy(pid):
    """Return whether a thread of a process wants a core or reads from a disk, as Linux tells.

    On a machine with too much to do, a program that computes may get neither for seconds.
    """
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if stat.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def run_rank(*arguments):
    from exercises.judge.recorder import run_rank  # imports torch, which the server already has

    run_rank(*arguments)


def run(program, setup, folder, limit=LIMIT):
    """Run a program in several ranks. Return "ended", "hangs", "failed" or "limit".

    The records of the ranks are then in the folder: record-0, record-1, ... In place of the record
    of a rank that was killed, there is killed-0 with its exit code and the last line it reported.
    """
    size = len(setup.local_ranks)
    with hosted_store() as port:
        ranks = [Rank(program, rank, setup, port, folder) for rank in range(size)]
        try:
            return watch(ranks, limit)
        finally:
            for rank in ranks:
                rank.stop()
            for number, rank in enumerate(ranks):
                rank.end()
                if not (folder / f"record-{number}").exists():
                    line = rank.reports[-1][1] if rank.reports else 0
                    (folder / f"killed-{number}").write_text(f"{rank.exit_code} {line}")


def watch(ranks, limit):
    """Wait until the ranks end, or must be stopped."""
    begin = time.monotonic()
    failed = None  # when the first rank failed
    while True:
        sentinels = [rank.process.sentinel for rank in ranks if rank.exit_code is None]
        multiprocessing.connection.wait(sentinels, timeout=0.2)
        for rank in ranks:
            rank.read_reports()
        alive = [rank for rank in ranks if rank.exit_code is None]
        if not alive:
            return "failed" if any(rank.exit_code for rank in ranks) else "ended"
        if any(rank.exit_code for rank in ranks):
            failed = failed or time.monotonic()
        if failed and time.monotonic() > failed + GRACE:  # as torchrun stops them
            return "failed"
        lines = {rank.reports[-1][1] for rank in alive if rank.reports}
        is_meeting = len(lines) == 1 and len(alive) == len(ranks)
        if all(rank.waits(TOGETHER if is_meeting else STILL) for rank in alive):
            return "hangs"
        if time.monotonic() > begin + limit:
            return "limit"


@contextlib.contextmanager
def hosted_store():
    """Host the store of the ranks in a process of its own, for any of them may end first.

    Yields its port.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=host_store, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()  # which ends the process
        process.join()


def host_store(connection):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        connection.recv()


@functools.cache  # once: meanwhile a Ctrl-C is lost
def start_server():
    """Start the server process, which would print a traceback if Ctrl-C met its imports."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which it inherits
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)


class Answer(NamedTuple):
    """What check.py says about a program."""

    passed: bool
    sentence: Sentence
    output: str  # of all ranks
    lanes: list  # for timeline.draw()


def check(exercise, program, limit=LIMIT):
    """Run the program of an exercise as often as its check wants, and judge it.

    Args:
        exercise: folder of the exercise.
        program: path of the reader's file.
        limit: seconds for each run.

    Returns:
        An Answer.
    """
    program = Path(program).resolve()
    try:
        program.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        sentence = say("The file holds characters that are not UTF-8: please save it as UTF-8.")
        return Answer(False, sentence, "", [])
    start_server()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for k, setup in enumerate(ask("setups", exercise)):
            place = Path(folder, str(k))
            place.mkdir()
            compared = exercise / setup.program
            results.append(run(compared if setup.program else program, setup, place, limit))
            if results[-1] in ("hangs", "limit"):  # the answer will say so
                break
        answer = ask("judge", exercise, str(program), results, folder)
        return Answer(*answer, ask("lanes", exercise, results, folder))


def ask(function, *arguments):
    """Call a function of judging.py in a process that has torch, and return its result."""
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(function, arguments, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT):
            return ours.recv()
        process.kill()
        raise RuntimeError(f"{function}{arguments} did not answer within {LIMIT} seconds")
    except EOFError:
        raise RuntimeError(f"{function}{arguments} failed; see the message above") from None
    finally:
        process.join()


def answer(function, arguments, connection):
    from exercises.judge import judging

    with contextlib.suppress(BrokenPipeError):  # after Ctrl-C, nobody waits for the answer
        connection.send(getattr(judging, function)(*arguments))
