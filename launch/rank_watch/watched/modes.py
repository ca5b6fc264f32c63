"""A model that trains in evaluation mode on some of the ranks."""

from rank_watch.compare import COPY, equal, together, values_of

EVALUATION = "evaluation mode"


def install(recorder):
    """Nothing: models.py notes forward and backward passes."""


def judge(runs, judgment):
    for micro_steps in together(run.micro_steps for run in runs):
        step = micro_steps[0][0]
        passes = [forwards for _, forwards, _ in micro_steps]
        if not all(passes) or any(other != step for other, *_ in micro_steps):
            return
        modes = [mode_of(of_rank) for of_rank in passes]
        if equal(modes):
            continue
        line = passes[modes.index(EVALUATION)][0].line
        judgment.found.append(
            f"the model is in another mode on each rank in training step {step + 1} "
            f"({values_of(runs, modes)}, {line}), so its dropout and batch norm do other things "
            "there. Call model.train() on all ranks after an evaluation, also if only one rank "
            f"evaluates ({COPY})"
        )
        return


def mode_of(passes):
    """Return the mode of the model in forward passes: training, if one of them is."""
    return "training mode" if any(forward.mode for forward in passes) else EVALUATION
