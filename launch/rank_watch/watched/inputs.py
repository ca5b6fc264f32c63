"""Inputs of the model that are the same on two ranks in one training step."""

import itertools

from rank_watch.compare import COPY, RIGHT_IF_SHARED, SEED_WITH_RANK, together

SAME_SHARE = 0.1  # of the forward passes: fewer equal ones may be equal by chance

REPEATS = 0.8  # of the inputs of a rank are different: fewer are equal on two ranks by chance


def install(recorder):
    """Nothing: models.py notes the inputs of each forward pass."""


def judge(runs, judgment):
    """Compare the inputs of the model in each training step, sample by sample."""
    if any(run.tensor_parallel for run in runs):
        return
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
        own = {inputs[0] for _, inputs in all_inputs}
        if len(same) < len(all_inputs) and len(own) < REPEATS * len(all_inputs):
            continue  # data that repeats itself, on one rank too
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
