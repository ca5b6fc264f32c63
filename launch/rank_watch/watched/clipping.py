"""Gradients that each rank clips by another norm."""

import math
import sys

from rank_watch.compare import COPY, UNKNOWN, equal, together, values_of
from rank_watch.hooks import replace
from rank_watch.places import own_line

torch = sys.modules.get("torch")
ROUNDING = 1e-3  # of a norm, by which ranks with other GPUs may differ


def install(recorder):
    def clip(real, *args, **kwargs):
        norm = real(*args, **kwargs)
        if isinstance(norm, torch.Tensor) and not hasattr(norm, "placements"):  # not of shards
            recorder.add("clip", norm=float(norm), line=own_line())
        return norm

    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(owner, "clip_grad_norm_", clip)


def judge(runs, judgment):
    if any(run.tensor_parallel for run in runs):
        return
    apart = next((text for text in judgment.found if "weights of the ranks differ" in text), "")
    if apart and UNKNOWN not in apart:
        return  # another cause was named
    steps = min(len(run.steps) for run in runs)
    clips = [[event for event in run.noted["clip"] if event["step"] < steps] for run in runs]
    counts = [len(of_rank) for of_rank in clips]
    text = None
    if not equal(counts):
        text = (
            f"clip_grad_norm_() was called {values_of(runs, counts)}: all ranks must clip, with "
            "the same parameters"
        )
    for events in together(clips):
        norms = [event["norm"] for event in events]
        if text or not all(map(math.isfinite, norms)):
            break
        if max(norms) - min(norms) > ROUNDING * max(norms):
            text = (
                f"clip_grad_norm_() at {events[0]['line']} gets another norm on each rank in "
                f"training step {events[0]['step'] + 1} ({values_of(runs, norms)}), so the ranks "
                "scale their gradients by other factors. Clip after they are averaged, with the "
                "same parameters on all ranks"
            )
    if text and apart:
        judgment.found[judgment.found.index(apart)] = apart.replace(UNKNOWN, text)
    elif text:
        judgment.found.append(f"{text} ({COPY})")
