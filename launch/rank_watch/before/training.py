"""What a process did for each training step, and in each evaluation."""

import itertools
import math
import statistics
from collections import Counter

from rank_watch.watched.modes import mode_of


class Step:
    """What a process did for one training step."""

    def __init__(self):
        self.losses = []  # of each backward pass
        self.clips = []  # events of clip_grad_norm_()
        self.inputs = []  # lists of a hash for each sample, or None: unknown
        self.schedulers = 0  # steps of schedulers before it, since the last training step
        self.groups = []  # settings of the optimizer
        self.norms = {}  # of the gradient of each parameter
        self.line = ""
        self.mode = None  # of the model, in the passes before the backward pass

    def loss(self):
        return sum(self.losses)

    def samples(self):
        """Return how often each sample was an input, or None: unknown."""
        if not self.inputs or None in self.inputs:
            return None
        return Counter(itertools.chain(*self.inputs))

    def count(self):
        """Return the number of samples, as far as they are known."""
        return sum(len(hashes or ()) for hashes in self.inputs)

    def gradient(self):
        """Return the norm of the gradient and of each of its parts, before it was clipped."""
        if self.clips:
            return self.clips[-1]["norm"], self.clips[-1]["norms"]
        return math.hypot(*self.norms.values()), self.norms

    def settings(self, name):
        """Return the values of a setting of each parameter, by its name: {name: value}."""
        values = {}
        for number, group in enumerate(self.groups):
            for place, parameter in enumerate(group["names"]):
                values[parameter or f"parameter {place} of group {number}"] = group.get(name)
        return values


class Evaluation:
    """What a process did from an evaluation to the next training pass."""

    def __init__(self):
        self.inputs = []
        self.numbers = {}  # text that was printed, with # for numbers: lists of these numbers
        self.reduced = []  # values that were summed over the ranks

    def samples(self):
        """Return how often each sample was evaluated."""
        return Counter(itertools.chain(*(hashes or () for hashes in self.inputs)))


class Training:
    """The training steps and evaluations of a Run."""

    def __init__(self, run):
        self.run = run
        self.evaluations = {}  # training steps before it: Evaluation
        self.steps = [Step() for _ in run.steps]
        steps = [*self.steps, Step()]  # after the last one
        noted = run.noted
        for event in noted["loss"]:
            steps[event["step"]].losses.append(event["value"])
        for event in noted["clipped"]:
            steps[event["step"]].clips.append(event)
        for event in noted["schedule"]:
            steps[event["step"]].schedulers += 1
        for event in noted["gradient"]:
            step = steps[event["step"]]
            step.groups = event["groups"]
            step.norms = event["norms"]
            step.line = event["line"]
        for forward in run.forwards:
            if forward.training:
                steps[forward.step].inputs.append(forward.inputs)
            else:
                self.evaluation(forward.step).inputs.append(forward.inputs)
        for number, passes, _ in run.micro_steps:
            if passes:
                steps[number].mode = mode_of(passes)
        for event in noted["number"]:
            numbers = self.evaluation(event["step"]).numbers
            numbers.setdefault(event["text"], []).append(event["numbers"])
        for event in noted["reduces"]:
            self.evaluation(event["step"]).reduced.append(event["values"])

    def evaluation(self, step):
        return self.evaluations.setdefault(step, Evaluation())

    def micro_steps(self):
        return statistics.median(len(step.losses) for step in self.steps) if self.steps else 0

    def draws(self):
        """Return whether forward passes draw random numbers."""
        return any(span == "forward" and step for step, span, _ in self.run.draws)

    def loaders(self):
        """Return the loaders that train."""
        return [loader for loader in self.run.loaders if loader.trains()]

    def loader(self, key):
        """Return the loader of this key that trains, or None."""
        return next((loader for loader in self.loaders() if key and loader.key == key), None)
