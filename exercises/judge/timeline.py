"""Draw what the ranks of a program did: a column for each rank, and time goes down.

    ms  rank 0                                       rank 1
     0  ●  22 broadcast 272 B ───────────────────────●  22 broadcast 272 B
     4  ●  31 all_reduce 272 B                       │
   203  └────────────────────────────────────────────●  31 all_reduce 272 B

Each message has its line of the program. ┊ is a rank that waits for others in its last message.
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


def acts(record):
    """Return the Acts of a rank. The last one says how the rank ended."""
    found, counts = [], Counter()
    for event in record.events:
        if event.kind in CALLS:
            found.append(Act(event.time, 0, CALLS[event.kind]))
        elif event.kind == "message":
            message = event.value
            name = message.name
            ranks = message.ranks
            size = f" {message.size} B" if message.size else ""
            if message.size >= 1000:
                size = f" {message.size / 1000:.3g} kB"
            peer = {"send": f" → {ranks[-1]}", "recv": f" ← {ranks[0]}"}.get(name, "")
            key = ("pair" if peer else name, ranks)
            counts[key] += 1
            meeting = (*key, counts[key])
            found.append(Act(event.time, message.line, f"{name}{size}{peer}", meeting, ranks))
    end = say("waits") if record.waits else say("ended")
    if record.signal or record.error:
        end = record.signal or record.error[0]
    return [*found, Act(0, record.line, end)]


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
    return found


def draw(lanes, language):
    """Return the timeline as text, given the acts() of each rank."""
    width = (WIDTH - MARGIN) // max(len(lanes), 1)
    lines = ["".join(f"rank {rank}".ljust(width) for rank in range(len(lanes)))]
    table = rows(lanes)
    called = defaultdict(set)  # meeting: the ranks that have called it
    latest = {}  # rank: its last Act
    for _, cells in table:
        latest |= cells
        act = next(iter(cells.values()))
        called[act.meeting] |= {*cells}
        joined = act.ranks if called[act.meeting] == {*act.ranks} else ()
        line = ""
        for rank in range(len(lanes)):
            cell = mark(rank, latest.get(rank), cells, called, joined)
            if rank in cells:
                cell += f" {cells[rank].line or '':>3} {cells[rank].text} "
            is_crossed = joined and min(joined) <= rank < max(joined)
            line += cell[:width].ljust(width, "─" if is_crossed else " ")
        lines.append(line)
    times = ["ms", *[f"{(time - table[0][0]) * 1000:.0f}" for time, _ in table], ""]
    ends = [f"╵ {lane[-1].line or '':>3} {text_of(lane[-1].text, language)}" for lane in lanes]
    wide = [sum(unicodedata.east_asian_width(x) == "W" for x in end) for end in ends]
    lines.append("".join(end.ljust(width - more) for end, more in zip(ends, wide, strict=True)))
    lines = [f"{t:>{MARGIN - 2}}  {line}".rstrip() for t, line in zip(times, lines, strict=True)]
    if len(lines) > FIRST + LAST:  # a hang is at the end
        lines = [*lines[:FIRST], " " * MARGIN + "...", *lines[-LAST:]]
    return "\n".join(lines)


def mark(rank, act, cells, called, joined):
    """Return the first character of a rank in a row, given its last Act.

    Args:
        cells: {rank: Act} of the row.
        called: {meeting: ranks that have called it}.
        joined: the ranks of the row's message, if all have called it now.
    """
    if rank in cells:
        return "●" if act.ranks else "│"
    if joined and rank not in joined and min(joined) < rank < max(joined):
        return "┼"
    if act is None:
        return " "
    if {*act.ranks} - called[act.meeting]:
        return "┊"
    if joined and act.meeting == next(iter(cells.values())).meeting:
        return "┘" if rank == max(joined) else "└" if rank == min(joined) else "┴"
    return "│"
