"""Ranks and epochs must drop different activations, a second run the same ones."""

from itertools import combinations

from exercises.judge.judging import (
    images,
    refuse,
    refuse_different_weights,
    refuse_repeated_run,
    refuse_unknown_images,
    values,
)
from exercises.judge.runner import LATER, Setup
from exercises.sentences import say

SETUPS = [Setup(), LATER]
EPOCHS = 2


def check(ranks, again):
    masks = [values(rank, "dropout") for rank in ranks]
    if not all(masks) or any(len(of_rank) % EPOCHS for of_rank in masks):
        refuse("I expected an nn.Dropout in each step of {epochs} epochs.", epochs=EPOCHS)
    for rank in ranks:
        refuse_unknown_images(images(rank))
    steps = len(masks[0]) // EPOCHS
    for k, (a, b) in enumerate(zip(*masks, strict=True)):
        if a.equal(b):
            refuse(
                "In training step {step} of epoch {epoch}, both ranks drop the same activations.",
                step=k % steps + 1,
                epoch=k // steps,
            )
    pieces = [(r, k) for r in range(len(ranks)) for k in range(steps * EPOCHS)]
    for (r, k), (s, m) in combinations(pieces, 2):
        if masks[r][k].equal(masks[s][m]):
            refuse(
                "Rank {rank} in step {step} of epoch {epoch} drops the same activations as rank"
                " {other} in step {other_step} of epoch {other_epoch}.",
                rank=r,
                step=k % steps + 1,
                epoch=k // steps,
                other=s,
                other_step=m % steps + 1,
                other_epoch=m // steps,
            )
    refuse_different_weights(ranks)
    refuse_repeated_run(ranks, again)
    return say("ranks and epochs drop different activations, and a second run drops the same.")
