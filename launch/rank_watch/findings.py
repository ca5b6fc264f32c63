"""Compare what the ranks did, and say what is wrong in sentences."""

import itertools
import math
from collections import Counter
from typing import NamedTuple

from rank_watch.calls import differences, join

SAME_SHARE = 0.1  # of the forward passes: fewer equal ones may be equal by chance
COPY = "docs/copy-setup-distributed.md"
DATA = "docs/data-loading.md"
SEED_WITH_RANK = "torch.manual_seed(2**16 * (seed + 1) + rank)"  # as in 03, 04 and 05
RIGHT_IN_PARTS = "Right if each rank holds a part of the model, or the weights are averaged later"
RIGHT_IF_SHARED = "Right if ranks share batches, as under model parallelism"


class Judgment(NamedTuple):
    """What a comparison of the ranks has shown."""

    found: list  # sentences on what is wrong, or may be
    notes: list  # what is right only in some cases, and what could not be seen
    compared: list  # what was equal, or different, as it should be


def judge(runs):
    """Return the Judgment on the runs of all ranks."""
    judgment = Judgment([], [], [])
    if any(run.joins for run in runs):
        judgment.notes.append(
            "under DistributedDataParallel.join() the ranks may make different numbers of training "
            "steps: their learning rates and weights were not compared"
        )
    else:
        check_settings(runs, judgment)
        check_weights(runs, judgment)
    if any(run.tensor_parallel for run in runs):
        judgment.notes.append(
            "under tensor parallelism ranks share batches and random numbers: neither was compared"
        )
    else:
        for check in (check_training_data, check_inputs, check_random_numbers, check_evaluation):
            check(runs, judgment)
    for check in (
        check_evaluated_model,
        check_accumulation,
        check_unused,
        check_files,
        check_calls,
    ):
        check(runs, judgment)
    return judgment


# The optimizer


def check_settings(runs, judgment):
    """Compare learning rates and other settings, loss scales, and numbers of training steps."""
    follow = different_follow(runs)
    all_steps = shared_steps(runs)
    settings = [[step["settings"] for step in steps] for steps in all_steps]
    if different := first_difference(settings):
        k, settings = different
        name, values = different_setting(settings)
        remedy = "All ranks must have the same schedule: compute it from the training step"
        if follow:
            remedy = (
                f"{follow}: all ranks must decide on one number, so sum it over the ranks before"
            )
        judgment.found.append(
            f"the {name} of the ranks differs in training step {k + 1}: "
            f"{values_of(runs, values)}. {remedy} ({COPY})"
        )
    elif follow:
        judgment.found.append(
            f"{follow}: the learning rates of the ranks will differ. All ranks must decide on one "
            f"number: sum it over the ranks before ({COPY})"
        )
    elif any(settings):
        judgment.compared.append("the same learning rates")
    if different := first_difference([run.scales for run in runs]):
        k, scales = different
        judgment.found.append(
            f"the loss scales of the ranks differ after update {k + 1}: {values_of(runs, scales)}. "
            "A rank skipped a step that the others made: their gradients were not averaged"
        )
    counts = [len(steps) for steps in all_steps]
    ended = all(run.end and run.end["why"] == "end" for run in runs)
    if ended and not equal(counts):
        judgment.found.append(
            f"the ranks made different numbers of training steps: {values_of(runs, counts)}. Each "
            f"rank needs the same number of batches ({DATA}#uneven-shares)"
        )


def shared_steps(runs):
    """Return the steps of each rank, but those of an optimizer that not all ranks have."""
    of_ranks = [{step["optimizer"] for step in run.steps} for run in runs]
    shared = set.intersection(*of_ranks) or set.union(*of_ranks)
    return [[step for step in run.steps if step["optimizer"] in shared] for run in runs]


def different_setting(settings):
    """Return (name, values) of the first setting that differs between the ranks."""
    for groups in together(settings):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if not equal(values):
                return name, values
    return "number of parameter groups", [len(groups) for groups in settings]


def different_follow(runs):
    """Return what a scheduler followed, if that differs between the ranks, or None."""
    different = first_difference([[follow["value"] for follow in run.follows] for run in runs])
    if different is None:
        return None
    k, values = different
    line = runs[0].follows[k]["line"]
    return f"ReduceLROnPlateau.step() got {values_of(runs, values)} at {line}"


def check_weights(runs, judgment):
    """Compare the weights after each training step."""
    compared = set()
    for steps in map(in_one_order, together(shared_steps(runs))):
        k = steps[0]["k"]
        if not equal([step["optimizer"] for step in steps]):
            judgment.found.append(
                f"the ranks stepped different optimizers in training step {k + 1}: "
                f"{values_of(runs, [step['line'] for step in steps])}"
            )
            return
        different = different_places([step["weights"] for step in steps])
        if different:
            if equal([step["settings"] for step in steps]):
                judgment.found.append(explain_weights(runs, steps, different))
            return  # else other settings explain it, and were named
        note = (
            f"the ranks gave their parameters to {steps[0]['parameters']['name']} in another order "
            "(from a set?): right, but no rank can load the optimizer's state of another one"
        )
        if "was_sorted" in steps[0] and note not in judgment.notes:
            judgment.notes.append(note)
        known = [number for number in steps[0]["weights"] if number is not None]
        compared.add((steps[0]["optimizer"], len(known)))
    tensors = sum(count for _, count in compared)
    if tensors:
        judgment.compared.append(f"one model ({tensors} tensors of weights)")
    elif any(run.steps for run in runs):
        judgment.notes.append("sharded weights are not compared")


def in_one_order(steps):
    """Return the steps of the ranks, with the parameters in the order of the first rank, by name.

    An optimizer may get them from a set, whose order differs between processes.
    """
    keys = [
        list(zip(step["parameters"]["names"], step["parameters"]["models"], strict=True))
        for step in steps
    ]
    if equal(keys) or len(set(keys[0])) < len(keys[0]) or not equal([set(key) for key in keys]):
        return steps
    ordered = []
    for step, key in zip(steps, keys, strict=True):
        places = [key.index(one) for one in keys[0]]
        of = step["parameters"]
        of = of | {name: [of[name][k] for k in places] for name in ("names", "models", "before")}
        sorted_step = {name: [step[name][k] for k in places] for name in ("weights", "gradients")}
        ordered.append(step | sorted_step | {"parameters": of, "was_sorted": True})
    return ordered


def explain_weights(runs, steps, different):
    """Say why these weights differ after these steps, one per rank."""
    k = steps[0]["k"]
    optimizers = [step["parameters"] for step in steps]
    optimizer = optimizers[0]
    names = name_some([optimizer["names"][place] or "?" for place in different])
    models = {optimizer["models"][place] for place in different}
    passes = passes_before(runs[0], k, steps[0]["optimizer"])
    through = [forward for forward in passes if forward.ddp in models and forward.training]
    past = [forward for forward in passes if forward.inside in models and forward.ddp is None]
    page = COPY
    if not runs[0].models:
        cause = (
            "No DistributedDataParallel was made, so each rank trains a model of its own: wrap the "
            f"model. {RIGHT_IN_PARTS}"
        )
    elif None in models:
        cause = (
            "No DistributedDataParallel holds these parameters, so their gradients are not "
            "averaged: wrap their model too, and wrap it after the last layer is added or "
            f"unfrozen. {RIGHT_IN_PARTS}"
        )
    elif different_places([optimizer["before"] for optimizer in optimizers]):
        cause = (
            "They differed before the first step: the wrap makes them equal, so something changed "
            "them after it. Load weights on all ranks, or before the wrap"
        )
    elif "was_sorted" in steps[0] and not different_places([step["gradients"] for step in steps]):
        cause = (
            "Their gradients were equal, but the optimizer has its parameters in another order on "
            "each rank (from a set?): sort them by name"
        )
    elif not different_places([step["gradients"] for step in steps]):
        cause = "Their gradients were equal: the optimizer's state differs. Load it on all ranks"
    elif past and not through:
        cause = (
            "No forward pass of a DistributedDataParallel in training: at "
            f"{past[0].line} the model inside it is called, so the gradients are not averaged. "
            "Call the DistributedDataParallel"
        )
    elif through and through[-1].ddp not in steps[0]["ddps"]:
        cause = (
            f"The DistributedDataParallel that was called at {through[-1].line} is gone, so it "
            "does not average the gradients: make it once, and keep it in a variable"
        )
        page = "docs/concepts.md"
    elif through and not through[-1].sync:
        cause = (
            f"The last forward pass before the step, at {through[-1].line}, is under no_sync(), so "
            "the gradients are not averaged: leave the last micro-step out of it"
        )
        page = "docs/performance.md"
    else:
        cause = (
            "Their gradients differ: they were changed after they were averaged, or not averaged"
        )
    where = f"({optimizer['name']} at {steps[0]['line']})"
    return (
        f"the weights of the ranks differ after training step {k + 1} {where}: {names}. {cause} "
        f"({page})"
    )


def passes_before(run, k, optimizer):
    """Return the forward passes between the last step of this optimizer and its step k."""
    first = 1 + max((j for j in range(k) if run.steps[j]["optimizer"] == optimizer), default=-1)
    return [forward for forward in run.forwards if first <= forward.step <= k]


# The data


def check_training_data(runs, judgment):
    """Compare which samples each rank read to train."""
    for loaders in loaders_together(runs):
        if not all(loader.trains() for loader in loaders):
            continue
        line = loaders[0].line
        if not all(loader.known for loader in loaders):
            judgment.notes.append(
                f"the samples of the loader at {line} have no numbers (an IterableDataset, or "
                "indices of another kind), so only whole batches are compared"
            )
            continue
        if not check_data_sets(runs, loaders, judgment):
            continue
        problems = [
            check(runs, loaders)
            for check in (find_shared_samples, find_repeated_samples, find_missing_samples)
        ]
        problems = [problem for problem in problems if problem]
        judgment.found.extend(problems[:1])  # the others are its consequences
        if not problems:
            count = sum(len(epoch.indices) for loader in loaders for epoch in loader.epochs)
            judgment.compared.append(f"different data ({count:,} samples at {line})")
        check_order(runs, loaders, judgment)


def check_data_sets(runs, loaders, judgment):
    """Say whether the ranks read from one data set, or have divided it: so that they compare."""
    line = loaders[0].line
    if not equal([loader.base for loader in loaders]):
        sizes = values_of(runs, [f"{loader.base[1]} samples" for loader in loaders])
        judgment.notes.append(f"the ranks have different data sets at {line}: {sizes}")
        return False
    hashes = [loader.samples for loader in loaders]
    if all(hashes) and not equal(hashes):
        text = f"the data sets of the ranks at {line} have other samples at the same index"
        if any(one.sampler == "DistributedSampler" and one.replicas != 1 for one in loaders):
            judgment.found.append(
                f"{text}, and a DistributedSampler divides them by index: some samples are read by "
                "several ranks, others by none. Build the data set with the same seed and the same "
                "order of files on all ranks; if each rank has its own share already, give the "
                f"sampler num_replicas=1, rank=0 ({DATA})"
            )
        else:
            judgment.notes.append(
                f"{text}: right if each rank has its own share of the data, wrong if a split or a "
                "list of files differs by chance"
            )
        return False
    subsets = [loader.subset and set(loader.subset) for loader in loaders]
    if all(subsets) and not equal(subsets) and (shared := most_shared(subsets)):
        judgment.found.append(
            f"each rank has another Subset of the data at {line}: {len(subsets[0]):,} samples on "
            f"rank {runs[0].rank}, of which {shared:,} are on another rank too. A random split "
            "without a seed: one rank trains on samples that another rank holds back. Give "
            f"random_split() a generator with a fixed seed ({DATA})"
        )
        return False
    return True


def most_shared(sets):
    """Return the largest number of elements that two of these sets share."""
    return max(len(a & b) for a, b in itertools.combinations(sets, 2))


def find_shared_samples(runs, loaders):
    """Return a sentence if two ranks read the same samples in one epoch, or None."""
    loader = loaders[0]
    world_size = len(runs)
    where = f"({loader.sampler} at {loader.line})"
    use_sampler = USE_SAMPLER if runs[0].models else f"{USE_SAMPLER}. {RIGHT_IF_SHARED}"
    whole = all(one.share is not None and one.share >= (one.size or math.inf) for one in loaders)
    if loader.subset is not None and not most_shared([set(one.subset) for one in loaders]):
        return None  # a share that was taken by hand
    if draws_with_replacement(loaders):
        if whole:
            return (
                f"each of the {world_size} ranks draws {loader.share:,} samples per epoch from a "
                f"data set of {loader.size:,} {where}: {world_size} epochs in one. Give it "
                f"num_samples // {world_size}, and another seed on each rank ({COPY})"
            )
        if equal([one.epochs[0].indices for one in loaders]):
            return (
                f"all ranks draw the same samples {where}: seed each rank differently, after the "
                f"model is made ({COPY})"
            )
        return None
    for epoch in range(min(len(one.epochs) for one in loaders)):
        sets = [set(one.indices(epoch)) for one in loaders]
        shared = most_shared(sets)
        if shared < world_size:  # a DistributedSampler repeats up to world_size - 1 samples
            continue
        example = next(a & b for a, b in itertools.combinations(sets, 2) if a & b)
        seeds = [one.seed for one in loaders]
        remedy = use_sampler
        if not equal([str(seed) for seed in seeds]):
            remedy = (
                f"The seed of the {loader.sampler} differs: {values_of(runs, seeds)}. It must be "
                f"the same on all ranks ({DATA})"
            )
        elif loader.sampler == "DistributedSampler":
            remedy = f"Do all ranks call set_epoch() with the same number? ({WHY_SET_EPOCH})"
        return (
            f"two ranks read the same samples: {shared:,} of {len(sets[0]):,} samples of epoch "
            f"{epoch + 1} {where}, such as sample {min(example)}. {remedy}"
        )
    if whole and loader.sampler in ("RandomSampler", "SequentialSampler"):
        return (
            f"each of the {world_size} ranks reads the whole data set ({loader.size:,} samples per "
            f"epoch, {loader.sampler} at {loader.line}): {world_size} epochs in one. {use_sampler}"
        )
    return None


def draws_with_replacement(loaders):
    """Return whether the sampler of these loaders gives a sample several times on purpose."""
    loader = loaders[0]
    if loader.sampler in ("RandomSampler", "SequentialSampler", "DistributedSampler"):
        return loader.replacement
    epochs = [epoch for one in loaders for epoch in one.epochs]
    repeats = any(len(set(epoch.indices)) < len(epoch.indices) for epoch in epochs)
    return loader.replacement or repeats


WHY_SET_EPOCH = f"{DATA}#why-set_epoch"
USE_SAMPLER = f"Give the loader sampler=DistributedSampler(dataset) ({DATA}#who-gets-which-image)"


def find_repeated_samples(runs, loaders):
    """Return a sentence if a rank reads a sample twice in one epoch, or None."""
    if draws_with_replacement(loaders):
        return None
    for run, loader in zip(runs, loaders, strict=True):
        for number, epoch in enumerate(loader.epochs):
            repeated = {k: n for k, n in Counter(epoch.indices).items() if n > 1}
            if len(repeated) >= len(runs):
                return (
                    f"rank {run.rank} reads {len(repeated):,} samples more than once in epoch "
                    f"{number + 1} ({loader.sampler} at {loader.line}), such as sample "
                    f"{min(repeated)}: right only if the sampler should draw with replacement"
                )
    return None


def find_missing_samples(runs, loaders):
    """Return a sentence if no rank reads some samples of a whole epoch, or None."""
    loader = loaders[0]
    if loader.size is None or draws_with_replacement(loaders):
        return None
    if not all(one.epochs[0].ended for one in loaders):
        return None
    read = set().union(*(one.indices(0) for one in loaders))
    if loader.subset is None:
        missing = loader.size - len(read)
    else:
        missing = len(expected_samples(loaders) - read)
    dropped = sum(one.batch_size or 0 for one in loaders) if loader.drop_last else 0
    if missing <= dropped + len(runs):
        return None
    return (
        f"no rank reads {missing:,} of {loader.size:,} samples in epoch 1 ({loader.sampler} at "
        f"{loader.line}): each of {len(runs)} ranks should read one {ordinal(len(runs))}. Does the "
        f"sampler know another number of ranks? ({DATA}#who-gets-which-image)"
    )


def check_order(runs, loaders, judgment):
    """Compare the order of the samples in two epochs."""
    for loader in loaders:
        for epoch, (one, next_one) in enumerate(itertools.pairwise(loader.epochs)):
            count = min(len(one.indices), len(next_one.indices))
            same = one.indices[:count] == next_one.indices[:count]
            if not loader.shuffle or count < 4 or not same:
                continue
            remedy = "Call sampler.set_epoch(epoch) before each epoch"
            if loader.sampler != "DistributedSampler":
                remedy = "Its generator starts anew in each epoch"
            judgment.found.append(
                f"epochs {epoch + 1} and {epoch + 2} have the same order of samples "
                f"({loader.sampler} at {loader.line}). {remedy} ({WHY_SET_EPOCH})"
            )
            return
    if max(len(loader.epochs) for loader in loaders) < 2 and loaders[0].shuffle:
        judgment.notes.append(
            f"only one epoch of the loader at {loaders[0].line} was seen, so not whether the next "
            "one has another order: --epoch-steps 5"
        )


def check_inputs(runs, judgment):
    """Compare the inputs of the model in each training step, sample by sample."""
    passes = {}  # {model: [(its forward pass on the first rank, the inputs of all ranks)]}
    trained = [[f for f in run.forwards if f.training] for run in runs]
    for forwards in together([f for f in of_rank if f.inputs] for of_rank in trained):
        model = forwards[0].model
        if any(forward.model != model for forward in forwards):
            break
        inputs = [tuple(forward.inputs) for forward in forwards]
        passes.setdefault(model, []).append((forwards[0], inputs))
    if not passes and any(trained):
        judgment.notes.append("inputs of the model that are not tensors were not compared")
    known = [text for text in judgment.found if "same samples" in text or "whole data set" in text]
    any_same = False
    for model, all_inputs in passes.items():
        same = [(forward, inputs) for forward, inputs in all_inputs if len(set(inputs)) < len(runs)]
        if len(same) < len(all_inputs) and len({inputs[0] for _, inputs in same}) == 1:
            continue  # a fixed example to look at, among others that differ
        any_same = any_same or bool(same)
        if not same or known or len(same) < SAME_SHARE * len(all_inputs):
            continue
        if len({inputs[0] for _, inputs in all_inputs}) == 1 and len(all_inputs) > 1:
            judgment.notes.append(
                f"the input of {model} is the same in each training step, on all ranks: right in a "
                "benchmark"
            )
            continue
        inputs = same[-1][1]
        pairs = itertools.combinations(range(len(runs)), 2)
        a, b = next((a, b) for a, b in pairs if inputs[a] == inputs[b])
        judgment.found.append(
            f"ranks {runs[a].rank} and {runs[b].rank} have the same input in {len(same)} of "
            f"{len(all_inputs)} forward passes of {model} ({same[0][0].line}). Batches that are "
            "cut from the data in order must be cut from another part of it on each rank. Random "
            "batches and noise need another seed on each rank, set after the model is made: "
            f"{SEED_WITH_RANK}, and numpy's and Python's too if you draw with them. "
            f"{RIGHT_IF_SHARED} ({COPY})"
        )
    if passes and not any_same and not any("different data" in text for text in judgment.compared):
        count = sum(map(len, passes.values()))
        judgment.compared.append(f"different inputs ({count} forward passes)")


# Random numbers

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
}


def check_random_numbers(runs, judgment):
    """Compare the states of the generators of random numbers, where they moved."""
    if any("have the same input" in text for text in judgment.found):
        return  # random numbers are the cause, and were named
    places, names = [], []
    for span, where in SPANS.items():
        same = [source for source in SOURCES if draws_are_equal(runs, span, source)]
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
    for loaders in loaders_together(runs):
        states = [loader.worker_states for loader in loaders]
        if not all(states) or not loaders[0].trains():
            continue
        for k, source in enumerate(SOURCES):
            drawn = all(state[2 * k + 1] for state in states)
            if drawn and equal([state[2 * k] for state in states]):
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


# The evaluation


def check_evaluation(runs, judgment):
    """Compare which samples each rank evaluates."""
    seen = any(not forward.training for run in runs for forward in run.forwards)
    for loaders in loaders_together(runs):
        loader = loaders[0]
        if any(one.trains() or not one.evaluates() for one in loaders):
            continue
        seen = True
        if not all(one.known for one in loaders) or loader.size is None:
            judgment.notes.append(f"the samples evaluated at {loader.line} have no numbers")
            continue
        if not all(one.epochs[0].ended for one in loaders) or loader.replacement:
            judgment.notes.append(f"no whole evaluation was seen at {loader.line}")
            continue
        sets = [set(one.indices(0)) for one in loaders]
        counts = Counter(k for one in loaders for k in one.indices(0))
        everything = expected_samples(loaders)
        twice = [k for k, count in counts.items() if count > 1]
        missing = everything - set(counts)
        parts = []
        if twice:
            parts.append(f"{len(twice):,} twice, such as sample {min(twice)}")
        if missing:
            parts.append(f"{len(missing):,} on no rank, such as sample {min(missing)}")
        if equal(sets) and len(sets[0]) == len(everything):
            judgment.notes.append(
                f"each rank evaluates all {len(everything):,} samples ({loader.line}): right if "
                "their counts are not summed over the ranks, but every rank does the same work"
            )
        elif parts:
            gathers = any("gather" in name for name, *_ in runs[0].messages)
            only_twice = gathers and not missing
            (judgment.notes if only_twice else judgment.found).append(
                f"of {len(everything):,} samples, the ranks evaluate {' and '.join(parts)} "
                f"({loader.sampler} at {loader.line}): the result depends on the number of ranks, "
                "unless you leave out the repeated ones after a gather. Give each rank "
                f"range(rank, len(dataset), world_size) ({DATA}#exact-evaluation)"
            )
        else:
            judgment.compared.append(f"each of {len(everything):,} samples evaluated once")
    if not seen:
        judgment.notes.append("no evaluation was seen: --epoch-steps 5, or --steps 0 to the end")


def expected_samples(loaders):
    if loaders[0].subset is None:
        return set(range(loaders[0].size))
    return set().union(*(one.subset for one in loaders))


def check_evaluated_model(runs, judgment):
    """Compare the weights and batch norm's running statistics with which the ranks evaluate."""
    if any("of the ranks differ" in text for text in judgment.found):
        return  # and so do these
    passes = [{(f.step, f.line, f.model): f for f in run.forwards if f.weights} for run in runs]
    for key in passes[0]:  # a rank may evaluate more than the others
        if not all(key in of_rank for of_rank in passes):
            continue
        forwards = [of_rank[key] for of_rank in passes]
        if different_places([forward.weights for forward in forwards]):
            what = "the weights of the evaluated model"
            remedy = (
                "If it trains, call its DistributedDataParallel; if it is a copy of the weights, "
                f"make it after the wrap ({COPY})"
            )
        elif different_places([forward.statistics or [] for forward in forwards]):
            what = "batch norm's running statistics"
            page = "docs/syncbn.md#running-statistics-and-the-evaluation"
            remedy = f"Broadcast the buffers of rank 0 before it ({page})"
        else:
            continue
        text = (
            f"{what} differ between the ranks in the evaluation after training step "
            f"{forwards[0].step} ({forwards[0].model} at {forwards[0].line}): each rank evaluates "
            "another model"
        )
        if any("each rank evaluates all" in note for note in judgment.notes):
            judgment.notes.append(f"{text}. Right if only one rank's result counts")
        else:
            judgment.found.append(f"{text}. {remedy}")
        return


# Work for nothing


def check_accumulation(runs, judgment):
    """Say so if the gradients are averaged in each micro-step of an accumulation."""
    run = runs[0]
    if len(run.optimizers) != 1:
        return  # a step of several models has several backward passes
    by_step = {}  # {training step: [(forward passes of a DDP, loaded batches) of a micro-step]}
    for step, forwards, batches in run.micro_steps:
        if step < len(run.steps):
            wrapped = [forward for forward in forwards if forward.ddp is not None]
            by_step.setdefault(step, []).append((wrapped, batches))
    loads = any(batches for passes in by_step.values() for _, batches in passes)
    for passes in by_step.values():
        averaged = all(len(wrapped) == 1 and wrapped[0].sync for wrapped, _ in passes)
        fresh = not loads or sum(batches for _, batches in passes) >= len(passes)
        if len(passes) < 2 or not averaged or not fresh:
            return
    if by_step:
        first = by_step[min(by_step)]
        line = first[0][0][0].line
        judgment.found.append(
            f"the gradients are averaged in each of the {len(first)} micro-steps of a training "
            f"step ({line}): correct, but {len(first)} times the messages. Put all but the last "
            "one under ddp.no_sync() (docs/performance.md)"
        )


def check_unused(runs, judgment):
    """Say so if every parameter is used, though DDP looks for unused ones in each step."""
    for models in together(run.models for run in runs):
        times = [model["times"] for model in models]
        if not all(times) or any(min(some) == 0 or min(some) != max(some) for some in times):
            continue
        judgment.found.append(
            f"find_unused_parameters=True of {models[0]['name']} is not needed: each parameter was "
            f"used in each of {times[0][0]} backward passes, and each step searches for unused "
            "ones. Right if later steps leave out a part of the model "
            "(docs/troubleshooting.md)"
        )


def check_files(runs, judgment):
    """Say so if several ranks of one machine write one file."""
    writers = {}
    for run in runs:
        for write in run.writes:
            ranks, modes, _ = writers.setdefault((run.host, write["path"]), (set(), set(), write))
            ranks.add(run.rank)
            modes.add(write["mode"])
    for (_, path), (ranks, modes, write) in writers.items():
        if len(ranks) == 1:
            continue
        text = f"{join(ranks)} write one file, {path} ({write['line']})"
        if modes == {"a"}:
            judgment.notes.append(f"{text}: their lines mix")
        else:
            judgment.found.append(
                f"{text}: they overwrite each other, and a reader may see half a file. Write on "
                "rank 0 only (docs/03_mnmc_ddp_launch.md#saving-and-exit)"
            )


def check_calls(runs, judgment):
    """Compare the collectives that all ranks have called."""
    if any_failed(runs):
        return
    answers = {run.rank: {"at": "the end", "calls": run.calls} for run in runs}
    for difference in differences(answers):
        if difference.kind == "differs":
            judgment.found.append(f"{difference.text} (docs/hangs.md)")


def explain_failure(runs):
    """Return a sentence on the first call in which the ranks differ, if some failed, or None."""
    if not any_failed(runs):
        return None
    for group in sorted({call[2] for run in runs for call in run.messages}):
        made = {run.rank: [call for call in run.messages if call[2] == group] for run in runs}
        if group:  # which ranks belong to it is known only from their calls
            made = {rank: calls for rank, calls in made.items() if calls}
        for calls in itertools.zip_longest(*made.values()):
            names = {call and call[0] for call in calls}
            if None in names and len(names) == 2:
                break  # a rank stopped before: the others wait for it
            if len(names) > 1:
                seen = "; ".join(
                    f"rank {rank}: {call[0]} at {call[1]}"
                    for rank, call in zip(made, calls, strict=True)
                    if call
                )
                return (
                    f"the ranks called different collectives: {seen}. All ranks must make the "
                    "same calls in the same order (docs/hangs.md)"
                )
    return None


# Helpers


def any_failed(runs):
    """Return whether a script failed, or a process ended without a word."""
    return not all(run.end and run.end["why"] != "failed" for run in runs)


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
