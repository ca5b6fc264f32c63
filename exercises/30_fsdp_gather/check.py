"""Each rank must hold its parts of the weights, and one whole weight while a layer computes."""

from exercises.judge.parts import (
    WEIGHTS,
    plain_model,
    refuse_other_outputs,
    refuse_whole_weights,
    usually_held,
)
from exercises.judge.runner import FOUR_MEASURED, MEASURED
from exercises.sentences import say

SETUPS = [MEASURED, FOUR_MEASURED]


def check(*runs):
    for ranks in runs:
        refuse_other_outputs(ranks, plain_model())
        refuse_whole_weights(ranks, holds_gradients=True)
    between, within = (usually_held(runs[0][0], name) for name in ("relu", "product"))
    return say(
        "the outputs are those of one process. In the forward pass, rank 0 of two holds {between:,}"
        " bytes of weights between two layers, and {within:,} while a layer computes. With DDP,"
        " each rank holds {whole:,}.",
        between=between,
        within=within,
        whole=WEIGHTS,
    )
