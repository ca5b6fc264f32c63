"""The gradients must be averaged after the backward pass, as torch's DDP averages them."""

from exercises.judge.judging import refuse, refuse_other_weights, say, sent_per_step
from exercises.judge.runner import Setup

SETUPS = [Setup(), Setup(program="torch_ddp.py")]


def check(ranks, torch_ranks):
    refuse_other_weights(ranks, torch_ranks)
    first = max(map(messages_at_beginning, ranks))
    if not first:
        refuse(
            "The ranks begin with equal weights, but I see no message at the beginning: rank 0 must"
            " send its weights, equal seeds are not enough.",
            "各 rank 的初始权重相同，但开始时没有看到消息：rank 0 必须发送自己的权重，"
            "只让随机种子相同是不够的。",
        )
    theirs = sent_per_step(torch_ranks[0])
    return say(
        "after every training step, the weights are those of torch's DDP, bit for bit. Messages per"
        f" step: {sent_per_step(ranks[0])}; torch: {theirs}. Messages at the beginning: {first}.",
        "每个训练步之后，权重都与 torch 的 DDP 逐位相同。每步的消息："
        f"{sent_per_step(ranks[0])}；torch：{theirs}。开始时的消息：{first} 条。",
    )


def messages_at_beginning(rank):
    kinds = [event.kind for event in rank.events]
    return kinds[: kinds.index("batch")].count("message")
