"""The ranks must train on the mean over all tokens of a step, not on the mean of their means."""

import torch
from torch import nn

from exercises.judge.judging import (
    batches,
    check_twice,
    gradients_of,
    images,
    key,
    refuse,
    refuse_ranks_apart,
    same,
    train_alone,
    values,
    variable,
)
from exercises.judge.runner import THREE_RANKS, Setup
from exercises.sentences import say

SETUPS = [Setup(), THREE_RANKS]
SENTENCES, TOKENS = 96, 1232
PADDING, IGNORED = 0, -100


def check(*runs):
    return check_twice(check_tokens, runs, say("With three ranks"))


def check_tokens(ranks):
    for rank in ranks:
        number_sentences(rank)
    if int((ranks[0].data != PADDING).sum()) != TOKENS:
        refuse("The sentences are not those of the exercise: please keep the lines that make them.")
    numbers = [number for rank in ranks for number in images(rank)]
    if sorted(numbers) != list(range(SENTENCES)):
        refuse(
            "The ranks trained on {trained} of {count} sentences, in all {times} times: each should"
            " be trained once, by one rank.",
            trained=len({*range(SENTENCES)} & {*numbers}),
            count=SENTENCES,
            times=len(numbers),
        )
    weights = refuse_ranks_apart(ranks)
    for k, alone in enumerate(train_alone(ranks, loss=mean_over_tokens), 1):
        if not same(alone, weights[k - 1], 1e-4):
            refuse(
                "After training step {step}, the weights are not those of one process that trains"
                " on the mean over the tokens of all ranks{reason}.",
                step=k,
                reason=why_other_weights(ranks, k, weights[k - 1]),
            )
    return say("the ranks train on the mean over the tokens of all ranks, as one process does.")


def number_sentences(rank):
    """Put the numbers of sentences into a Record in place of their tokens."""
    rank.data = variable(rank, "tokens")
    numbers = {key(row[row != PADDING]): number for number, row in enumerate(rank.data)}
    for k, event in enumerate(rank.events):
        if event.kind == "batch":
            rows, is_training = event.value
            found = [numbers.get(key(row[row != PADDING]), -1) for row in rows]
            rank.events[k] = event._replace(value=(found, is_training))


def losses(model, tokens):
    """Return the loss of each token, and 0 for padding."""
    tags = (tokens % 4).masked_fill(tokens == PADDING, IGNORED)
    return nn.functional.cross_entropy(model(tokens).transpose(1, 2), tags, reduction="none")


def mean_over_tokens(model, tokens):
    return losses(model, tokens).sum() / (tokens != PADDING).sum()


def mean_with_padding(model, tokens):
    return losses(model, tokens).mean()


def why_other_weights(ranks, k, after):
    """Return in words which gradient leads to the weights after step k, if it is a known one."""
    before = values(ranks[0], "before")[k - 1]
    step = [(x - y) / before.lr for x, y in zip(before.weights, after, strict=True)]
    parts = [batches(rank)[k - 1] for rank in ranks]
    numbers = [number for part in parts for number in part]
    count = len(ranks)

    def gradients(numbers, loss=mean_over_tokens):
        return gradients_of(ranks[0], before.weights, numbers, loss=loss)

    expected = gradients(numbers)
    of_ranks = [gradients(part) for part in parts]
    if same(step, [sum(of_rank) / count for of_rank in zip(*of_ranks, strict=True)], 1e-4):
        return say(": it is the mean of the means of the ranks, whose numbers of tokens differ")
    if same(step, [gradient / count for gradient in expected], 1e-4):
        return say(
            ": the gradient is 1/{count} of what it should be, because DDP divides the sum of the"
            " ranks by their number",
            count=count,
        )
    if same(step, gradients(numbers, mean_with_padding), 1e-4):
        return say(": the mean counts the padding too")
    norm, right = (torch.cat([x.flatten() for x in some]).norm() for some in (step, expected))
    return say(
        ". The gradient has norm {norm:.4f}, expected {expected:.4f}",
        norm=float(norm),
        expected=float(right),
    )
