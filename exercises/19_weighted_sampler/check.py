"""The ranks must share one weighted draw in each epoch, and divide it."""

from collections import Counter

from exercises.judge.judging import (
    check_twice,
    epochs,
    images,
    refuse,
    refuse_other_training,
    refuse_unknown_images,
)
from exercises.judge.runner import THREE_RANKS, Setup
from exercises.sentences import say

SETUPS = [Setup(), THREE_RANKS]
EPOCHS = 2
DRAWN = 96  # images of an epoch, on all ranks
RARE = 30  # the first images; 96 images with these weights hold all of them, else about 12
ENOUGH = 25  # of the rare ones


def check(*runs):
    return check_twice(check_draws, runs, say("With three ranks"))


def check_draws(ranks):
    if not any(map(images, ranks)):
        refuse("I see no image that is trained: call the model with the images.")
    parts = epochs(ranks, EPOCHS)
    drawn = [[number for part in epoch for number in part] for epoch in parts]
    for k, (epoch, numbers) in enumerate(zip(parts, drawn, strict=True)):
        refuse_unknown_images(numbers)
        refuse_other_draw(k, epoch, numbers)
    if set(drawn[0]) == set(drawn[1]):
        refuse("Both epochs train on the same images: draw again in each epoch.")
    refuse_other_training(ranks)
    return say(
        "the ranks share one draw of {drawn} images in each epoch, and divide it.", drawn=DRAWN
    )


def refuse_other_draw(k, epoch, numbers):
    """Refuse the draw of epoch k, given by the images of each rank and of all ranks."""
    if all(sorted(part) == sorted(epoch[0]) for part in epoch):
        refuse(
            "In epoch {epoch}, all ranks trained on the same {count} images: no rank has a part of"
            " its own.",
            epoch=k,
            count=len(epoch[0]),
        )
    if len(numbers) != DRAWN:
        refuse(
            "In epoch {epoch}, the ranks trained on {count} images together; expected {drawn}.",
            epoch=k,
            count=len(numbers),
            drawn=DRAWN,
        )
    number, times = Counter(numbers).most_common(1)[0]
    if times > 1:
        refuse(
            "In epoch {epoch}, {repeated} images were drawn again after their first time, for"
            " example image {number}. The ranks must share one draw without replacement.",
            epoch=k,
            repeated=len(numbers) - len(set(numbers)),
            number=number,
        )
    rare = sum(number < RARE for number in numbers)
    if rare < ENOUGH:
        refuse(
            "In epoch {epoch}, {rare} of the {count} images of the rare class were trained; with"
            " these weights, it is about all of them.",
            epoch=k,
            rare=rare,
            count=RARE,
        )
