"""The collectives that the ranks call."""

import functools
import itertools
import sys

from rank_watch.calls import differences
from rank_watch.hooks import after_import, replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("barrier", "monitored_barrier"),
)


class Collectives:
    def __init__(self, recorder):
        self.recorder = recorder
        self.inside = False  # a collective has called another one

    def communicate(self, name, real, *args, **kwargs):
        if self.inside or self.recorder.connection is None:
            return real(*args, **kwargs)
        self.inside = True  # all_gather_object() calls all_gather()
        size = next((arg.numel() for arg in args if isinstance(arg, torch.Tensor)), 0)
        group = group_of(args, kwargs)
        self.recorder.add("collective", name=name, line=own_line(), group=group, size=size)
        self.recorder.flush()
        try:
            return real(*args, **kwargs)
        finally:
            self.inside = False


def install(recorder):
    collectives = Collectives(recorder)
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        for name in COLLECTIVES:
            replace(owner, name, functools.partial(collectives.communicate, name))
    functional = "torch.distributed._functional_collectives"
    for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "broadcast"):
        function = functools.partial(collectives.communicate, name)
        after_import(functional, functools.partial(replace, name=name, function=function))


def group_of(args, kwargs):
    """Return the name of the process group in the arguments of a collective, or "": the default."""
    for value in (*args, *kwargs.values()):
        if (
            isinstance(value, torch.distributed.ProcessGroup)
            and value is not torch.distributed.group.WORLD
        ):
            return value.group_name
    return ""


def judge(runs, judgment):
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


def any_failed(runs):
    """Return whether a script failed, or a process ended without a word."""
    return not all(run.end and run.end["why"] != "failed" for run in runs)
