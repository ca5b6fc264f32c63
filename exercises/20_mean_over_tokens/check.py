"""The ranks must train on the mean over all tokens of a step, not on the mean of their means."""

from torch import nn

from exercises.judge.judging import (
    batches,
    compared,
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


def check_run(ranks):
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
                reason=why_other_weights(ranks, k, weights[k - 1], alone),
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


def why_other_weights(ranks, k, after, expected):
    """Return in words which loss leads to the weights after step k, or how its gradient differs."""
    before = values(ranks[0], "before")[k - 1]
    parts = [batches(rank)[k - 1] for rank in ranks]
    numbers = [number for part in parts for number in part]

    def leads_here(*gradients):
        """Return whether the mean of these gradients does."""
        means = [sum(some) / len(gradients) for some in zip(*gradients, strict=True)]
        weights = [w - before.lr * mean for w, mean in zip(before.weights, means, strict=True)]
        return same(weights, after, 1e-4)

    if leads_here(*[gradients(ranks[0], before, part, mean_over_tokens) for part in parts]):
        return say(": it is the mean of the means of the ranks, whose numbers of tokens differ")
    if leads_here(gradients(ranks[0], before, numbers, mean_with_padding)):
        return say(": the mean counts the padding too")
    return compared(ranks, k, after, expected)


def gradients(rank, step, numbers, loss):
    return gradients_of(rank, step.weights, numbers, loss=loss)
