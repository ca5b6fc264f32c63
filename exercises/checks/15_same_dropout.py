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
            f"{EPOCHS} 个 epoch 的每一步都应该用到 dropout。",
        )
    steps = len(masks[0]) // EPOCHS
    for k, (a, b) in enumerate(zip(*masks, strict=True)):
        if a.equal(b):
            refuse(
                f"In training step {k % steps} of epoch {k // steps}, both ranks drop the same"
                " activations.",
                f"在 epoch {k // steps} 的第 {k % steps} 步，两个 rank 丢弃的激活值相同。",
            )
    pieces = [(r, k) for r in range(len(ranks)) for k in range(steps * EPOCHS)]
    for (r, k), (s, m) in combinations(pieces, 2):
        if masks[r][k].equal(masks[s][m]):
            refuse(
                f"Rank {r} in epoch {k // steps} drops the same activations as rank {s} in epoch"
                f" {m // steps}.",
                f"rank {r} 在 epoch {k // steps} 中丢弃的激活值，"
                f"与 rank {s} 在 epoch {m // steps} 中丢弃的相同。",
            )
    first, second = (values(rank, "before")[0].weights for rank in ranks)
    if not same(first, second):
        refuse("The ranks begin with different weights.", "各 rank 的初始权重不同。")
    refuse_repeated_run(ranks, again)
    return say(
        "ranks and epochs drop different activations, and a second run drops the same.",
        "各个 rank、各个 epoch 丢弃的激活值都不同；再运行一次，丢弃的与第一次相同。",
    )
