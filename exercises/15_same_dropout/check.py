"""Ranks and epochs must drop different activations, a second run the same ones."""

from itertools import combinations

from exercises.judge.judging import (
    images,
    refuse,
    refuse_different_weights,
    refuse_repeated_run,
    refuse_unknown_images,
    say,
    values,
)
from exercises.judge.runner import LATER, Setup

SETUPS = [Setup(), LATER]
EPOCHS = 2


def check(ranks, again):
    masks = [values(rank, "dropout") for rank in ranks]
    if not all(masks) or any(len(of_rank) % EPOCHS for of_rank in masks):
        refuse(
            f"I expected an nn.Dropout in each step of {EPOCHS} epochs.",
            f"{EPOCHS} 个 epoch 的每一步都应该用到 nn.Dropout。",
        )
    for rank in ranks:
        refuse_unknown_images(images(rank))
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
                f"Rank {r} in step {k % steps} of epoch {k // steps} drops the same activations as"
                f" rank {s} in step {m % steps} of epoch {m // steps}.",
                f"rank {r} 在 epoch {k // steps} 的第 {k % steps} 步丢弃的激活值，"
                f"与 rank {s} 在 epoch {m // steps} 的第 {m % steps} 步丢弃的相同。",
            )
    refuse_different_weights(ranks)
    refuse_repeated_run(ranks, again)
    return say(
        "ranks and epochs drop different activations, and a second run drops the same.",
        "各个 rank、各个 epoch 丢弃的激活值都不同；再运行一次，丢弃的与第一次相同。",
    )
