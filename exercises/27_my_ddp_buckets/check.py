"""The gradients must leave in a few buckets, while the backward pass runs."""

from exercises.judge.judging import (
    gradient_messages,
    refuse,
    refuse_late_messages,
    refuse_other_weights,
    sent_per_step,
    steps,
)
from exercises.judge.runner import THREE_RANKS, Setup
from exercises.sentences import say

TORCHS_DDP = Setup(program="../25_my_ddp/torch_ddp.py", environment={"MORE_LAYERS": 6})
SETUPS = [Setup(), TORCHS_DDP, THREE_RANKS]
BUCKETS = range(3, 6)  # 105 kB of gradients in buckets of about 40 kB


def check(ranks, torch_ranks, three_ranks):
    refuse_other_weights(ranks, torch_ranks, three_ranks)
    refuse_late_messages(ranks[0], allowed=1)  # the last bucket, which is not full
    count = len(gradient_messages(ranks[0])) / len(steps(ranks[0]))
    if count not in BUCKETS:
        refuse(
            "{count:g} messages per training step; expected three or four, of about 40 kB each.",
            count=count,
        )
    return say(
        "the buckets leave during the backward pass, and the weights are those of torch's DDP."
        " Messages per step: {sent}; torch: {torch}.",
        sent=sent_per_step(ranks[0]),
        torch=sent_per_step(torch_ranks[0]),
    )
