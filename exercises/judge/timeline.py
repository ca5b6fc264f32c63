"""Draw what the ranks of a program did: a column for each rank, and time goes down.

 ms  rank 0                                      rank 1
  0   22 broadcast 272 B ─────────────────────── 22 broadcast 272 B
  4   31 all_reduce 272 B                        │
203  └────────────────────────────────────────── 31 all_reduce 272 B
"""

import unicodedata
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from exercises.sentences import say, text_of

WIDTH = 98
MARGIN = 8  # for the time
SLOT = 0.003  # seconds: what several ranks do within them is one row
FIRST, LAST = 40, 20  # rows of a long timeline
# kind of an event: the call that it is
CALLS = {
    "batch": "forward()",
    "other batch": "forward()",
    "backward": "end of backward()",
    "step": "optimizer.step()",
    "save": "torch.save()",
    "load": "torch.load()",
    "signal": "os.kill()",
}


class Act(NamedTuple):
    """Something that a rank did, as the timeline shows it."""

    time: float
    line: int  # of the program, or 0
    text: Any  # a text or a Sentence
    meeting: tuple = ()  # what identifies a message on all its ranks
    ranks: tuple = ()  # of the message


def lanes(records):
    """Return a list of Acts for each rank. The last one says how the rank ended."""
    return [acts(record) for record in records]


def acts(record):
    found, counts = [], Counter()
    for event in record.events:
        if event.kind in CALLS:
            found.append(Act(event.time, 0, CALLS[event.kind]))
        elif event.kind == "message":
            message = event.value
            is_pair = message.name in ("send", "recv")
            key = ("pair" if is_pair else message.name, message.ranks)
            counts[key] += 1
            meeting = (*key, counts[key])
            found.append(Act(event.time, message.line, text(message), meeting, message.ranks))
    end = say("waits") if record.waits else say("ended")
    if record.signal or record.error:
        end = record.signal or record.error[0]
    time = found[-1].time if found else 0
    return [*found, Act(time, record.line, end)]


def text(message):
    size = message.size
    size = f" {size / 1000:.3g} kB" if size >= 1000 else f" {size} B" if size else ""
    source, target = message.ranks if message.name in ("send", "recv") else ("", "")
    peer = {"send": f" → {target}", "recv": f" ← {source}"}.get(message.name, "")
    return f"{message.name}{size}{peer}"


def rows(lanes):
    """Return [(time, {rank: Act})], in the order of time: one message, or what is none."""
    every = [(act.time, rank, act) for rank, lane in enumerate(lanes) for act in lane[:-1]]
    found = []
    for time, rank, act in sorted(every, key=lambda one: one[0]):
        begin, cells = found[-1] if found else (time, {})
        fits = all(act.meeting == other.meeting for other in cells.values())
        if not cells or rank in cells or not fits or time > begin + SLOT:
            cells = {}
            found.append((time, cells))
        cells[rank] = act
    return [*found, (None, {rank: lane[-1] for rank, lane in enumerate(lanes)})]


def draw(lanes, language):
    """Return the timeline as text."""
    width = (WIDTH - MARGIN) // len(lanes)
    heads = "".join(f"rank {rank}".ljust(width) for rank in range(len(lanes)))
    lines = [f"{'ms':>{MARGIN - 2}}  {heads}".rstrip()]
    table = rows(lanes)
    called = defaultdict(set)  # meeting: the ranks that have called it
    latest = {}  # rank: its last Act
    for time, cells in table:
        latest |= cells
        for rank, act in cells.items():
            called[act.meeting].add(rank)
        act = next(iter(cells.values()))
        joined = act.ranks if called[act.meeting] == {*act.ranks} else ()
        ms = "" if time is None else f"{(time - table[0][0]) * 1000:.0f}"
        line = f"{ms:>{MARGIN - 2}}  "
        for rank in range(len(lanes)):
            cell = mark(rank, latest.get(rank), cells, called, joined) if ms else "╵"
            if rank in cells:
                number = cells[rank].line or ""
                cell = f"{cell} {number:>3} {text_of(cells[rank].text, language)} "[:width]
            is_crossed = joined and min(joined) <= rank < max(joined)
            wide = sum(unicodedata.east_asian_width(letter) == "W" for letter in cell)
            line += cell.ljust(width - wide, "─" if is_crossed else " ")
        lines.append(line.rstrip())
    if len(lines) > FIRST + LAST:  # a hang is at the end
        lines = [*lines[:FIRST], " " * MARGIN + "...", *lines[-LAST:]]
    return "\n".join(lines)


def mark(rank, act, cells, called, joined):
    """Return the first character of a rank in a row, given its last Act.

    Args:
        cells: {rank: Act} of the row.
        called: {meeting: ranks that have called it}.
        joined: the ranks of a message that all have called now.
    """
    if rank in cells:
        return "●" if act.ranks else "│"
    if joined and min(joined) < rank < max(joined) and rank not in joined:
        return "┼"
    if act is None:
        return " "
    if {*act.ranks} - called[act.meeting]:
        return "┊"
    if act.meeting in [other.meeting for other in cells.values()] and act.ranks:
        return "┘" if rank == max(joined) else "└" if rank == min(joined) else "┴"
    return "│"
