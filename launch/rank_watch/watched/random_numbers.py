"""Random numbers that all ranks draw alike."""

import sys
import threading

from rank_watch.compare import DATA, SEED_WITH_RANK, equal, loaders_together

if torch := sys.modules.get("torch"):
    from rank_watch.hashes import random_states


class RandomNumbers:
    """Notes which random numbers the training draws, and when."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.states = {}  # source: hash

    def mark(self, span):
        """Note whether random numbers were drawn since the last mark, in the span that ends now."""
        if threading.get_ident() != self.recorder.thread:
            return
        for source, state in random_states(*self.recorder.loaders.map_style_data_sets()).items():
            before = self.states.get(source)
            self.states[source] = state
            if before is not None and before != state:
                self.recorder.add("draw", span=span, source=source, state=state)


def install(recorder):
    recorder.mark = RandomNumbers(recorder).mark


def judge(runs, judgment):
    if not any(run.tensor_parallel for run in runs):
        check_random_numbers(runs, judgment)


SPANS = {
    "loading": "while they load samples (crops and flips)",
    "outside": "between the forward passes (noise, random batches)",
    "forward": "in the forward pass (dropout)",
}

SOURCES = {
    "torch": "torch",
    "GPU": "torch on the GPU",
    "numpy": "numpy",
    "random": "Python's random",
    "own": "a generator of the data set itself",
}

OWN_GENERATOR = (
    "{where} draw the same random numbers while they load samples, from a generator that the data "
    "set, or a transform in it, made itself with one seed: the k-th sample of each rank is changed "
    "alike. Add the rank, and the number of the worker, to this seed, or draw from torch's "
    f"generator ({DATA}#random-augmentation)"
)


def check_random_numbers(runs, judgment):
    """Compare the states of the generators of random numbers, where they moved."""
    if any("have the same input" in text for text in judgment.found):
        return  # random numbers are the cause, and were named
    places, names, own = [], [], False
    for span, where in SPANS.items():
        same = [source for source in SOURCES if draws_are_equal(runs, span, source)]
        if "own" in same:
            same.remove("own")
            own = own or span == "loading"
        if span == "outside" and not {"torch", "GPU"} & set(same):
            continue  # more likely a choice that all ranks share
        if same:
            places.append(where)
            names += [SOURCES[source] for source in same if SOURCES[source] not in names]
    if places:
        judgment.found.append(
            f"all ranks draw the same random numbers {' and '.join(places)}, from "
            f"{' and '.join(names)}: seed with the rank after the model is made, "
            f"{SEED_WITH_RANK}. Right for a choice that all ranks must share, or if "
            f"you accept equal noise ({DATA}#random-augmentation)"
        )
    if own:
        judgment.found.append(OWN_GENERATOR.format(where="all ranks"))
    for loaders in loaders_together(runs):
        states = [loader.worker_states for loader in loaders]
        if not all(states) or not loaders[0].trains():
            continue
        for k, source in enumerate(SOURCES):
            drawn = all(state[2 * k + 1] for state in states)
            if drawn and equal([state[2 * k] for state in states]):
                if source == "own":
                    where = "the loader workers of all ranks"
                    judgment.found.append(OWN_GENERATOR.format(where=where))
                    break
                judgment.found.append(
                    f"the loader workers of all ranks draw the same random numbers "
                    f"({SOURCES[source]}, loader at {loaders[0].line}): the k-th image of each "
                    "rank is cropped and flipped alike. Seed with the rank before the loader is "
                    f"used: {SEED_WITH_RANK}, and add the rank to the seed of a "
                    f"worker_init_fn ({DATA}#random-augmentation)"
                )
                break


def draws_are_equal(runs, span, source):
    """Return whether all ranks drew the same numbers in this span, in each step but the first."""
    steps = [
        {step for step, name, kind in run.draws if (name, kind) == (span, source) and step > 0}
        for run in runs
    ]
    common = set.intersection(*steps)
    states = [[run.draws[step, span, source] for step in sorted(common)] for run in runs]
    return bool(common) and equal(states)
