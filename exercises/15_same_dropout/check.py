"""Ranks and epochs must drop different activations, a second run the same ones."""

from exercises.judge.judging import (
    refuse,
    refuse_dependent_draws,
    refuse_different_weights,
    refuse_repeated_images,
    refuse_repeated_run,
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
    refuse_repeated_images(ranks, 256, EPOCHS)
    refuse_dependent_draws(masks)
    refuse_different_weights(ranks)
    refuse_repeated_run(ranks, again)
    return say("ranks and epochs drop different activations, and a second run drops the same.")
