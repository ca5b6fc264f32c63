"""Each rank must keep about half of the momentum, and all must have the weights of plain SGD."""

from exercises.judge.judging import (
    refuse,
    refuse_unfinished_messages,
    same,
    say,
    variable,
    weights_of,
)
from exercises.judge.runner import Setup

SETUPS = [Setup(), Setup(program="torch_sgd.py")]


def check(ranks, torch_ranks):
    refuse_unfinished_messages(ranks[0], begin="step", end="batch")
    truth = weights_of(variable(torch_ranks[0], "model"))
    weights = [weights_of(variable(rank, "model")) for rank in ranks]
    if not same(*weights):
        refuse("At the end, the ranks have different weights.", "训练结束时，各 rank 的权重不同。")
    if not same(weights[0], truth):
        refuse(
            "The ranks have equal weights, but not those of an ordinary SGD with momentum.",
            "各 rank 的权重相同，但与普通的带动量的 SGD 不同。",
        )
    whole = momentum(torch_ranks[0])
    parts = [momentum(rank) for rank in ranks]
    if sum(parts) < whole:
        refuse(
            f"The optimizers of torch keep {sum(parts):,} bytes of momentum, of {whole:,}: please"
            " keep all of it there, so that I can count it.",
            f"动量共 {whole:,} 字节，两个 rank 的 torch 优化器只保存了 {sum(parts):,} 字节："
            "请把动量都放在 torch 的优化器里，这样才能统计。",
        )
    for rank, part in enumerate(parts):
        if part > 0.65 * whole:
            refuse(
                f"Rank {rank} keeps {part:,} bytes of momentum, of {whole:,}: expected about half.",
                f"动量共 {whole:,} 字节，rank {rank} 保存了 {part:,} 字节：应该只保存约一半。",
            )
    return say(
        f"the ranks keep {parts[0]:,} and {parts[1]:,} bytes of momentum instead of {whole:,}, and"
        " the weights are those of an ordinary SGD, bit for bit.",
        f"两个 rank 分别保存 {parts[0]:,} 和 {parts[1]:,} 字节的动量，"
        f"而不是 {whole:,} 字节；权重与普通的 SGD 逐位相同。",
    )


def momentum(rank):
    """Return the bytes of momentum in all optimizers that took part in the last training step."""
    kinds = [event.kind for event in rank.events]
    last = len(kinds) - kinds[::-1].index("backward")
    return sum(event.value.state_bytes for event in rank.events[last:] if event.kind == "step")
