"""A scheduler that is stepped once per rank in each training step."""

import itertools
import sys
from collections import Counter

from rank_watch.hooks import replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")


def install(recorder):
    def step(real, scheduler, *args, **kwargs):
        caller = sys._getframe(2)
        if "lr_scheduler" not in caller.f_code.co_filename:  # its first step, or in another one
            by_library = "accelerate" in caller.f_code.co_filename
            recorder.add("schedule", line=own_line(), id=id(scheduler), by_library=by_library)
        return real(scheduler, *args, **kwargs)

    base = torch.optim.lr_scheduler.LRScheduler
    for kind in vars(torch.optim.lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, base) and "step" in vars(kind):
            replace(kind, "step", step)


def judge(runs, judgment):
    run, world_size = runs[0], len(runs)
    by_scheduler = {}
    for event in run.noted["schedule"]:
        by_scheduler.setdefault(event["id"], []).append(event)
    for events in by_scheduler.values():
        per_step = Counter((event["step"], event["micro_step"]) for event in events)
        steps = sorted(step for step, _ in per_step)
        everywhere = all(b - a == 1 for a, b in itertools.pairwise(steps))
        if len(steps) < 3 or not everywhere or set(per_step.values()) != {world_size}:
            continue
        text = (
            f"the scheduler is stepped {world_size} times in each training step, once per rank "
            f"({events[0]['line']}): the schedule ends {world_size} times too early, unless its "
            f"length was multiplied by {world_size}"
        )
        remedy = "Step it once per training step (docs/concepts.md)"
        if events[0]["by_library"]:  # Accelerate does so by design
            judgment.notes.append(text)
        else:
            judgment.found.append(f"{text}. {remedy}")
        return
