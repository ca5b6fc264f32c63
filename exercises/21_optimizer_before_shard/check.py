"""The optimizer must train the shards of the model, and each rank must hold its part of them."""

import pickle

import torch
from torch import nn

from exercises.judge.judging import (
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    steps,
    values,
)
from exercises.sentences import say

WEIGHTS = 676  # numbers in the whole model


def check(ranks):
    for rank in ranks:
        before = values(rank, "before")
        if not before:
            refuse("I see no training step: expected a call of `optimizer.step()`.")
        refuse_other_parameters(rank, before[0])
    refuse_repeated_images(ranks, 256, of=2)
    put_shards_together(ranks)
    refuse_other_training(ranks)
    return say("the optimizer trains the shards, and each rank holds half of the weights.")


def refuse_other_parameters(rank, step):
    """Refuse an optimizer whose first Step is not that of all shards of this rank."""
    without = sum(gradient is None for gradient in step.gradients)
    if without:
        refuse(
            "{without} of {count} parameters of the optimizer of rank {rank} have no gradient:"
            " they are not those of the model any more.",
            without=without,
            count=len(step.gradients),
            rank=rank.rank,
        )
    held = sum(weights.numel() for weights in step.weights)
    if held != WEIGHTS // 2:
        refuse(
            "The optimizer of rank {rank} trains {held} numbers of {weights}; expected half of"
            " them, which fully_shard leaves on a rank.",
            rank=rank.rank,
            held=held,
            weights=WEIGHTS,
        )


def put_shards_together(ranks):
    """Put the whole weights into the Steps and the variable `model` of each Record."""
    for kind in ("before", "step"):
        for parts in zip(*[values(rank, kind) for rank in ranks], strict=False):
            shards = zip(*[part.weights for part in parts], strict=True)
            whole = [torch.cat(some) for some in shards]
            for part in parts:
                part.weights[:] = whole
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for parameter, weights in zip(model.parameters(), steps(ranks[0])[-1].weights, strict=True):
        parameter.data = weights
    for rank in ranks:
        rank.variables["model"] = pickle.dumps(model)
