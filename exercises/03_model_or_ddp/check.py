"""The ranks must train one model, with the gradients of all ranks."""

from exercises.judge.judging import refuse_other_training, refuse_repeated_images, steps
from exercises.sentences import say


def check(ranks):
    refuse_other_training(ranks)
    refuse_repeated_images(ranks, 256)
    count = len(steps(ranks[0]))
    return say(
        "after each of {count} training steps, the ranks had the same weights as one process that"
        " trains on the images of both.",
        count=count,
    )
