"""The evaluation: samples, models, and results in parts that no rank adds up."""

from collections import Counter

from rank_watch.calls import join
from rank_watch.compare import (
    COPY,
    DATA,
    different_places,
    equal,
    expected_samples,
    loaders_together,
    most_shared,
)

SUMS = ("reduce", "gather", "all_to_all")  # in the names of collectives that bring results together


def install(recorder):
    """Nothing: the recorder notes forward passes and collectives."""


def judge(runs, judgment):
    if not any(run.tensor_parallel for run in runs):
        check_evaluation(runs, judgment)
    check_evaluated_model(runs, judgment)
    check_sums(runs, judgment)
    check_alone(runs, judgment)


def check_alone(runs, judgment):
    """Say so if some ranks evaluate alone, and the others learn nothing of it."""
    alone = [run for run in runs if any(not forward.training for forward in run.forwards)]
    if len(alone) in (0, len(runs)):
        return
    line, calls = next(evaluations(alone[0], all_write=False), ("", ["unknown"]))
    if not calls:
        judgment.notes.append(
            f"only {join([run.rank for run in alone])} evaluates ({line}), and no collective tells "
            "the others its result: right if no rank decides by it (to stop, or on a learning "
            "rate), and if it ends within the timeout of the process group, in which they wait"
        )


def check_sums(runs, judgment):
    """Say so if the ranks evaluate different parts, and nothing brings the results together."""
    named = any("ReduceLROnPlateau" in text for text in judgment.found)
    places = [loader.place() for loaders in in_parts(runs) for loader in loaders]
    if named or not places:
        return
    all_write = all(run.writes for run in runs)  # then they may put the parts together from files
    for line, calls in evaluations(runs[0], all_write, places):
        sums = [(name, size) for name, size in calls if any(word in name for word in SUMS)]
        if not sums:
            judgment.found.append(
                f"each rank evaluates its own part of the data at {line}, and no all_reduce or "
                "gather follows: what a rank prints, or decides, is about its part only. Sum the "
                f"totals and the counts over the ranks ({DATA}#exact-evaluation)"
            )
        elif len(sums) == 1 and "gather" in sums[0][0] and sums[0][1] > 1:
            judgment.notes.append(
                f"{sums[0][0]} after the evaluation at {line} returns one rank's samples after "
                "another's, not in the order of the data: right if the targets are gathered too, "
                "or the order is restored"
            )
        return


def in_parts(runs):
    """Yield the loaders, one per rank, with which the ranks evaluate different samples."""
    for loaders in zip(*(run.loaders for run in runs), strict=False):
        if not all(one.evaluates() and one.known and one.epochs[0].ended for one in loaders):
            continue
        if most_shared([set(loader.indices(0)) for loader in loaders]) <= len(runs):
            yield loaders


def evaluations(run, all_write, places=None):
    """Yield (line, [(collective, number of elements)]) of each evaluation after a training step.

    With places of loaders, an evaluation reads from them: a teacher or a frozen part of the model
    has forward passes on the batches that train.
    """
    line = None
    calls = []
    has_trained = False
    for kind, what, size in run.story:
        if kind == "evaluates":
            if line is None and (places is None or any(place in places for place in size)):
                line = what
        elif kind == "collective" and line:
            calls.append((what, size))
        elif kind == "writes":
            line = None if all_write else line
        else:  # it trains again, or the script ends
            if line and has_trained:
                yield line, calls
            line, calls = None, []
            has_trained = True


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
            remedy = "Give each rank"
            if missing and loader.drop_last:
                remedy = "Leave out drop_last=True, and give each rank"
            gathers = any("gather" in name for name, *_ in runs[0].messages)
            only_twice = gathers and not missing
            (judgment.notes if only_twice else judgment.found).append(
                f"of {len(everything):,} samples, the ranks evaluate {' and '.join(parts)} "
                f"({loader.sampler} at {loader.line}): the result depends on the number of ranks, "
                f"unless you leave out the repeated ones after a gather. {remedy} "
                f"range(rank, len(dataset), world_size) ({DATA}#exact-evaluation)"
            )
        else:
            judgment.compared.append(f"each of {len(everything):,} samples evaluated once")
    if not seen:
        judgment.notes.append("no evaluation was seen: --epoch-steps 5, or --steps 0 to the end")


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
