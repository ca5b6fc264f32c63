"""Rank 0 must print the mean loss of all images."""

import re

import torch
from torch import nn

from exercises.judge.judging import classes, evaluated, refuse, variable
from exercises.judge.runner import OTHER_IMAGES, Setup
from exercises.sentences import say

SETUPS = [Setup(), OTHER_IMAGES]
OF_RANKS = (70, 30)  # images
BATCH = 16
TOLERANCE = 1e-4  # the program prints four digits


def check_run(ranks):
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
        refuse(
            "Rank 0 printed {number:.4f}, but the mean loss of the 100 images is {truth:.4f}{why}.",
            number=number,
            truth=truth,
            why=why_wrong(number, losses),
        )
    return say("{number:.4f} is the mean loss of 100 images.", number=number)


def why_wrong(number, losses):
    """Return in words of what a wrong number is the mean, if it is one that people write."""
    of_ranks = losses.split(OF_RANKS)
    batches = [[batch.mean() for batch in part.split(BATCH)] for part in of_ranks]
    exact = torch.stack([part.mean() for part in of_ranks])
    rough = torch.stack([torch.stack(part).mean() for part in batches])  # on each rank
    shares = torch.tensor(OF_RANKS) / len(losses)
    if min(abs(number - float(means.mean())) for means in (exact, rough)) < TOLERANCE:
        return say(
            ". It is the mean of the means of the ranks, but rank 0 has 70 images and rank 1 has 30"
        )
    all_batches = torch.stack([mean for part in batches for mean in part])
    if min(abs(number - float(x)) for x in (rough @ shares, all_batches.mean())) < TOLERANCE:
        return say(
            ". It is a mean of the means of batches, but the last batch of a rank is smaller: it"
            " has 6 images, or 14"
        )
    return ""
