"""The gradients must be averaged while the backward pass runs, without waiting in it."""

from exercises.judge.judging import refuse_late_messages, refuse_other_weights, sent_per_step
from exercises.judge.runner import Setup
from exercises.sentences import say

TORCHS_DDP = Setup(program="../19_my_ddp/torch_ddp.py", environment={"MORE_LAYERS": 6})
SETUPS = [Setup(), TORCHS_DDP]


def check(ranks, torch_ranks):
    refuse_other_weights(ranks, torch_ranks)
    refuse_late_messages(ranks[0])
    return say(
        "the messages leave during the backward pass, and the weights are those of torch's DDP."
        " Messages per step: {sent}; torch: {torch}.",
        sent=sent_per_step(ranks[0]),
        torch=sent_per_step(torch_ranks[0]),
    )
