"""A training step must have 96 images and learning rate 0.5, on two processes and on three."""

from exercises.judge.judging import (
    batches,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    steps,
)
from exercises.judge.runner import Setup
from exercises.sentences import say

SETUPS = [Setup(), Setup(local_ranks=(0, 1, 2))]
IMAGES = 768
BATCH_SIZE = 96
LR = 0.5


def check(*runs):
    for ranks in runs:
        n = len(ranks)
        refuse_other_training(ranks)
        sizes = {sum(map(len, parts)) for parts in zip(*map(batches, ranks), strict=True)}
        if sizes != {BATCH_SIZE}:
            size = max(sizes - {BATCH_SIZE})
            refuse(
                "With {count} processes, a training step had {size} images instead of"
                " {batch_size}.",
                count=n,
                size=size,
                batch_size=BATCH_SIZE,
            )
        refuse_repeated_images(ranks, IMAGES)
        if wrong := [step.lr for step in steps(ranks[0]) if abs(step.lr - LR) > 1e-6]:
            refuse(
                "With {count} processes, the learning rate was {lr:g} instead of {expected}: the"
                " global batch size is that of one process, so the learning rate is too.",
                count=n,
                lr=wrong[0],
                expected=LR,
            )
    return say(
        "two and three processes train with {batch_size} images per step and learning rate"
        " {expected}.",
        batch_size=BATCH_SIZE,
        expected=LR,
    )
