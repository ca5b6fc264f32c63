"""What the comparisons of the ranks share."""

import itertools
from typing import NamedTuple

from rank_watch.calls import join

COPY = "docs/copy-setup-distributed.md"
DATA = "docs/data-loading.md"
SEED_WITH_RANK = "torch.manual_seed(2**16 * (seed + 1) + rank)"  # as in 03, 04 and 05
RIGHT_IN_PARTS = (
    "Right if each rank holds a part of the model or trains one of an ensemble, or the weights are "
    "averaged later"
)
UNKNOWN = "Their gradients differ: they were changed after they were averaged, or not averaged"
RIGHT_IF_SHARED = "Right if ranks share batches, as under model parallelism"


class Judgment(NamedTuple):
    """What a comparison of the ranks has shown."""

    found: list  # sentences on what is wrong, or may be
    notes: list  # what is right only in some cases, and what could not be seen
    compared: list  # what was equal, or different, as it should be


def together(lists):
    """Yield what the ranks have at the same place of their lists, up to the end of the shortest."""
    return zip(*lists, strict=False)


def equal(values):
    """Return whether the values of all ranks are equal: NaN equals NaN."""
    return all(value == values[0] or repr(value) == repr(values[0]) for value in values)


def first_difference(lists):
    """Return (place, values of the ranks) of the first place at which lists differ, or None."""
    places = enumerate(together(lists))
    return next(((place, values) for place, values in places if not equal(values)), None)


def most_shared(sets):
    """Return the largest number of elements that two of these sets share."""
    return max(len(a & b) for a, b in itertools.combinations(sets, 2))


def different_places(lists):
    """Return the places at which lists of numbers differ. None is unknown."""
    return [
        place
        for place, numbers in enumerate(together(lists))
        if len({number for number in numbers if number is not None}) > 1
    ]


def values_of(runs, values):
    """Return a value per rank as people write it: "0.1 on rank 0, 0.01 on rank 1"."""
    ranks = {}
    for run, value in zip(runs, values, strict=True):
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        ranks.setdefault(text, []).append(run.rank)
    return ", ".join(f"{text} on {join(some)}" for text, some in ranks.items())


def name_some(names):
    shown = ", ".join(names[:2])
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


def ordinal(count):
    return {2: "half", 3: "third", 4: "quarter"}.get(count, f"{count}th")


def loaders_together(runs):
    """Yield the loaders that all ranks have, by line and order: a list with one per rank."""
    by_line = []
    for run in runs:
        loaders = {}
        for loader in run.loaders:
            loaders.setdefault(loader.line, []).append(loader)
        by_line.append(loaders)
    for line in by_line[0]:
        yield from together(loaders.get(line, []) for loaders in by_line)


def expected_samples(loaders):
    if loaders[0].subset is None:
        return set(range(loaders[0].size))
    return set().union(*(one.subset for one in loaders))
