"""Compare the collectives that the ranks have called: which ranks wait, and for whom."""

from typing import NamedTuple

# collectives in which all ranks must have tensors of the same shape
EQUAL = ("all_reduce", "broadcast", "reduce", "all_gather", "_allgather_base", "_all_gather_base")


class Difference(NamedTuple):
    """The first call in which the ranks of a group differ, or wait."""

    kind: str  # "differs", "missing" or "waits": all ranks that answer are there
    text: str
    missing: list  # ranks that did not call it, if others wait for them


def differences(answers):
    """Return a Difference for each group of ranks that has one.

    `answers` is {rank: {"at": place, "calls": [(group, number, name, shapes, done, place), ...]}}.
    """
    found = []
    groups = {call[0] for answer in answers.values() for call in answer["calls"]}
    for group in sorted(groups):
        made = {
            rank: {call[1]: call for call in answer["calls"] if call[0] == group}
            for rank, answer in answers.items()
        }
        if group != "default_pg":  # which ranks belong to it is known only from their calls
            made = {rank: calls for rank, calls in made.items() if calls}
        if difference := compare(group, made, answers):
            found.append(difference)
    return found


def compare(group, made, answers):
    """Return the Difference of one group, or None. `made` is {rank: {number: call}}."""
    first = max((min(calls) for calls in made.values() if calls), default=0)  # all remember it
    for number in range(first, 1 + max(max(calls, default=0) for calls in made.values())):
        callers = {rank: calls[number] for rank, calls in made.items() if number in calls}
        if not callers:
            continue
        missing = sorted(made.keys() - callers.keys())
        kinds = {}
        for rank, (_, _, name, shapes, _, place) in sorted(callers.items()):
            text = f"{name} {shapes[0] if shapes else ''}".strip()
            kinds.setdefault(text if name in EQUAL else name, []).append((rank, text, place))
        call = f"call {number} of the group {group.partition(' ')[2] or group}"
        if len(kinds) > 1:
            text = f"{call} differs: " + "; ".join(
                f"{join(rank for rank, *_ in some)}: {some[0][1]} at {some[0][2]}"
                for some in kinds.values()
            )
            return Difference("differs", text, missing)
        (some,) = kinds.values()
        waits = f"{join(callers)} in {call}: {some[0][1]} at {some[0][2]}"
        if missing:
            places = "; ".join(f"rank {rank} is at {answers[rank]['at']}" for rank in missing)
            text = f"{waits}; {join(missing)} did not call it: {places}"
            return Difference("missing", text, missing)
        if not any(done for *_, done, _ in callers.values()):
            return Difference("waits", f"{waits}; all ranks that answer are there", [])
    return None


def join(ranks):
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
