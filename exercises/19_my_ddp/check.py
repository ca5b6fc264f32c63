"""The gradients must be averaged after the backward pass, as torch's DDP averages them."""

from exercises.judge.judging import (
    refuse,
    refuse_other_weights,
    same,
    sent_per_step,
    steps,
    train_alone,
)
from exercises.judge.runner import Setup
from exercises.sentences import say

THREE_RANKS = Setup(local_ranks=(0, 1, 2), environment={"WORLD_SIZE": 3})
SETUPS = [Setup(), Setup(program="torch_ddp.py"), THREE_RANKS]


def check(ranks, torch_ranks, three_ranks):
    refuse_other_weights(ranks, torch_ranks)
    first = max(map(messages_at_beginning, ranks))
    if not first:
        refuse(
            "The ranks begin with equal weights, but I see no message at the beginning: rank 0"
            " must send its weights, equal seeds are not enough."
        )
    if not same(steps(three_ranks[0])[0].weights, train_alone(three_ranks)[0], 1e-4):
        refuse(
            "With two ranks, the weights are those of torch's DDP. With three ranks, they are not"
            " those of one process that trains on the images of all ranks."
        )
    theirs = sent_per_step(torch_ranks[0])
    return say(
        "after every training step, the weights are those of torch's DDP, bit for bit. Messages"
        " per step: {sent}; torch: {torch}. Messages at the beginning: {first}.",
        sent=sent_per_step(ranks[0]),
        torch=theirs,
        first=first,
    )


def messages_at_beginning(rank):
    kinds = [event.kind for event in rank.events]
    return kinds[: kinds.index("batch")].count("message")
