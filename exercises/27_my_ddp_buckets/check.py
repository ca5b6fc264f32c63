"""The gradients must leave in a few buckets."""

from exercises.judge.judging import (
    gradient_messages,
    refuse,
    refuse_other_weights,
    sent_per_step,
    steps,
)
from exercises.judge.runner import ODD_MODEL, Setup
from exercises.sentences import say

SETUPS = [Setup(), Setup(program="../25_my_ddp/torch_ddp.py"), ODD_MODEL]
BUCKETS = range(3, 6)  # 105 kB of gradients in buckets of about 40 kB


def check(ranks, torch_ranks, odd_ranks):
    refuse_other_weights(ranks, torch_ranks, odd_ranks)
    refuse_other_buckets(ranks[0])
    return say(
        "the weights are those of torch's DDP. Messages per step: {sent}; torch: {torch}, as its"
        " buckets have 25 MB.",
        sent=sent_per_step(ranks[0]),
        torch=sent_per_step(torch_ranks[0]),
    )


def refuse_other_buckets(rank):
    count = len(gradient_messages(rank)) / len(steps(rank))
    if count not in BUCKETS:
        refuse(
            "{count:g} messages per training step; expected three or four, of about 40 kB each.",
            count=count,
        )
