"""Ranks and epochs must drop different activations, a second run the same ones."""

from itertools import combinations

from exercises.judging import refuse, refuse_repeated_run, same, say, values
from exercises.runner import Setup

SETUPS = [Setup(), Setup()]
EPOCHS = 2


def check(ranks, again):
    masks = [values(rank, "dropout") for rank in ranks]
    if not all(masks) or any(len(of_rank) % EPOCHS for of_rank in masks):
        refuse(
            f"I expected dropout in each step of {EPOCHS} epochs.",
            f"{EPOCHS} 个 epoch 的每一步都应该有 dropout。",
        )
    steps = len(masks[0]) // EPOCHS
    for k, (a, b) in enumerate(zip(*masks, strict=True)):
        if a.equal(b):
            refuse(
                f"In training step {k % steps} of epoch {k // steps}, both ranks drop the same"
                " activations.",
                f"第 {k // steps} 个 epoch 的第 {k % steps} 步，两个 rank 丢弃的激活相同。",
            )
    pieces = [(r, k) for r in range(len(ranks)) for k in range(steps * EPOCHS)]
    for (r, k), (s, m) in combinations(pieces, 2):
        if masks[r][k].equal(masks[s][m]):
            refuse(
                f"Rank {r} in epoch {k // steps} drops the same activations as rank {s} in epoch"
                f" {m // steps}.",
                f"rank {r} 在第 {k // steps} 个 epoch 丢弃的激活，"
                f"与 rank {s} 在第 {m // steps} 个 epoch 相同。",
            )
    first, second = (values(rank, "before")[0].weights for rank in ranks)
    if not same(first, second):
        refuse("The ranks begin with different weights.", "各 rank 的初始权重不同。")
    refuse_repeated_run(ranks, again)
    return say(
        "ranks and epochs drop different activations, and a second run drops the same.",
        "不同 rank、不同 epoch 丢弃的激活都不同，再运行一次结果相同。",
    )
