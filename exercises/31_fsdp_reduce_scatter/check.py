"""Each rank must get only its part of the mean of a gradient, and hold no whole one."""

from exercises.judge.judging import refuse
from exercises.judge.parts import (
    WEIGHTS,
    WHOLE,
    computed,
    plain_model,
    refuse_other_outputs,
    refuse_whole_weights,
    sent_in_first_step,
)
from exercises.judge.runner import FOUR_MEASURED, MEASURED
from exercises.sentences import say

SETUPS = [MEASURED, FOUR_MEASURED]


def check(*runs):
    for ranks in runs:
        refuse_other_outputs(ranks, plain_model())
        refuse_many_bytes(ranks)
        refuse_whole_weights(ranks)
    rank = runs[0][0]
    return say(
        "the outputs are those of one process. Rank 0 of two sends {sent:,.0f} bytes per training"
        " step, where DDP sends {ddp:,}. At the end of the backward pass it holds {held:,} bytes of"
        " weights and gradients, where DDP holds {whole:,}.",
        sent=sent_in_first_step(rank, 2),
        ddp=WHOLE,  # 2 (n - 1) / n of it
        held=computed(rank)[-1].held,
        whole=2 * WEIGHTS,
    )


def refuse_many_bytes(ranks):
    """Refuse more than two all-gathers of the weights and one reduce-scatter of the gradients."""
    count = len(ranks)
    needed = 3 * (count - 1) / count * WHOLE
    for rank in ranks:
        sent = sent_in_first_step(rank, count)
        if sent > 1.1 * needed:
            refuse(
                "With {count} ranks, rank {rank} sends {sent:,.0f} bytes per training step; two"
                " gathers of each weight and one reduce-scatter of each gradient need"
                " {needed:,.0f}.",
                count=count,
                rank=rank.rank,
                sent=sent,
                needed=needed,
            )
