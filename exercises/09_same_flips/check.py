"""The ranks must draw different flips, a second run the same ones; they train one model."""

import torch

from exercises.judge.judging import (
    images,
    refuse,
    refuse_dependent_draws,
    refuse_different_weights,
    refuse_repeated_run,
    same,
    values,
)
from exercises.judge.runner import LATER, Setup
from exercises.sentences import say

SETUPS = [Setup(), LATER]
IMAGES = 128  # of each rank


def check(ranks, again):
    if not ranks[0].data.equal(ranks[1].data):
        refuse(
            "The ranks draw different images: set one seed for all ranks first, and the seed of"
            " the rank after the data are built."
        )
    flips = [flips_of(rank) for rank in ranks]
    a, b = (torch.cat(of_rank).tolist() for of_rank in flips)
    if len(a) != IMAGES or len(b) != IMAGES:
        refuse(
            "Each rank should train on {images} images; I see {a} and {b}.",
            images=IMAGES,
            a=len(a),
            b=len(b),
        )
    if not all(30 < sum(flips) < 98 for flips in (a, b)):
        refuse(
            "About a half of {images} images should be flipped on each rank; I see {a} and {b}.",
            images=IMAGES,
            a=sum(a),
            b=sum(b),
        )
    refuse_dependent_draws(flips)
    refuse_shared_images(ranks)
    refuse_other_models(ranks)
    for rank, second in zip(ranks, again, strict=True):
        if not same(flips_of(rank), flips_of(second)):
            refuse(
                "In a second run, rank {rank} flips other images: its random numbers do not"
                " follow from a seed.",
                rank=rank.rank,
            )
    refuse_repeated_run(ranks, again)
    return say("the ranks flip independently, and a second run flips as the first did.")


def flips_of(rank):
    """Return which images of each batch a rank flipped: a list of tensors of 0 and 1.

    A flipped image is not one of the data.
    """
    return [
        torch.tensor([int(number == -1) for number in batch]) for batch, _ in values(rank, "batch")
    ]


def refuse_shared_images(ranks):
    """Refuse ranks that train on the same images, as those show that are not flipped."""
    if both := set(images(ranks[0])) & set(images(ranks[1])) - {-1}:
        refuse(
            "{count} images were trained on several ranks, for example image {example}.",
            count=len(both),
            example=min(both),
        )


def refuse_other_models(ranks):
    first, second = (values(rank, "before")[0].weights for rank in ranks)
    if not same(first, second):
        refuse("The ranks begin with different weights.")
    refuse_different_weights(ranks)
