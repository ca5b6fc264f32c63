"""The gradients must be averaged while the backward pass runs, without waiting in it."""

from exercises.judge.judging import (
    gradient_messages,
    refuse,
    refuse_late_messages,
    refuse_other_weights,
    sent_per_step,
    steps,
)
from exercises.judge.runner import ODD_MODEL, Setup
from exercises.sentences import say

TORCHS_DDP = Setup(program="../25_my_ddp/torch_ddp.py")
SETUPS = [Setup(), TORCHS_DDP, ODD_MODEL]
GRADIENTS = 105_232  # bytes of the gradients of all weights


def check(ranks, torch_ranks, odd_ranks):
    refuse_other_weights(ranks, torch_ranks, odd_ranks)
    count = len(steps(ranks[0]))
    sent = gradient_messages(ranks[0])
    refuse_late_messages(ranks[0])
    size = sum(message.size for message in sent if message.name != "recv") / count
    if size > 1.5 * GRADIENTS:
        refuse(
            "{size:,.0f} bytes of messages per training step, although the gradients have"
            " {gradients:,}: send each gradient once, and register each hook once.",
            size=size,
            gradients=GRADIENTS,
        )
    return say(
        "the messages leave during the backward pass, and the weights are those of torch's DDP."
        " Messages per step: {sent}; torch: {torch}.",
        sent=sent_per_step(ranks[0]),
        torch=sent_per_step(torch_ranks[0]),
    )
