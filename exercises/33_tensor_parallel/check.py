"""Each rank must hold 1 / n of the block, and send one all-reduce forward and one backward."""

import torch
from torch import nn

from exercises.judge.judging import refuse, refuse_torchs_own, values
from exercises.judge.parts import (
    first_gradients,
    linear,
    norm,
    refuse_other_outputs,
    sent_in_first_step,
)
from exercises.judge.runner import FOUR_RANKS, Setup
from exercises.sentences import say

SETUPS = [Setup(), FOUR_RANKS]
WHOLE, OTHERS = 2 * 64 * 512 * 4, (16 + 4) * 64 * 4  # bytes of the block, and of the other layers
MESSAGE = 32 * 64 * 4  # bytes of the output of the block


def check(*runs):
    for ranks in runs:
        refuse_torchs_own(ranks[0])
        refuse_other_outputs(ranks, plain_model(), why_other_outputs)
        refuse_whole_blocks(ranks)
        refuse_many_bytes(ranks)
    return say(
        "the outputs are those of one process. Each rank of two holds and computes half of the"
        " block, {held:,} bytes, and sends {sent:,.0f} bytes per training step. With FSDP, it would"
        " send {fsdp:,} for this block, whatever the batch.",
        held=WHOLE // 2,
        sent=sent_in_first_step(runs[0][0], 2),
        fsdp=WHOLE * 3 // 2,
    )


def plain_model():
    torch.manual_seed(0)
    first, last = nn.Linear(16, 64, bias=False), nn.Linear(64, 4, bias=False)
    block = linear(64, 512), nn.ReLU(), linear(512, 64)
    return nn.Sequential(first, nn.ReLU(), *block, nn.ReLU(), last)


def why_other_outputs(ranks, expected):
    """Say that the gradient of the first layer, which each rank has whole, is wrong, if so."""
    for rank in ranks:
        whole = [g for g in first_gradients(rank) if g.shape == expected[0].shape]
        if whole and not torch.allclose(whole[0], expected[0], rtol=0, atol=1e-5):
            return say(
                ". In the first step, the layer before the block gets on rank {rank} a gradient of"
                " norm {norm:.4f}, expected {expected:.4f}: the output of the block and the"
                " gradient of its input are sums over the ranks, each once",
                rank=rank.rank,
                norm=norm(whole),
                expected=norm(expected[:1]),
            )
    return ""


def refuse_whole_blocks(ranks):
    for rank in ranks:
        held = sum(w.nbytes for w in values(rank, "before")[0].weights) - OTHERS
        if held > 1.1 * WHOLE / len(ranks):
            refuse(
                "With {count} ranks, rank {rank} holds {held:,} bytes of the block; its part is"
                " {part:,}.",
                count=len(ranks),
                rank=rank.rank,
                held=held,
                part=WHOLE // len(ranks),
            )


def refuse_many_bytes(ranks):
    count = len(ranks)
    needed = 2 * 2 * (count - 1) / count * MESSAGE
    for rank in ranks:
        sent = sent_in_first_step(rank, count)
        if sent > 1.05 * needed:
            refuse(
                "With {count} ranks, rank {rank} sends {sent:,.0f} bytes per training step; two"
                " all-reduces of {message:,} bytes need {needed:,.0f}.",
                count=count,
                rank=rank.rank,
                sent=sent,
                message=MESSAGE,
                needed=needed,
            )
