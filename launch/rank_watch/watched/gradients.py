"""An optimizer whose parameters get no gradient, or never change."""

import sys

from rank_watch.places import own_line

if torch := sys.modules.get("torch"):
    from rank_watch.hashes import parameters_of
    from torch.optim.optimizer import register_optimizer_step_post_hook


def install(recorder):
    def after_step(optimizer, args, kwargs):  # LBFGS computes its gradients in the step
        parameters = parameters_of(optimizer)
        recorder.add(
            "gradients",
            name=type(optimizer).__name__,
            line=own_line(),
            count=len(parameters),
            reached=sum(p.grad is not None for p in parameters),
            known=sum(p in recorder.models.names for p in parameters),
            sharded=any(hasattr(p, "placements") for p in parameters),
        )

    register_optimizer_step_post_hook(after_step)


def judge(runs, judgment):
    by_line = {}
    for event in runs[0].noted["gradients"]:
        by_line.setdefault((event["name"], event["line"]), []).append(event)
    for (name, line), events in by_line.items():
        if len(events) < 2 or any(event["reached"] for event in events):
            continue
        cause = (
            "None of them belongs to a model that was called: the optimizer was made before "
            "fully_shard(), or before the model was moved or built anew. Make it last"
        )
        if events[-1]["known"] and not events[-1]["sharded"]:
            cause = "The model got new parameters after the optimizer was made: make it last"
        elif events[-1]["known"]:
            cause = (
                "Two causes fit: the model got new parameters after the optimizer was made, so "
                "make it last; or under FSDP the gradients are never synchronized, so call "
                "set_requires_gradient_sync(True) before the last micro-step"
            )
        judgment.found.append(
            f"{name} at {line} made {len(events)} training steps, and none of its "
            f"{events[-1]['count']} parameters ever got a gradient: it trains nothing. {cause} "
            "(docs/07_fsdp.md)"
        )
    check_changes(runs[0], judgment)


def check_changes(run, judgment):
    """Say so if no weight of an optimizer ever changes, though they have gradients."""
    by_optimizer = {}
    for step in run.steps:
        by_optimizer.setdefault(step["optimizer"], []).append(step)
    for steps in by_optimizer.values():
        weights = [step["weights"] for step in steps]
        settings = [group.get("lr") for step in steps for group in step["settings"]]
        learns = any(isinstance(lr, float) and lr > 0 for lr in settings)
        has_gradients = any(step["gradients"] and any(step["gradients"]) for step in steps)
        known = any(number is not None for number in weights[0])
        if (
            len(steps) > 4
            and known
            and has_gradients
            and learns
            and all(numbers == weights[0] for numbers in weights)
        ):
            judgment.found.append(
                f"{steps[0]['parameters']['name']} at {steps[0]['line']} made {len(steps)} "
                "training steps, and changed none of its weights: a learning rate too small for "
                "their number format, or weights that are set back after each step"
            )
