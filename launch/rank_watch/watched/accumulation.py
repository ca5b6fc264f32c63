"""Work for nothing: gradients averaged in each micro-step, and searches for unused parameters."""

from rank_watch.compare import together


def install(recorder):
    """Nothing: models.py notes forward and backward passes, and which parameters they use."""


def judge(runs, judgment):
    check_accumulation(runs, judgment)
    check_unused(runs, judgment)


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
