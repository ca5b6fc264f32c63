"""The gradients must be averaged after the backward pass, as torch's DDP averages them."""

from exercises.judge.judging import refuse, refuse_other_weights, sent_per_step
from exercises.judge.runner import ODD_MODEL, Setup
from exercises.sentences import say

SETUPS = [Setup(), Setup(program="torch_ddp.py"), ODD_MODEL]


def check(ranks, torch_ranks, odd_ranks):
    refuse_other_weights(ranks, torch_ranks, odd_ranks)
    first = max(map(messages_at_beginning, ranks))
    if not first:
        refuse(
            "The ranks begin with equal weights, but I see no message at the beginning: rank 0"
            " must send its weights, equal seeds are not enough."
        )
    theirs = sent_per_step(torch_ranks[0])
    return say(
        "after every training step, the weights are those of torch's DDP, up to rounding. Messages"
        " per step: {sent}; torch: {torch}. Messages at the beginning: {first}.",
        sent=sent_per_step(ranks[0]),
        torch=theirs,
        first=first,
    )


def messages_at_beginning(rank):
    kinds = [event.kind for event in rank.events]
    return kinds[: kinds.index("batch")].count("message")
