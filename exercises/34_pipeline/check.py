"""Rank 0 must compute the next micro-batch while rank 1 computes one, and hold two at most."""

import torch
from torch import nn

from exercises.judge.judging import NUMBER, refuse, same, steps
from exercises.judge.parts import (
    first_gradients,
    first_step,
    norm,
    refuse_forgotten_messages,
    train_whole,
)
from exercises.sentences import say

MICRO_BATCHES = 4


def check(ranks):
    refuse_other_weights(ranks)
    refuse_waiting(ranks[0])
    for rank in ranks:
        refuse_forgotten_messages(rank)
    return say(
        "the weights are those of one process. Rank 0 holds at most 2 of {count} micro-batches. In"
        " the time of {slots} micro-batches, each rank waits for one; with whole batches it would"
        " wait half of the time.",
        count=MICRO_BATCHES,
        slots=MICRO_BATCHES + 1,
    )


def refuse_other_weights(ranks):
    if any(not steps(rank) for rank in ranks):
        refuse("I see no training step: expected a call of `optimizer.step()`.")
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    first = train_whole(model, ranks[0].data)
    weights = [weight for rank in ranks for weight in steps(rank)[-1].weights]
    if not same(weights, [parameter.detach() for parameter in model.parameters()], 1e-4):
        refuse(
            "The weights are not those of one process. In the first step, the gradients of the two"
            " ranks have the norms {norms[0]:.4f} and {norms[1]:.4f}; expected {expected[0]:.4f}"
            " and {expected[1]:.4f}, the mean over the whole batch.",
            norms=[norm(first_gradients(rank)) for rank in ranks],
            expected=[norm(first[:4]), norm(first[4:])],
        )


def refuse_waiting(rank):
    """Refuse a rank 0 that computes less, or more, than the next micro-batch ahead of rank 1."""
    forward = sum(event.kind == "batch" for event in first_step(rank))
    if forward != MICRO_BATCHES:
        refuse(
            "Rank 0 makes {forward} forward passes per batch; expected {count}: while one rank"
            " computes a part of it, the other can compute another one.",
            forward=forward,
            count=MICRO_BATCHES,
        )
    begun = sent = done = 0  # micro-batches
    for event in first_step(rank):
        begun += event.kind == "batch"
        sent += event.kind == "message" and event.value.name != "recv" and event.value.size > NUMBER
        if begun - done > 2:
            refuse(
                "Rank 0 holds the activations of {held} micro-batches: after the second one, it can"
                " wait for a gradient before it computes the next.",
                held=begun - done,
            )
        if event.kind == "backward":
            done += 1
            if sent < min(done + 1, MICRO_BATCHES):
                refuse(
                    "Rank 0 sends micro-batch {next} only after the backward pass of micro-batch"
                    " {done}: meanwhile, rank 1 has nothing to compute.",
                    next=done + 1,
                    done=done,
                )
