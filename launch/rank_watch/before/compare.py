"""Compare the ranks with one process, which trained on the same samples: --before of check_ranks.

The monitor calls check() when the ranks are done. Training steps are compared until the first one
that differs: what comes later are its consequences.
"""

import functools
import itertools
import math
import operator
import re
import shutil
import statistics
import tempfile
from collections import Counter
from pathlib import Path

from rank_watch.before.one_process import run_one
from rank_watch.before.training import Training
from rank_watch.compare import COPY
from rank_watch.watched.optimizers import FIXED, SCHEDULED

STRICT, HALF = 1e-4, 3e-2  # relative differences of the first step: float32, and less
GROWTH = 30  # of differences from step to step, if they are rounding
NOISE = 0.02  # from this difference on, rounding has grown too large for a comparison
# in findings between the ranks, which have what is seen here as a consequence
EXPLAIN = ("clip_grad_norm_()", "the scheduler is stepped", "the loss was averaged")
EXPLAIN_EVALUATION = ("its own part", "the ranks evaluate")
TIMES = re.compile(r"#\s?(s|ms|sec|min|it/s|img/s)\b|time|took|elaps", re.IGNORECASE)

# The ratios of loss and gradient, ranks to one process, and which mistake has this sign.
CAUSES = [
    (
        *("1", "n"),
        "The gradient is {n} times as large, the loss is not: gradients are summed over the ranks. "
        "Divide them by the world size",
    ),
    (
        *("n", "n"),
        "Both are {n} times as large: the loss is multiplied by the world size, summed over the "
        "ranks, or not divided by the micro-steps. DDP averages: leave the factor out",
    ),
    (
        *("m", "m"),
        "Both are {m} times as large: the losses of {m} micro-steps count in full. Divide each by "
        "the number of micro-steps of one rank",
    ),
    (
        *("1/n", "1/n"),
        "Both are {n} times as small: the loss is divided by the world size, or by the micro-steps "
        "of all ranks, although DDP averages; or it is a sum over samples, which the average "
        "divides: multiply that one by the world size",
    ),
    (
        *("1", "1/n"),
        "The gradient is {n} times as small, the loss is not: gradients are divided by the world "
        "size twice, or backward() starts from a loss that was averaged over the ranks. Call "
        "backward() on the rank's own loss, and average a copy of it to print",
    ),
]
PART_IS_LOST = (
    "The loss is equal, the gradient is not: a part of it is lost, as in dist.all_gather(), which "
    "passes no gradient on (torch.distributed.nn.functional.all_gather does), or it is not "
    "averaged, as in a step under no_sync()."
)
MEAN_OF_MEANS = (
    "Each rank divides by its own number of samples, tokens, masked positions or class weights{}: "
    "a mean of means. Divide by the number on all ranks, and multiply by the world size. A loss "
    "over all pairs of a batch, a ratio such as Dice, or inputs that a rank normalizes by its own "
    "statistics have the same sign: gather what they need from all ranks"
)


def check(runs, judgment, complete):
    """Compare the ranks with one process, if --before asks for it.

    Args:
        runs: Runs of the ranks.
        judgment: Judgment, to which the result is added.
        complete: whether no rank waits for ever.
    """
    if not runs[0].noted["before"]:
        return
    options = runs[0].noted["before"][0]["options"]
    folders = [event["folder"] for event in runs[0].noted["weights"] if event["folder"]]
    folder = Path(folders[0] if folders else tempfile.mkdtemp(prefix="check_ranks-"))
    ranks = [Training(run) for run in runs]
    try:
        problem = problem_of_ranks(ranks, judgment, complete)
        if problem is None:
            one, parts = run_one(ranks, options, folder), 1
            if one.micro_steps() not in (0, ranks[0].micro_steps()) and ranks[0].micro_steps():
                parts = one.micro_steps() / ranks[0].micro_steps()  # it accumulates more, or less
                one = run_one(ranks, options, folder, parts)
            problem = problem_of(one)
        if problem is None:
            repeat = functools.cache(lambda k: run_one(ranks[k : k + 1], options, folder, parts))
            Comparison(ranks, one, options, judgment, repeat).run()
        else:
            judgment.notes.append(f"--before: not compared with one process: {problem}")
    finally:
        shutil.rmtree(folder)


def problem_of_ranks(ranks, judgment, complete):
    ends = [rank.run.end for rank in ranks]
    if not complete or not all(end and end["why"] not in ("failed", "waits") for end in ends):
        return "a rank failed, or waits for ever"
    if any("of the ranks differ" in text for text in judgment.found):
        return "the ranks differ from each other; repair that first"
    if not all(rank.steps for rank in ranks):
        return "no training step was seen"
    return None


def problem_of(one):
    end = one.run.end
    if end is None:
        return "that process was killed, has aborted, or took too long"
    if end["why"] == "failed":
        return f"it failed after {len(one.steps)} training steps: {end['error']} ({end['line']})"
    if not one.steps:
        return "no training step was seen in it"
    return None


class Comparison:
    """Compares the ranks with one process, and adds what it sees to a judgment."""

    def __init__(self, ranks, one, options, judgment, repeat):
        self.ranks = ranks
        self.one = one
        self.options = options
        self.repeat = repeat  # in one process, on the samples of a rank alone
        self.same = options["same"]
        self.judgment = judgment
        self.n = len(ranks)
        self.count = min(len(training.steps) for training in [*ranks, one])
        self.name = "one process" if self.same else options["command"][0]
        self.same_data = [self.has_same_data(k) for k in range(self.count)]
        self.is_repeated = all(self.same_data)  # the process has read what the ranks read
        self.is_equal = False  # all losses and gradients
        self.has_other_batch = False  # the ranks together, in a training step

    def run(self):
        if not self.same:
            self.compare_batches()
        if self.compare_steps():
            self.compare_settings()
            if self.is_equal and not self.ranks[0].run.is_cut:
                self.compare_evaluations()
        if self.is_repeated:
            self.compare_ends()

    def found(self, text, unless=EXPLAIN):
        if any(word in known for known in self.judgment.found for word in unless):
            self.note(f"{text} (repair first what was found between the ranks)")
        else:
            self.judgment.found.append(f"--before: {text} ({COPY}#check-your-conversion)")

    def note(self, text):
        self.judgment.notes.append(f"--before: {text}")

    def has_same_data(self, k):
        """Return whether the ranks together train on the samples of the one process, or None."""
        samples = [training.steps[k].samples() for training in self.ranks]
        one = self.one.steps[k].samples()
        if None in samples or one is None:
            return None
        return sum(samples, Counter()) == one

    def compare_batches(self):
        """Compare how many samples a training step reads, as the scripts ask for it."""
        counts = self.counts()
        self.has_other_batch = counts[0] != counts[1] and all(counts)
        if self.has_other_batch:
            self.found(
                f"{self.n} ranks train on {counts[0]:.0f} samples in a training step, the script "
                f"before on {counts[1]:.0f}: divide the batch size or the micro-steps by the "
                "world size. Right if you chose it, with another learning rate"
            )
        for ours, theirs in self.pairs_of_loaders():
            sizes = [one.size or 0 for one in ours]
            if all(sizes) and sum(sizes) + self.n < (theirs.size or 0):
                self.found(
                    f"the loaders at {ours[0].line} hold {' + '.join(map(str, sizes))} samples, "
                    f"that of the script before {theirs.size}: some are on no rank"
                )
            if ours[0].drop_last and not theirs.drop_last:
                self.note(
                    f"drop_last=True at {ours[0].line} leaves out samples in each epoch, which the "
                    "script before reads"
                )

    def counts(self):
        """Return the samples of a training step, of all ranks together and of the one process."""
        for ours, theirs in self.pairs_of_loaders():  # from which one process reads other batches
            if ours[0].batch_size and theirs.batch_size:
                count = sum(loader.batch_size for loader in ours) * self.ranks[0].micro_steps()
                return count, theirs.batch_size * self.one.micro_steps()
        *ours, theirs = (
            statistics.median(step.count() for step in training.steps)
            for training in [*self.ranks, self.one]
        )
        return sum(ours), theirs

    def pairs_of_loaders(self):
        """Return (loaders of the ranks, that of one process) that train on the same data."""
        trainings = [*self.ranks, self.one]
        pairs = []
        for key in self.ranks[0].run.passes_over:
            loaders = [training.loader(key) for training in trainings]
            if all(loaders):
                pairs.append((loaders[:-1], loaders[-1]))
        if not pairs:  # their data sets have other sizes
            all_loaders = [training.loaders() for training in trainings]
            if all(len(loaders) == 1 for loaders in all_loaders):
                *ours, theirs = (loader for (loader,) in all_loaders)
                pairs = [(ours, theirs)]
        return pairs

    def compare_steps(self):
        """Compare loss and gradient in each training step; return whether no mistake was found."""
        limit = HALF if any(one["half"] for one in self.noted("mode")) else STRICT
        largest = 0
        steps = 0
        for k in range(self.count):
            (ours, theirs, of_loss), (gradient, _, of_gradient) = self.losses(k), self.gradients(k)
            if not (math.isfinite(ours) or math.isfinite(theirs)) or largest > max(NOISE, limit):
                self.note(
                    f"compared for {k} steps: then numbers are infinite, or rounding is large"
                )
                break
            bound = max(limit * (10 if k else 1), GROWTH * largest)
            if of_gradient <= bound and any(
                is_near(ratio(ours, theirs), factor, bound) for factor in (self.n, 1 / self.n)
            ):
                of_loss = of_gradient  # a loss that is a sum over samples
            if not max(of_loss, of_gradient) <= bound:
                loose = self.why_loose(k)
                return self.compare_factors(loose) if loose else self.explain(k)
            largest = max(largest, of_loss, of_gradient)
            steps += bool(gradient)
        self.is_repeated = True
        self.is_equal = limit == STRICT
        if not steps or not self.ranks[0].micro_steps():
            self.note("no gradient reached the optimizer, or no backward() was seen")
        else:
            result = f"as in {self.name}: same for {steps} steps, up to {largest:.0e}"
            self.judgment.compared.append(result)
        return True

    def noted(self, kind, of=()):
        """Return what these processes, or all, have noted of this kind."""
        trainings = of or [*self.ranks, self.one]
        return [event for training in trainings for event in training.run.noted[kind]]

    def why_loose(self, k):
        """Return why losses and gradients of training step k cannot be equal, or None."""
        if not all(one["loaded"] for one in self.noted("weights")):
            return "its weights have other shapes, so both begin differently"
        if any(one["batch_norm"] for one in self.noted("mode", of=self.ranks)):
            return "batch norm sees only the samples of its own rank, so the losses must differ"
        remedy = "" if self.options["no_random"] else ": try --no-random"
        if any(training.draws() for training in [*self.ranks, self.one]):
            return f"the forward pass draws random numbers, as dropout does{remedy}"
        if not self.same_data[k] and not (self.has_same_count(k) and self.repeats(0, self.n - 1)):
            return (
                f"training step {k + 1} has other inputs: not read by index from a DataLoader, or "
                f"changed at random, or padded to the longest of the batch{remedy}"
            )
        return None

    def losses(self, k):
        """Return the mean loss of the ranks, that of the one process, and their difference."""
        of_ranks = [training.steps[k].loss() for training in self.ranks]
        mean, one = statistics.fmean(of_ranks), self.one.steps[k].loss()
        size = statistics.fmean(map(abs, of_ranks))
        return mean, one, abs(mean - one) / max(size, abs(one), 1e-30)

    def gradients(self, k):
        """Return the norm of the ranks' gradient, that of the one process, and their difference."""
        ranks, parts = self.ranks[0].steps[k].gradient()
        one, other_parts = self.one.steps[k].gradient()
        size = max(ranks, one, 1e-30)
        differences = [
            abs(norm - other_parts[name]) for name, norm in parts.items() if name in other_parts
        ]
        return ranks, one, max([abs(ranks - one), *differences]) / size

    def compare_factors(self, reason):
        """Compare only whether losses and gradients differ by the number of ranks."""
        optimizers = [step["optimizer"] for step in self.ranks[0].run.steps[: self.count]]
        factors = {self.n, 1 / self.n, max(self.n, self.ranks[0].micro_steps())}
        for optimizer, factor in itertools.product(set(optimizers), factors):
            steps = [k for k, one in enumerate(optimizers) if one == optimizer][:10]
            losses = [ratio(*self.losses(k)[:2]) for k in steps]
            if not mostly_near([ratio(*self.gradients(k)[:2]) for k in steps], factor):
                continue
            scaled = mostly_near(losses, factor)
            # the gradient of fewer samples is larger by chance
            if scaled or factor > 1 or self.is_repeated:
                cause = self.cause(steps[0], factor if scaled else 1, factor)
                self.found(f"{self.values(steps[0])}. {cause}")
                return False
        self.note(f"{reason}. Losses and gradients were compared only by factors of {self.n}")
        return True

    def explain(self, k):
        """Say why training step k differs; return False."""
        loss, gradient = ratio(*self.losses(k)[:2]), ratio(*self.gradients(k)[:2])
        of_ranks = [training.steps[k].loss() for training in self.ranks]
        cause = self.cause(k, loss, gradient)
        if k and cause is None and self.compare_groups(k - 1, FIXED):
            return False
        fixed = "does the script expect batches of a fixed size? Later steps were not compared"
        if self.same and cause is None and not is_near(loss, 1) and len(set(of_ranks)) == 1:
            self.note(f"{self.values(k)}. All ranks have one loss, of all samples: {fixed}")
        elif self.same and is_near(loss, 1 / self.n) and self.repeats(0):
            self.note(f"{self.values(k)}. Is the loss a sum, or {fixed}")
        else:
            before = f"The {k} steps before are equal: is the update another one? Or: " * (k > 0)
            self.found(f"{self.values(k)}. {cause or before + self.other_cause(k, loss)}")
        return False

    def has_same_count(self, k):
        """Return whether the ranks together train on as many samples as the one process."""
        counts = [training.steps[k].count() for training in [*self.ranks, self.one]]
        return sum(counts[:-1]) == counts[-1]

    def repeats(self, *ranks):
        """Return whether one process computes from the samples of each of these ranks its loss.

        If it does for all, nothing is random: only for rank 0 it may draw the same numbers. Rows
        that are padded to the longest of another batch have other hashes, but are the same samples.
        """
        firsts = [(self.repeat(rank).steps, self.ranks[rank].steps[0]) for rank in ranks]
        return all(steps and is_near(steps[0].loss(), own.loss(), 1e-5) for steps, own in firsts)

    def values(self, k):
        (ranks, one, _), (gradient, other, _) = self.losses(k), self.gradients(k)
        return (
            f"training step {k + 1} differs: the mean loss is {ranks:.5g} on {self.n} ranks and "
            f"{one:.5g} in one process, the norm of the gradient {gradient:.4g} and {other:.4g} "
            f"({self.ranks[0].steps[k].line})"
        )

    def cause(self, k, loss, gradient):
        """Return which mistake has these ratios, ranks to one process, or None."""
        micro_steps = len(self.ranks[0].steps[k].losses)
        factors = {"1": 1, "n": self.n, "1/n": 1 / self.n}
        if micro_steps > 1:
            factors["m"] = micro_steps
        for of_loss, of_gradient, text in CAUSES:
            if is_near(loss, factors.get(of_loss)) and is_near(gradient, factors.get(of_gradient)):
                return text.format(n=self.n, m=micro_steps)
        return None

    def other_cause(self, k, loss):
        if is_near(loss, 1, STRICT):
            clips = " Is it clipped before the average?" if self.ranks[0].steps[k].clips else ""
            return f"{PART_IS_LOST}{clips}"
        counts = [training.steps[k].count() for training in self.ranks]
        shares = f" ({' and '.join(map(str, counts))} here)" if min(counts) < max(counts) else ""
        padding = "" if self.same_data[k] else ". Or the model sees the padding of a batch"
        return MEAN_OF_MEANS.format(shares) + padding

    # What does not depend on the data

    def compare_settings(self):
        """Compare steps of the scheduler, learning rates and weight decay in each step."""
        ours, theirs = self.ranks[0].steps, self.one.steps
        if self.ranks[0].run.follows and not self.is_equal:
            return self.note("its schedule follows losses, which differ, so it was not compared")
        # Accelerate steps it once per rank by design
        by_library = any(event["by_library"] for event in self.ranks[0].run.noted["schedule"])
        made = [0, 0]
        for k in range(self.count):
            if k:  # before that, a scheduler makes a first step when it is made
                made = [made[0] + ours[k].schedulers, made[1] + theirs[k].schedulers]
            if made[0] != made[1] and self.is_repeated and not by_library:
                return self.found(
                    f"before training step {k + 1} the scheduler has made {made[0]} steps on each "
                    f"rank, {made[1]} in one process: its learning rates come too "
                    f"{'early' if made[0] > made[1] else 'late'}. Step it as before"
                )
            modes = ours[k].mode, theirs[k].mode
            if None not in modes and modes[0] != modes[1]:
                return self.found(
                    f"in training step {k + 1} the model is in {modes[0]} on the ranks, and in "
                    f"{modes[1]} in one process: call model.train() as before"
                )
            if self.compare_groups(k, (*FIXED, *reversed(SCHEDULED))):
                return None
        self.judgment.compared.append("the same schedule")

    def compare_groups(self, k, names):
        """Compare settings of the optimizer in training step k; return whether they differ."""
        for name in names:
            settings = [trained.steps[k].settings(name) for trained in (self.ranks[0], self.one)]
            if settings[0].keys() != settings[1].keys():
                settings = [dict(enumerate(some.values())) for some in settings]
            other = [one for one in settings[0] if not same(one, *settings)]
            if other:
                self.explain_setting(k, name, other, settings)
                return True
        return False

    def explain_setting(self, k, name, other, settings):
        value, one = (some.get(other[0]) for some in settings)
        text = (
            f"in training step {k + 1} the {name} of {len(other)} of {len(settings[0])} "
            f"parameters, such as {other[0]}, is {value} on the ranks and {one} in one process"
        )
        if self.has_other_batch and name == "lr":
            return self.note(
                f"{text}; right if it is scaled with the global batch, which has grown"
            )
        if name in FIXED:
            every = len(other) == len(settings[0])
            remedy = "Set it as before" if every else "Are the groups chosen by name or by type?"
            return self.found(f"{text}. {remedy}")
        repeats = self.is_repeated and self.asks_for_length()
        if k and (not self.same or repeats) and self.schedule_ends_early():
            self.found(
                f"{text}: its schedule ends {self.n} times as early. The number of training steps "
                "is divided by the world size, though len(loader) is that of a rank already"
            )
        elif self.same:
            self.note(
                f"{text}: right if the script computes it from the number of ranks or the batch "
                'size per process; compare with --before "train.py --batch-size GLOBAL"'
            )
        else:
            self.found(
                f"{text}. With the same global batch the schedule stays the same; is it computed "
                "from the length of a rank's loader, or scaled by the world size?"
            )

    def schedule_ends_early(self):
        """Return whether the learning rates of the ranks run ahead by the number of ranks."""
        of_ranks, of_one = (
            [float(step.groups[0].get("lr", 0)) for step in training.steps]
            for training in (self.ranks[0], self.one)
        )
        reach = range(1, (self.count - 1) // self.n + 1)
        if len(set(of_ranks)) == 1 or len(set(of_one)) == 1:  # then it does not end
            return False
        return all(is_near(of_ranks[j], of_one[self.n * j], 1e-4) for j in reach)

    def asks_for_length(self):
        """Return whether the script asked for the length of a loader before it trained."""
        return bool(self.ranks[0].run.noted["asks for length"])

    def compare_evaluations(self):
        """Compare the numbers that each evaluation has printed on rank 0."""
        for k, one in self.one.evaluations.items():
            of_ranks = [training.evaluations.get(k) for training in self.ranks]
            if k > self.count or not all(of_ranks):
                continue
            own = [step.loss() for step in self.ranks[0].steps]
            for text, ours in of_ranks[0].numbers.items():
                theirs = one.numbers.get(text, [])
                pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=False)
                places = itertools.cycle(range(len(ours[0])))
                for place, (value, other) in zip(places, pairs, strict=False):
                    known = len(ours) != len(theirs) or is_time(text, place)
                    if not known and not is_printed(value, [float(other), *own]):
                        self.explain_evaluation(k, of_ranks, one, text, float(value), float(other))
                        return

    def explain_evaluation(self, k, of_ranks, one, printed, value, other):
        text = (
            f"the evaluation after training step {k} prints {value:.5g} on rank 0 and {other:.5g} "
            f'in one process, in "{printed.strip()}"'
        )
        counts = [evaluation.samples().total() for evaluation in of_ranks]
        for vectors in zip(*(evaluation.reduced for evaluation in of_ranks), strict=False):
            for means in zip(*vectors, strict=False):  # of one number, one per rank
                if not sum(counts) or len(set(counts)) == 1:
                    break
                weighted = sum(map(operator.mul, counts, means)) / sum(counts)
                if is_near(statistics.fmean(means), value, 1e-3) and is_near(weighted, other, 1e-3):
                    self.found(
                        f"{text}: a mean of the ranks' means, and the ranks' shares have "
                        f"{' and '.join(map(str, counts))} samples. Sum values and counts over the "
                        "ranks, then divide",
                        unless=EXPLAIN_EVALUATION,
                    )
                    return
        samples = sum((of_rank.samples() for of_rank in of_ranks), Counter())
        others = "" if samples == one.samples() else " The ranks evaluate other samples."
        self.note(f"{text}.{others} Right if it belongs to the samples of rank 0")

    def compare_ends(self):
        """Compare the number of training steps, if a run has reached its end."""
        ranks, one = len(self.ranks[0].steps), len(self.one.steps)
        ends = [training.run.end["why"] for training in (self.ranks[0], self.one)]
        ended, one_ended = (why == "end" for why in ends)
        if not (ended or one_ended or ends[1] == "reads on"):
            self.note("no run reached its end, so not how long it trains: --steps 0")
            return
        if ends[1] == "reads on" and one < ranks and not self.ranks[0].run.is_cut:
            text = (
                f"the ranks leave an epoch after {one} training steps, and begin another one; the "
                "script before reads on"
            )
        elif ended and (one > ranks or ends[1] == "begins another epoch"):
            text = f"the ranks end after {ranks} training steps, one process goes on after {one}"
        elif one_ended and one < ranks:
            text = f"one process ends after {one} training steps, the ranks go on"
        else:
            return
        if self.same and not self.asks_for_length():
            self.note(f"{text}: right if their number depends on the batch size per process")
        else:
            self.found(
                f"{text}. Is their number divided by the world size? len(loader) is divided already"
            )


def ratio(a, b):
    return a / b if b else math.inf


def is_near(value, expected, tolerance=0.02):
    return expected is not None and abs(value - expected) <= tolerance * abs(expected)


def is_printed(text, values):
    """Return whether a number is one of these values, up to how it was rounded to be printed."""
    digits = len(text.partition("e")[0].partition(".")[2])
    unit = 10 ** -max(digits, 0) * (10 ** int(text.partition("e")[2] or 0))
    return any(abs(float(text) - value) <= max(1.5 * unit, 1e-3 * abs(value)) for value in values)


def is_time(text, place):
    """Return whether a number of a printed line is a time or a speed, by the words around it."""
    before, after, *_ = [*text.split("#")[place:], "", ""]
    return TIMES.search(f"{before.strip().rpartition(' ')[2]}#{after[:6]}")


def mostly_near(ratios, factor):
    """Return whether at least three ratios, 4 of 5 of them, are nearer to this factor than to 1."""
    close = math.log(max(factor, 1 / factor)) * 0.4
    near = [one > 0 and abs(math.log(one) - math.log(factor)) < close for one in ratios]
    return len(near) > 2 and sum(near) >= 0.8 * len(near)


def same(name, ours, theirs):
    """Return whether a setting of a parameter is equal, up to rounding."""
    a, b = ours[name], theirs.get(name)
    if isinstance(a, float | int) and isinstance(b, float | int):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return a == b
