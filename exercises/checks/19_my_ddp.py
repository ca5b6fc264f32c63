"""The gradients must be averaged after the backward pass, as torch's DDP averages them."""

from exercises.judging import messages, refuse_other_weights, say, sent_per_step
from exercises.runner import Setup

SETUPS = [Setup(), Setup(program="torch_ddp.py")]


def check(ranks, torch_ranks):
    refuse_other_weights(ranks, torch_ranks)
    theirs = sent_per_step(torch_ranks[0])
    return say(
        "after every training step, the weights are those of torch's DDP, bit for bit. Messages per"
        f" step: {sent_per_step(ranks[0])}; torch: {theirs}. Broadcasts at the beginning:"
        f" {len(messages(ranks[0], 'broadcast'))}.",
        "每个训练步之后，权重都与 torch 的 DDP 逐位相同。每步的消息："
        f"{sent_per_step(ranks[0])}；torch：{theirs}。开始时的 broadcast："
        f"{len(messages(ranks[0], 'broadcast'))} 次。",
    )
