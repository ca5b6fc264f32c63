"""Judge what the ranks of a program did, in a sentence that a person would say.

The check of each exercise is check.py in its folder, with

    check(*runs)    runs[k] holds the Records of the ranks of SETUPS[k]. Calls refuse() if the
                    program is not yet right; else it returns a Sentence that says what it saw
    check_run(ranks)    in place of it, to check each run alike
    SETUPS          how to start the program, if not once with two ranks
    MAY_FAIL        True if a program that ends with an error may be right
"""

import importlib
import pickle
import re
import signal
import textwrap
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from exercises.judge import timeline
from exercises.judge.recorder import Event, Message, Record
from exercises.judge.runner import Setup
from exercises.sentences import joined, say

WAITS, RUNS = "rank {rank} waits in {line}", "rank {rank} is in {line}"
NUMBER = 8  # bytes of one number
UNEQUAL = {"send", "recv", "gather", "scatter", "all_to_all"}  # ranks may give other tensors
SIGMAS = 6  # standard deviations that no chance explains
PLACES = "{before}; {after}"  # of two ranks or more


class Refused(Exception):
    """The program is not yet right. The argument is a Sentence that says what it did."""


def refuse(template, **values):
    raise Refused(say(template, **values))


# Called by the runner


def setups(exercise):
    """Return how to start the program of an exercise, given by its folder: a list of Setup."""
    return getattr(load_check(exercise), "SETUPS", [Setup()])


def judge(exercise, program, results, folder):
    """Return (passed, Sentence, output) for a program that has run once for each Setup.

    Args:
        exercise: folder of the exercise.
        program: path of the program.
        results: of runner.run(), for each run.
        folder: has a folder for each run, with the records of its ranks.
    """
    module = load_check(exercise)
    starts = setups(exercise)
    counts = [len(setup.local_ranks) for setup in starts]
    output = ""
    try:
        runs = [read_records(Path(folder, str(k)), count) for k, count in enumerate(counts)]
        output = show_output(runs[0])
        for k, result in enumerate(results):  # none after one that hangs
            variables = starts[k].environment if k else {}
            may_fail = getattr(module, "MAY_FAIL", False)
            refuse_what_did_not_end(result, runs[k], program, may_fail, variables)
        return True, check_runs(module, starts, runs), output
    except Refused as refused:
        return False, refused.args[0], output
    except Exception as error:  # a program may put anything into its variables
        found = f"{type(error).__name__}: {error}"
        sentence = say(
            "I cannot read what the program did ({found}): please keep the names and the types of"
            " its variables.",
            found=found,
        )
        return False, sentence, output


def lanes(exercise, results, folder):
    """Return what timeline.draw() needs for the first run that failed or hangs, else for run 0."""
    run = next((k for k, result in enumerate(results) if result != "ended"), 0)
    count = len(setups(exercise)[run].local_ranks)
    try:
        return [timeline.acts(rank) for rank in read_records(Path(folder, str(run)), count)]
    except Exception:  # a program may do anything: judge() says what
        return []


def check_runs(module, starts, runs):
    """Return the Sentence of the check of an exercise for its first run, if all runs pass."""
    if hasattr(module, "check"):
        return module.check(*runs)
    sentence = module.check_run(runs[0])
    for setup, ranks in zip(starts[1:], runs[1:], strict=True):
        try:
            module.check_run(ranks)
        except Refused as refused:
            refuse("{run}: {sentence}", run=setup.run, sentence=refused.args[0])
    return sentence


def load_check(exercise):
    return importlib.import_module(f"exercises.{exercise.name}.check")


def read_records(folder, count):
    """Return the Records of all ranks. A rank that was killed has one without events.

    In place of the images in a batch there are their numbers in the data of rank 0.
    """
    records = []
    for rank in range(count):
        path = folder / f"record-{rank}"
        records.append(pickle.loads(path.read_bytes()) if path.exists() else killed(folder, rank))
    data = records[0].data
    if data is not None:
        numbers = {key(image): number for number, image in enumerate(data)}
        for record in records:
            record.events = [
                number_images(event, data[0].numel(), numbers) for event in record.events
            ]
    return records


def killed(folder, rank):
    """Return the Record of a rank that could not write one. It is empty if the rank never ran."""
    record = Record(rank)
    if (folder / f"messages-{rank}").exists():
        for line in (folder / f"messages-{rank}").read_text().splitlines():
            name, size, number, time, *ranks = line.split()
            ranks = tuple(map(int, ranks))
            message = Message(name, int(size), False, 0, int(number), ranks)
            record.events.append(Event("message", message, float(time)))
    if (folder / f"killed-{rank}").exists():
        code, record.line = map(int, (folder / f"killed-{rank}").read_text().split())
        if code < 0:
            record.signal = signal.Signals(-code).name
        else:  # it left from C
            record.exit_code = code
    if (folder / f"output-{rank}").exists():
        record.output = (folder / f"output-{rank}").read_text(errors="replace")
    return record


def number_images(event, size, numbers):
    """Return an event with the numbers of images in place of the images.

    A batch of another size is no batch of images, and an image that rank 0 does not have is -1.
    """
    if event.kind != "batch":
        return event
    batch, is_training = event.value
    if batch.dim() < 2 or batch.shape[1:].numel() != size:
        return event._replace(kind="other batch")
    return event._replace(value=([numbers.get(key(image), -1) for image in batch], is_training))


def key(image):
    return image.numpy().tobytes()


def show_output(ranks):
    """Return what the ranks printed, each line with its rank. One that was killed comes last."""
    ranks = sorted(ranks, key=lambda one: one.signal is not None)
    lines = [f"rank {one.rank} | {line}" for one in ranks for line in one.output.splitlines()]
    return "\n".join(lines)


# Programs that hang or fail


def refuse_what_did_not_end(result, ranks, program, may_fail, variables):
    """Refuse a program that hangs or fails.

    Args:
        result: of runner.run().
        ranks: Records.
        program: path of the program.
        may_fail: whether a program that fails may be right.
        variables: environment variables to mention, for a run that is not the first one.
    """
    source = Path(program).read_text(encoding="utf-8").splitlines()
    names = ", ".join(f"{name}={value}" for name, value in variables.items())
    run = say(", in the run with {names}", names=names) if names else ""
    if result == "hangs":
        places = joined(PLACES, [where(rank, source) for rank in ranks])
        refuse("The ranks wait for each other forever{run}: {places}.", run=run, places=places)
    if result == "limit":
        places = joined(PLACES, [where(rank, source, RUNS) for rank in ranks])
        refuse(
            "The program did not end within the time limit{run}: {places}.", run=run, places=places
        )
    if result == "failed" and not may_fail:
        failed = [rank for rank in ranks if rank.exit_code != 0 and not rank.waits]
        rank = min(failed, key=lost_another, default=ranks[0])
        if lost_another(rank) or rank.signal == "SIGABRT":  # as gloo ends a process
            refuse_different_collectives(ranks, source)
        if lost_another(rank):
            others = joined(PLACES, [where(other, source) for other in ranks if other is not rank])
            refuse(
                "Rank {rank} waited for another rank in {line}, but {others}.",
                rank=rank.rank,
                line=line_of(rank.line, source),
                others=others,
            )
        text = where(rank, source)
        refuse("The program failed{run}: {text}.", run=run, text=text)


def lost_another(rank):
    """Return whether a rank failed because another one had failed or ended."""
    words = ("Connection closed", "Connection reset", "likely closed", "Broken pipe", "Timed out")
    return rank.error is not None and any(word in rank.error[1] for word in words)


def refuse_different_collectives(ranks, source):
    """Refuse ranks of which two have called different collectives, which cannot end well."""
    for first, *others in zip(*[values(rank, "message") for rank in ranks], strict=False):
        for rank, call in enumerate(others, 1):
            if UNEQUAL & {first.name, call.name}:
                return
            if (first.name, first.size) != (call.name, call.size):
                refuse(
                    "The ranks call different collectives: rank 0 calls {first}, rank {rank}"
                    " calls {second}. All ranks must call the same ones in the same order.",
                    first=call_of(first, source),
                    rank=rank,
                    second=call_of(call, source),
                )


def call_of(message, source):
    return say(
        "{name} with {size:,} bytes in {line}",
        name=message.name,
        size=message.size,
        line=line_of(message.line, source),
    )


def line_of(number, source):
    if not number:
        return say("code outside the file")
    return say("line {line}, `{text}`", line=number, text=source[number - 1].strip())


def where(rank, source, template=WAITS):
    """Return in which line a rank waits, failed or ended."""
    line = line_of(rank.line, source)
    if rank.waits:
        return say(template, rank=rank.rank, line=line)
    if rank.error:
        error = describe_error(rank)
        return say("rank {rank}, {line}: {error}", rank=rank.rank, line=line, error=error)
    if rank.signal:
        place = say(", last seen in {line}", line=line) if rank.line else ""
        return say(
            "rank {rank} was killed by {signal}{place}",
            rank=rank.rank,
            signal=rank.signal,
            place=place,
        )
    return say(
        "rank {rank} has ended with exit code {exit_code}", rank=rank.rank, exit_code=rank.exit_code
    )


def describe_error(rank):
    """Return the error of a rank in one line."""
    kind, message = rank.error
    message = re.sub(r"\[\S+\.cc:\d+\] ", "", message).strip().rstrip(".:")
    message = textwrap.shorten(message, 160, placeholder=" ...")
    return f"{kind}: {message}" if message else kind


# What a rank did


def values(rank, kind):
    """Return the values of all events of one kind, in order."""
    return [event.value for event in rank.events if event.kind == kind]


def images(rank):
    """Return the numbers of the images that a rank trained on, in order."""
    return [number for batch, trains in values(rank, "batch") if trains for number in batch]


def evaluated(rank):
    """Return the numbers of the images that went through the model of a rank, in order."""
    return [number for batch, _ in values(rank, "batch") for number in batch]


def epochs(ranks, count):
    """Return the images of `count` epochs: a list of lists, of each epoch and rank."""
    parts = []
    for numbers in map(images, ranks):
        size, rest = divmod(len(numbers), count)
        if rest or not size:
            refuse(
                "I expected {epochs} epochs of equal size on each rank, and see {counts} images.",
                epochs=count,
                counts=listed(len(images(rank)) for rank in ranks),
            )
        parts.append([numbers[k * size : (k + 1) * size] for k in range(count)])
    return list(zip(*parts, strict=True))


def batches(rank):
    """Return the images that a rank trained on in each training step: a list of lists."""
    found, batch = [], []
    for event in rank.events:
        if event.kind == "batch" and event.value[1]:
            batch += event.value[0]
        elif event.kind == "step":
            found.append(batch)
            batch = []
    return found


def steps(rank):
    """Return the Step after each training step."""
    return values(rank, "step")


def right_answers(rank):
    """Return for each image whether the model of a rank finds its class: a tensor of bool."""
    return variable(rank, "model")(rank.data).argmax(dim=1) == classes(rank.data)


def classes(images):
    """Return the class of each image: the brightest of its first four pixels."""
    return images[:, :4].argmax(dim=1)


def variable(rank, name):
    """Return a variable of the program; refuse the program if it has none of this name."""
    if name not in rank.variables:
        refuse(
            "I expected a variable `{name}` at the end of the program: please keep the name, and"
            " do not move it into a function.",
            name=name,
        )
    try:
        return pickle.loads(rank.variables[name])
    except Exception:
        refuse(
            "I cannot read the variable `{name}` in another process: please keep its type, and use"
            " no class of your own in it.",
            name=name,
        )


# Comparing


def refuse_dependent_draws(draws):
    """Refuse random choices of two ranks of which one follows from the other.

    Ranks that draw the same numbers, some places apart or with another probability, have a
    correlation at one shift. Others have none that is larger than SIGMAS standard deviations.

    Args:
        draws: of each rank: a list of tensors of 0 and 1, one for each batch.
    """
    batches = [(r, k, batch) for r, of_rank in enumerate(draws) for k, batch in enumerate(of_rank)]
    for (r, k, first), (s, m, second) in combinations(batches, 2):
        if first.equal(second):
            refuse(
                "Rank {rank} in batch {batch} and rank {other} in batch {other_batch} draw the"
                " same random numbers: what one does to its images, the other does too.",
                rank=r,
                batch=k,
                other=s,
                other_batch=m,
            )
    correlation, shift = largest_correlation(*draws)
    backwards, _ = largest_correlation(draws[0], [batch.flip(0) for batch in draws[1]])
    if backwards:
        refuse("The ranks draw the same random numbers, one of them backwards.")
    if shift:
        refuse("The ranks draw the same random numbers, one of them {shift} later.", shift=shift)
    if correlation:
        refuse(
            "The random choices of a rank depend on those of the other: their correlation is"
            " {correlation:.2f}, and it would be about 0 by chance.",
            correlation=correlation,
        )


def largest_correlation(first, second):
    """Return the largest correlation of two lists of tensors, and the shift at which it is.

    (0, 0) if it may be chance.
    """
    a, b = (
        torch.cat([batch.flatten() for batch in of_rank]).double() for of_rank in (first, second)
    )
    count = len(a)
    a, b = a - a.mean(), b - b.mean()
    product = torch.fft.rfft(a, 2 * count) * torch.fft.rfft(b, 2 * count).conj()
    correlations = torch.fft.irfft(product, 2 * count) / (a.norm() * b.norm())
    place = int(correlations.abs().argmax())
    if not abs(correlations[place]) > SIGMAS / count**0.5:
        return 0, 0
    return float(correlations[place]), min(place, 2 * count - place)


def first_difference(ranks):
    """Return the number of the first training step after which the weights of ranks differ.

    Of each rank, its weights after each step are given. Counted from 1; None if always equal.
    """
    for k, (first, *others) in enumerate(zip(*ranks, strict=False), 1):
        if not all(same(first, weights) for weights in others):
            return k
    return None


def weights_after_steps(rank):
    """Return the weights of a rank after each training step: a list of lists of tensors."""
    return [step.weights for step in steps(rank)]


def weights_before_next_steps(rank):
    """Return the weights that each training step leaves for the next one, or for the end.

    A program may average the weights after a training step, not the gradients before it.
    """
    before = [step.weights for step in values(rank, "before")]
    return [*before[1:], weights_of(variable(rank, "model"))]


def same(a, b, tolerance=0.0):
    """Return whether two lists of tensors are equal, up to a difference."""
    return len(a) == len(b) and distance(a, b) <= tolerance


def distance(a, b):
    """Return the largest difference of two lists of tensors."""
    return max((float((x - y).abs().max()) for x, y in zip(a, b, strict=True)), default=0.0)


def image_loss(model, images):
    return nn.functional.cross_entropy(model(images), classes(images))


def train_alone(ranks, max_norm=None, loss=image_loss):
    """Train as one process would, with the images that all ranks read in each training step.

    The model is the variable `model` of the program, the optimizer plain SGD.

    Args:
        ranks: Records.
        max_norm: to clip the gradient to, or None.
        loss: function(model, images) that returns the loss.

    Returns:
        The weights after each training step: a list of lists of tensors.
    """
    weights = values(ranks[0], "before")[0].weights
    results = []
    for k, parts in enumerate(zip(*map(batches, ranks), strict=True)):
        numbers = [number for part in parts for number in part]
        refuse_unknown_images(numbers)
        lr = steps(ranks[0])[k].lr
        gradients = gradients_of(ranks[0], weights, numbers, max_norm, loss)
        weights = [w - lr * gradient for w, gradient in zip(weights, gradients, strict=True)]
        results.append(weights)
    return results


def gradients_of(rank, weights, numbers, max_norm=None, loss=image_loss):
    """Return the gradients that one process computes with these weights and images."""
    model = variable(rank, "model")
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    model.zero_grad()
    loss(model, rank.data[numbers]).backward()
    if max_norm:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compared(ranks, k, weights, expected):
    """Return in words how the gradient of step k differs from what leads to expected weights."""
    step = values(ranks[0], "before")[k - 1]
    a, b = (
        torch.cat([(x - y).flatten() for x, y in zip(step.weights, after, strict=True)]) / step.lr
        for after in (weights, expected)
    )
    times = float(a @ b / (b @ b))
    if float((a - times * b).norm()) < 0.01 * float(a.norm()):
        is_sum = abs(times - len(ranks)) < 0.01
        return say(
            ". The gradient is {times:.3g} times as large{why}; expected the mean",
            times=times,
            why=say(", as the sum over the ranks is") if is_sum else "",
        )
    return say(
        ". The gradient has norm {norm:.4f}, expected {expected:.4f}, and differs by {part:.0%}",
        norm=float(a.norm()),
        expected=float(b.norm()),
        part=float((a - b).norm() / b.norm()),
    )


def why_own_weights(ranks, k):
    """Return in words why the ranks have different weights after training step k."""
    for rank in ranks:
        step = values(rank, "before")[k - 1]
        gradients = [gradient for gradient in step.gradients if gradient is not None]
        own = gradients_of(rank, step.weights, batches(rank)[k - 1])
        if same(gradients, own, 1e-6):
            return say(
                ": the optimizer of rank {rank} gets the gradients of its own images. The mean must"
                " be in parameter.grad",
                rank=rank.rank,
            )
    if any(message.in_backward for message in gradient_messages(ranks[0])):
        return say(". A tensor may not change while its message is under way, before wait()")
    return ""


def refuse_unknown_images(numbers):
    if -1 in numbers:
        refuse(
            "Some ranks train on images that rank 0 does not have: all ranks must draw the same"
            " images, and divide them afterwards."
        )


def refuse_repeated_images(ranks, count, of=1):
    """Refuse ranks that do not train on each of `count` images once in all, in `of` epochs."""
    if not any(images(rank) for rank in ranks):
        refuse("I see no image that is trained: call the model with the images.")
    for epoch in epochs(ranks, of):
        refuse_repeated_images_in(epoch, count)


def refuse_repeated_images_in(epoch, count):
    """Refuse an epoch, given by the images of each rank."""
    parts = [set(numbers) for numbers in epoch]
    numbers = [number for of_rank in epoch for number in of_rank]
    refuse_unknown_images(numbers)
    if all(len(part) == count for part in parts):
        refuse(
            "Each rank trained on all {count} images, so each image was trained on every rank.",
            count=count,
        )
    if all(part == parts[0] for part in parts):
        share = len(parts[0]) / count
        refuse(
            "All ranks trained on the same images, {numbers}: together they saw {share:.0%} of"
            " the training set.",
            numbers=listed(parts[0]),
            share=share,
        )
    if several := [number for number in parts[0] if any(number in part for part in parts[1:])]:
        refuse(
            "{count} images were trained on several ranks, for example image {example}.",
            count=len(several),
            example=min(several),
        )
    if missing := set(range(count)) - set(numbers):
        refuse(
            "{missing} of {count} images were never trained, for example image {example}.",
            missing=len(missing),
            count=count,
            example=min(missing),
        )
    if len(numbers) % count == 0 and len(numbers) > count:
        refuse(
            "Each image went through the model {times} times: call the model once for each batch.",
            times=len(numbers) // count,
        )
    if len(numbers) > count:
        refuse("{repeated} images were trained more than once.", repeated=len(numbers) - count)


def refuse_ranks_apart(ranks):
    """Refuse a program whose ranks do not train, or not with the same weights. Return these.

    They are those after each training step: a list of lists of tensors.
    """
    if any(not steps(rank) for rank in ranks):
        refuse("I see no training step: expected a call of `optimizer.step()`.")
    weights = [weights_before_next_steps(rank) for rank in ranks]
    if k := first_difference(weights):
        refuse(
            "After training step {step}, the weights of the ranks differ: each rank trains a"
            " model of its own.",
            step=k,
        )
    counts = {len(steps(rank)) for rank in ranks}
    if len(counts) > 1:
        refuse(
            "The ranks took different numbers of training steps: {counts}.", counts=listed(counts)
        )
    before = values(ranks[0], "before")[0].weights
    if same(before, weights[0][-1]):
        refuse("The training does not change the weights.")
    return weights[0]


def refuse_other_training(ranks, max_norm=None):
    """Refuse a program whose ranks differ, or do not train as one process with all their images."""
    weights = refuse_ranks_apart(ranks)
    clips = say(" and clips their gradient") if max_norm else ""
    pairs = zip(train_alone(ranks, max_norm), weights, strict=True)
    for k, (alone, together) in enumerate(pairs, 1):
        if not same(alone, together, 1e-4):
            refuse(
                "The ranks have equal weights, but after training step {step} not those of one"
                " process that trains on the images of all ranks{clips}{reason}.",
                step=k,
                clips=clips,
                reason=compared(ranks, k, together, alone),
            )


def refuse_different_weights(ranks, why=None):
    """Refuse ranks with different weights after a training step k; why(ranks, k) says why."""
    if k := first_difference(map(weights_after_steps, ranks)):
        refuse(
            "After training step {step}, the weights of the ranks differ{reason}.",
            step=k,
            reason=why(ranks, k) if why else "",
        )


def refuse_other_weights(ranks, torch_ranks, odd_ranks):
    """Refuse a program whose weights differ by one bit from the program with torch's DDP.

    Or, in the run with ODD_MODEL, from those of one process.
    """
    refuse_torchs_own(ranks[0])
    refuse_unfinished_messages(ranks[0])
    first = [values(rank, "before")[0].weights for rank in ranks if steps(rank)]
    if len(first) == 2 and not same(*first):
        refuse("The ranks begin with different weights.")
    if first and not same(first[0], values(torch_ranks[0], "before")[0].weights):
        refuse("The ranks begin with equal weights, but not with those that rank 0 had at first.")
    refuse_different_weights(ranks, why_own_weights)
    if len(steps(ranks[0])) != len(steps(torch_ranks[0])):
        refuse(
            "The program took {steps} training steps, torch's DDP took {torch_steps}.",
            steps=len(steps(ranks[0])),
            torch_steps=len(steps(torch_ranks[0])),
        )
    mine, torchs = weights_after_steps(ranks[0]), weights_after_steps(torch_ranks[0])
    if k := first_difference([mine, torchs]):
        size = distance(mine[k - 1], torchs[k - 1])
        refuse(
            "The ranks have equal weights, but after training step {step} they are not those of"
            " torch's DDP: the largest difference is {size:.2g}{reason}.",
            step=k,
            size=size,
            reason=compared(ranks, k, mine[k - 1], torchs[k - 1]),
        )
    if values(ranks[0], "old wait"):
        refuse(
            "A training step waits again for the messages of the step before: empty the list,"
            " else it grows with every step."
        )
    refuse_odd_weights(odd_ranks)


def refuse_odd_weights(ranks):
    """Refuse the weights of a run with ODD_MODEL if they are not those of one process."""
    if not same(*[values(rank, "before")[0].weights for rank in ranks[:2]]):
        refuse(
            "In the run with ODD_MODEL=1, the ranks begin with different weights: they also need"
            " the frozen parameters of rank 0."
        )
    alone = train_alone(ranks)
    for rank in ranks:
        together = weights_before_next_steps(rank)
        for k, (expected, weights) in enumerate(zip(alone, together, strict=True), 1):
            if not same(expected, weights, 1e-4):
                refuse(
                    "With two ranks, the weights are right. With WORLD_SIZE=3 and ODD_MODEL=1 (a"
                    " model with a tied, a frozen and an unused parameter), rank {rank} has other"
                    " weights than one process after training step {step}{reason}.",
                    rank=rank.rank,
                    step=k,
                    reason=compared(ranks, k, weights, expected),
                )


def refuse_torchs_own(rank, allowed=()):
    """Refuse a program that lets torch do what the reader should write."""
    names = [name for name in values(rank, "torch's own") if name not in allowed]
    if names:
        refuse("{name} of torch does this already: here, please write your own.", name=names[0])


def refuse_late_messages(rank, allowed=0):
    """Refuse gradients that are not sent during the backward pass, or that it waits for.

    Args:
        rank: a Record.
        allowed: messages per training step that may begin after the backward pass.
    """
    sent = gradient_messages(rank)
    if not sent:
        refuse("I see no message with gradients: please use functions of torch.distributed.")
    late = [message for message in sent if not message.in_backward]
    if len(late) == len(sent) or len(late) > allowed * len(steps(rank)):
        refuse(
            "{late} of {sent} messages began after the backward pass.",
            late=len(late),
            sent=len(sent),
        )
    if True in values(rank, "wait"):
        refuse(
            "The backward pass waits for its messages: start each with async_op=True, and wait in"
            " finish_gradients()."
        )
    computed, total = sent[0].products, values(rank, "backward")[0]
    if computed > 0.75 * total:
        refuse(
            "The first message began when the backward pass had computed {computed} of its"
            " {total} matrix products: send each part as soon as it is complete.",
            computed=computed,
            total=total,
        )


def refuse_unfinished_messages(rank, begin="batch", end="step"):
    """Refuse a program that sends messages, but does not wait until they have arrived.

    Args:
        rank: a Record.
        begin: the events after which messages are sent.
        end: the events before which they must have arrived.
    """
    unfinished = 0  # messages
    is_between = False  # `begin` and `end`
    for event in rank.events:
        if event.kind == end and unfinished > 0:
            refuse(
                "The program sends messages, but does not wait for {unfinished} of them before it"
                " uses the tensors: they may arrive too late.",
                unfinished=unfinished,
            )
        if event.kind in (begin, end):
            is_between = event.kind == begin
            unfinished = 0
        elif is_between and event.kind == "message":
            unfinished += 1
        elif is_between and event.kind == "wait":
            unfinished -= 1


def refuse_different_ends(ranks):
    """Refuse ranks that end with different weights, or after different numbers of collectives."""
    refuse_different_weights(ranks)
    if not same(*[weights_of(variable(rank, "model")) for rank in ranks]):
        refuse(
            "The ranks took {counts[0]} and {counts[1]} training steps, and end with different"
            " weights.",
            counts=[len(steps(rank)) for rank in ranks],
        )
    refuse_unequal_messages(ranks)


def refuse_unequal_messages(ranks):
    """Refuse ranks of which one has called a collective more often than the other."""
    counts = [len(values(rank, "message")) for rank in ranks]
    if counts[0] != counts[1]:
        refuse(
            "Rank 0 called {counts[0]} collectives, rank 1 called {counts[1]}: one rank stopped"
            " waiting only because the other one had ended.",
            counts=counts,
        )


def gradient_messages(rank):
    """Return the Messages of a rank after its first forward pass.

    Without broadcasts: torch's DDP sends some before the second step, when it divides buckets anew.
    And without those of one number, such as a loss that is printed, or of none, as a barrier.
    """
    kinds = [event.kind for event in rank.events]
    events = rank.events[kinds.index("batch") :] if "batch" in kinds else []
    sent = [event.value for event in events if event.kind == "message"]
    return [one for one in sent if one.name != "broadcast" and one.size > NUMBER]


def sent_per_step(rank):
    """Return how many messages a rank sent per training step, and of how many bytes."""
    sent = gradient_messages(rank)
    count = len(steps(rank))
    size = sum(message.size for message in sent) / count
    return say("{count:g} with {size:,.0f} bytes", count=len(sent) / count, size=size)


def refuse_repeated_run(ranks, again):
    """Refuse a program whose second run did not end with the weights of the first."""
    if not same(steps(ranks[0])[-1].weights, steps(again[0])[-1].weights):
        refuse("Two runs of the program end with different weights: their random numbers differ.")


def listed(numbers):
    """Return numbers as text, runs of consecutive ones shortened: "0 to 127, 130"."""
    parts = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = []
    for first, last in parts:
        if last > first + 1:
            texts.append(say("{first} to {last}", first=first, last=last))
        else:
            texts += map(str, range(first, last + 1))
    if len(texts) > 6:
        texts = [*texts[:5], "..."]
    return joined("{before}, {after}", texts)


def weights_of(module):
    return [p.detach().clone() for p in module.parameters()]
