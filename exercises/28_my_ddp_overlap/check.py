"""The buckets must leave while the backward pass runs."""

import importlib

from exercises.judge.judging import (
    gradient_messages,
    refuse_late_messages,
    refuse_other_weights,
    steps,
    values,
)
from exercises.sentences import say

buckets = importlib.import_module("exercises.27_my_ddp_buckets.check")
SETUPS = buckets.SETUPS


def check(ranks, torch_ranks, odd_ranks):
    refuse_other_weights(ranks, torch_ranks, odd_ranks)
    refuse_late_messages(ranks[0], allowed=1)  # the last bucket, which is not full
    buckets.refuse_other_buckets(ranks[0])
    return say(
        "the weights are those of torch's DDP. The first of {count:g} messages per step begins when"
        " the backward pass has computed {mine} of its {total} matrix products; torch: {torch}, as"
        " its buckets have 25 MB.",
        count=len(gradient_messages(ranks[0])) / len(steps(ranks[0])),
        mine=gradient_messages(ranks[0])[0].products,
        total=values(ranks[0], "backward")[0],
        torch=gradient_messages(torch_ranks[0])[0].products,
    )
