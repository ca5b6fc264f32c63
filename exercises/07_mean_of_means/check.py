"""Rank 0 must print the mean loss of all images."""

import re

from torch import nn

from exercises.judge.judging import check_twice, classes, evaluated, refuse, variable
from exercises.judge.runner import OTHER_IMAGES, Setup
from exercises.sentences import say

SETUPS = [Setup(), OTHER_IMAGES]
OF_RANKS = (70, 30)  # images
TOLERANCE = 1e-4  # the program prints four digits


def check(*runs):
    return check_twice(check_images, runs, say("In a second run, with other images"))


def check_images(ranks):
    sizes = tuple(len(set(evaluated(rank))) for rank in ranks)
    if sizes != OF_RANKS:
        refuse(
            "Rank 0 evaluated {sizes[0]} images and rank 1 {sizes[1]}; expected {expected[0]} and"
            " {expected[1]}.",
            sizes=sizes,
            expected=OF_RANKS,
        )
    printed = re.findall(r"\d+\.\d+", ranks[0].output)
    if not printed:
        refuse("Rank 0 printed no mean loss.")
    number = float(printed[-1])
    outputs = variable(ranks[0], "model")(ranks[0].data)
    losses = nn.functional.cross_entropy(outputs, classes(ranks[0].data), reduction="none").detach()
    truth = float(losses.mean())
    if abs(number - truth) > TOLERANCE:
        of_ranks = float(losses[:70].mean() + losses[70:].mean()) / 2
        why = ""
        if abs(number - of_ranks) < TOLERANCE:
            why = say(
                ". It is the mean of the means of the ranks, but rank 0 has 70 images and rank 1"
                " has 30"
            )
        refuse(
            "Rank 0 printed {number:.4f}, but the mean loss of the 100 images is {truth:.4f}{why}.",
            number=number,
            truth=truth,
            why=why,
        )
    return say("{number:.4f} is the mean loss of 100 images.", number=number)
