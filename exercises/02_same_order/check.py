"""Each epoch must have an order of its own, which is common to the ranks."""

from exercises.judge.judging import epochs, refuse, refuse_other_training
from exercises.sentences import say

IMAGES = 256
EPOCHS = 3


def check(ranks):
    of_epochs = epochs(ranks, EPOCHS)
    for k, parts in enumerate(of_epochs):
        if all(len(set(part)) == IMAGES for part in parts):
            refuse(
                "In epoch {epoch}, each rank reads all images: the ranks should share them.",
                epoch=k,
            )
        numbers = [number for part in parts for number in part]
        twice = len(numbers) - len(set(numbers))
        missing = IMAGES - len(set(numbers))
        if twice or missing:
            refuse(
                "In epoch {epoch}, {missing} images were read by no rank, and {twice} more than"
                " once: the ranks do not shuffle alike.",
                epoch=k,
                missing=missing,
                twice=twice,
            )
    for a in range(EPOCHS):
        for b in range(a):
            first, second = of_epochs[b][0], of_epochs[a][0]
            if first == second:
                refuse(
                    "Epochs {b} and {a} have the same images in the same order on rank 0,"
                    " beginning with {first}.",
                    b=b,
                    a=a,
                    first=first[:3],
                )
            if sorted(first) == sorted(second):
                refuse(
                    "Epochs {b} and {a} have other orders, but rank 0 reads the same half of the"
                    " images in both.",
                    b=b,
                    a=a,
                )
    refuse_other_training(ranks)
    return say("each epoch has an order of its own, and both ranks use it.")
