"""The ranks must share one weighted draw in each epoch, and divide it."""

from exercises.judge.judging import (
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


def check_run(ranks):
    if not any(map(images, ranks)):
        refuse("I see no image that is trained: call the model with the images.")
    drawn = [[n for part in epoch for n in part] for epoch in epochs(ranks, EPOCHS)]
    for k, numbers in enumerate(drawn):
        refuse_unknown_images(numbers)
        refuse_other_draw(k, numbers)
    if set(drawn[0]) == set(drawn[1]):
        refuse("Both epochs train on the same images: draw again in each epoch.")
    refuse_other_training(ranks)
    return say(
        "the ranks share one draw of {drawn} images in each epoch, and divide it.", drawn=DRAWN
    )


def refuse_other_draw(k, numbers):
    """Refuse the draw of epoch k, given by the images of all ranks."""
    if len(numbers) != DRAWN or len(set(numbers)) != DRAWN:
        refuse(
            "In epoch {epoch}, the ranks trained on {count} images together, {different} of them"
            " different; expected {drawn} different ones, of one draw that the ranks divide.",
            epoch=k,
            count=len(numbers),
            different=len(set(numbers)),
            drawn=DRAWN,
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
