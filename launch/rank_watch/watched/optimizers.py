"""The optimizers: learning rates and other settings, weights after each step, loss scales."""

import contextlib
import sys

from rank_watch.compare import (
    COPY,
    DATA,
    RIGHT_IN_PARTS,
    UNKNOWN,
    different_places,
    equal,
    first_difference,
    name_some,
    together,
    values_of,
)
from rank_watch.hooks import replace
from rank_watch.places import own_line

if torch := sys.modules.get("torch"):
    from rank_watch.hashes import fingerprints, parameters_of
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )
    from torch.utils.weak import WeakIdKeyDictionary

SCHEDULED = ("lr", "momentum", "betas")  # settings of a parameter group that a scheduler changes
FIXED = ("weight_decay", "eps")  # and those that it leaves
SETTINGS = (*SCHEDULED, *FIXED)


class Optimizers:
    """Notes the weights, the gradients and the settings of each step."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.optimizers = WeakIdKeyDictionary()  # an optimizer: its number
        self.optimizer_count = 0  # of all that have stepped, also of those that are gone
        self.sizes = WeakIdKeyDictionary()  # of each optimizer: its parameters
        self.steps = WeakIdKeyDictionary()  # of each optimizer
        self.step_code = None  # of torch's function that calls the hooks around a step
        self.gradients = []
        self.before = []  # the weights before the step

    def before_step(self, optimizer, args, kwargs):
        self.step_code = sys._getframe(1).f_code
        if self.is_stepping(sys._getframe(2)):  # ZeroRedundancyOptimizer's
            return
        self.recorder.models.root = None
        parameters = parameters_of(optimizer)
        self.gradients = fingerprints(parameter.grad for parameter in parameters)
        self.before = fingerprints(parameters)
        if self.sizes.get(optimizer) != len(parameters):  # new, or with another group of parameters
            self.sizes[optimizer] = len(parameters)
            if optimizer not in self.optimizers:
                self.optimizers[optimizer] = self.optimizer_count
                self.optimizer_count += 1
            self.recorder.add(
                "optimizer",
                optimizer=self.optimizers[optimizer],
                name=type(optimizer).__name__,
                names=[self.recorder.models.names.get(parameter, "") for parameter in parameters],
                models=[self.recorder.models.held.get(parameter) for parameter in parameters],
            )

    def after_step(self, optimizer, args, kwargs):
        if self.is_stepping(sys._getframe(2)):
            return
        self.recorder.all_steps += 1
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        settings = [
            {name: group[name] for name in SETTINGS if name in group}
            for group in optimizer.param_groups
        ]
        self.recorder.mark("step")
        self.recorder.add(
            "step",
            optimizer=self.optimizers[optimizer],
            settings=settings,
            gradients=self.gradients,
            before=self.before,
            weights=fingerprints(parameters_of(optimizer)),
            ddps=list(self.recorder.models.ddps.values()),
            line=own_line(),
        )
        self.recorder.flush()
        if self.recorder.max_steps and self.steps[optimizer] >= self.recorder.max_steps:
            self.recorder.end_run(self.steps[optimizer])

    def scale(self, real, scaler, *args, **kwargs):
        result = real(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self.recorder.add("scale", value=scaler.get_scale())
        return result

    def follow(self, real, scheduler, metrics, *args, **kwargs):
        with contextlib.suppress(TypeError, ValueError):
            self.recorder.add("follow", value=float(metrics), line=own_line())
        return real(scheduler, metrics, *args, **kwargs)

    def is_stepping(self, frame):
        """Return whether an optimizer is in its step, in this frame or outside of it."""
        while frame and frame.f_code is not self.step_code:
            frame = frame.f_back
        return frame is not None


def install(recorder):
    optimizers = recorder.optimizers = Optimizers(recorder)
    register_optimizer_step_pre_hook(optimizers.before_step)
    register_optimizer_step_post_hook(optimizers.after_step)
    replace(torch.amp.GradScaler, "update", optimizers.scale)
    replace(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", optimizers.follow)


def judge(runs, judgment):
    if any(run.joins for run in runs):
        judgment.notes.append(
            "under DistributedDataParallel.join() the ranks may make different numbers of training "
            "steps: their learning rates and weights were not compared"
        )
        return
    check_settings(runs, judgment)
    check_weights(runs, judgment)


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
        of = of | {name: [of[name][k] for k in places] for name in ("names", "models")}
        sorted_step = {
            name: [step[name][k] for k in places] for name in ("weights", "gradients", "before")
        }
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
    if runs[0].noted["shard"]:
        cause = (
            "fully_shard() was called on parts of the model only: these weights are outside of "
            "all of them, so their gradients are not averaged. Call it on the whole model too, last"
        )
        page = "docs/troubleshooting.md, case 62"
    elif runs[0].noted["replicate"]:
        cause = (
            "replicate() averages gradients in hooks of the forward pass: call the module that it "
            "was given, model(...), not model.forward(...) or a method of a part"
        )
    elif not runs[0].models:
        cause = (
            "No DistributedDataParallel was made, so each rank trains a model of its own: wrap the "
            f"model. {RIGHT_IN_PARTS}"
        )
    elif None in models and runs[0].noted["not held"]:
        cause = (
            "They are in the model that a DistributedDataParallel wraps, but it does not hold "
            "them, so their gradients are not averaged: they are new since the wrap (the model was "
            "moved, got a layer, or loaded weights with assign=True), or were frozen then. Wrap "
            "the model afterwards"
        )
    elif None in models:
        cause = (
            "No DistributedDataParallel holds these parameters, so their gradients are not "
            "averaged: wrap their model too, and wrap it after the last layer is added or "
            f"unfrozen. {RIGHT_IN_PARTS}"
        )
    elif different_places([step["before"] for step in steps]):
        when = f"between training steps {k} and {k + 1}" if k else "before the first step"
        cause = (
            f"They differed {when}: the wrap makes them equal, so something changed them after it, "
            "such as a checkpoint, an average or a reset of weights on one rank. Do it on all "
            "ranks alike, or before the wrap"
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
        cause = f"{UNKNOWN}. {RIGHT_IN_PARTS}"
    where = f"({optimizer['name']} at {steps[0]['line']})"
    return (
        f"the weights of the ranks differ after training step {k + 1} {where}: {names}. {cause} "
        f"({page})"
    )


def passes_before(run, k, optimizer):
    """Return the forward passes between the last step of this optimizer and its step k."""
    first = 1 + max((j for j in range(k) if run.steps[j]["optimizer"] == optimizer), default=-1)
    return [forward for forward in run.forwards if first <= forward.step <= k]
