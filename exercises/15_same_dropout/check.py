"""Ranks and epochs must drop different activations, a second run the same ones."""

from itertools import combinations

import torch

from exercises.judge.judging import (
    images,
    refuse,
    refuse_dependent_draws,
    refuse_different_weights,
    refuse_repeated_images,
    refuse_repeated_run,
    refuse_unknown_images,
    values,
)
from exercises.judge.runner import LATER, Setup
from exercises.sentences import say

SETUPS = [Setup(), LATER]
EPOCHS = 2


def check(ranks, again):
    masks = [values(rank, "dropout") or values(rank, "zeros") for rank in ranks]
    if not all(masks) or any(len(of_rank) % EPOCHS for of_rank in masks):
        refuse("I expected dropout in each training step of {epochs} epochs.", epochs=EPOCHS)
    for rank in ranks:
        refuse_unknown_images(images(rank))
    refuse_repeated_images(ranks, 256, EPOCHS)
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
    refuse_dependent_draws(*[torch.cat([mask.flatten() for mask in of_rank]) for of_rank in masks])
    refuse_different_weights(ranks)
    refuse_repeated_run(ranks, again)
    return say("ranks and epochs drop different activations, and a second run drops the same.")
