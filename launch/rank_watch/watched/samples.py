"""Ranks that read the same samples, though not in the same step."""

import itertools
import math

from rank_watch.compare import COPY, RIGHT_IF_SHARED

CHANCE = 0.01  # of a false alarm, if samples are drawn with replacement
NAMED = ("same samples", "whole data set", "have the same input", "Subset of the data", "data sets")


def install(recorder):
    """Nothing: the recorder notes the inputs of each forward pass."""


def judge(runs, judgment):
    named = any(words in text for words in NAMED for text in judgment.found)
    divided = any("different data" in text for text in judgment.compared)  # by index
    if len(runs) < 2 or named or divided or any(run.tensor_parallel for run in runs):
        return
    end = min((second_epoch(run) for run in runs), default=math.inf)
    of_ranks = [samples_of(run, end) for run in runs]
    # Where samples repeat by chance, a rank repeats its own as often as those of another rank. So
    # before a rank repeats one of its own, this many are those of another one with probability
    # CHANCE.
    enough = math.ceil(math.log(CHANCE) / math.log(1 - 1 / len(runs)))
    for (a, one), (b, other) in itertools.combinations(zip(runs, of_ranks, strict=True), 2):
        steps_of_one, steps_of_other = until_a_repetition(one, other)
        shared = steps_of_one.keys() & steps_of_other.keys()
        if len(shared) < enough:
            continue
        apart = {steps_of_other[sample] - steps_of_one[sample] for sample in shared}
        when = f"{abs(apart.pop())} steps apart" if len(apart) == 1 and apart != {0} else ""
        line = next(forward.line for forward in a.forwards if forward.training)
        judgment.found.append(
            f"ranks {a.rank} and {b.rank} train on the same samples{when and ', ' + when}: "
            f"{len(shared):,} of {len(steps_of_one):,} inputs of rank {a.rank} ({line}). Two "
            "causes fit: the data is not divided, so that each rank reads all of it in an order of "
            "its own, or goes on by its own batch and not by those of all ranks; or the numbers "
            f"that make the data have one seed on all ranks. {RIGHT_IF_SHARED} ({COPY})"
        )
        return


def second_epoch(run):
    """Return the training step before which a loader begins its second epoch."""
    begins = [
        loader.epochs[1].begins
        for loader in run.loaders
        if loader.trains() and len(loader.epochs) > 1
    ]
    return min(begins, default=math.inf)


def samples_of(run, end):
    """Return [(training step, hash of a sample)], in the order in which the rank trained."""
    return [
        (forward.step, sample)
        for forward in run.forwards
        if forward.training and forward.step < end
        for sample in forward.inputs or ()
    ]


def until_a_repetition(one, other):
    """Return {sample: its step} for two ranks, until one of them reads its own sample again."""
    seen = {}, {}
    for pair in zip(one, other, strict=False):
        for (step, sample), before in zip(pair, seen, strict=True):
            if before.setdefault(sample, step) != step:
                return seen
    return seen
