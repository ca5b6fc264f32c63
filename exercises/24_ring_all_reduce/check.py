"""Each rank must end with the sum, and send 2 (n - 1) / n of the tensor, without a collective."""

from exercises.judge.judging import NUMBER, refuse, values, variable
from exercises.judge.parts import refuse_forgotten_messages
from exercises.judge.runner import FOUR_RANKS, THREE_RANKS
from exercises.sentences import joined, say

SETUPS = [THREE_RANKS, FOUR_RANKS]


def check(*runs):
    for ranks in runs:
        total = sum(variable(rank, "before") for rank in ranks)
        for rank in ranks:
            refuse_other_messages(rank)
            refuse_wrong_sum(rank, total, len(ranks))
    sent = joined("{before}; {after}", [refuse_many_bytes(ranks) for ranks in runs])
    return say("each rank has the sum, and sends no more than it must: {sent}.", sent=sent)


def refuse_other_messages(rank):
    names = {message.name for message in values(rank, "message")}
    if others := names - {"send", "recv", "barrier"}:
        refuse(
            "The program calls dist.{name}, a collective: please use only messages from one rank to"
            " another, dist.isend and dist.irecv.",
            name=min(others),
        )


def refuse_wrong_sum(rank, total, count):
    result = variable(rank, "result")
    if wrong := int((result - total).abs().gt(1e-4).sum()):
        refuse(
            "With {count} ranks, {wrong:,} of {all:,} numbers on rank {rank} are not the sum over"
            " the ranks; {kept:,} are still its own.",
            count=count,
            wrong=wrong,
            all=len(total),
            rank=rank.rank,
            kept=int(result.eq(variable(rank, "before")).sum()),
        )
    refuse_forgotten_messages(rank)


def refuse_many_bytes(ranks):
    """Return in words what the ranks send, if no rank sends much more than a ring needs."""
    count = len(ranks)
    whole = variable(ranks[0], "before").nbytes
    sent = [sum(m.size for m in values(rank, "message") if m.name == "send") for rank in ranks]
    needed = 2 * (count - 1) / count * whole
    if not any(sent):
        refuse("The sums are right, but no rank sends anything: please use dist.isend.")
    if max(sent) > 1.02 * needed + NUMBER:
        refuse(
            "The sums are right, but with {count} ranks, rank {rank} sends {sent:,} bytes,"
            " {times:.2g} times the tensor. {needed:,.0f} are enough, 2 (n - 1) / n of it: cut the"
            " tensor into a part for each rank.",
            count=count,
            rank=sent.index(max(sent)),
            sent=max(sent),
            times=max(sent) / whole,
            needed=needed,
        )
    return say(
        "with {count} ranks at most {sent:,} bytes, and not {naive:,} as with whole tensors",
        count=count,
        sent=max(sent),
        naive=(count - 1) * whole,
    )
