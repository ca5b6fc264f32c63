"""Judge what the ranks of a program did, in a sentence that a person would say.

The check of each exercise is check.py in its folder, with

    check(*runs)    runs[k] holds the Records of the ranks of SETUPS[k]. Calls refuse() if the
                    program is not yet right; else it returns a sentence that says what it saw
    SETUPS          how to start the program, if not once with two ranks
    MAY_FAIL        True if a program that ends with an error may be right
"""

import copy
import importlib
import pickle
import re
import textwrap
from pathlib import Path

import torch
from torch import nn

from exercises.judge.recorder import Record
from exercises.judge.runner import Setup, folder_of

language = "en"  # of the answers


class Refused(Exception):
    """The program is not yet right; the message says what it did."""


def say(english, chinese):
    """Return the sentence in the reader's language."""
    return chinese if language == "zh" else english


def refuse(english, chinese):
    raise Refused(say(english, chinese))


# Called by the runner


def setups(number):
    """Return how to start the program of an exercise: a list of Setup."""
    return getattr(load_check(number), "SETUPS", [Setup()])


def judge(number, program, answer_language, results, folder):
    """Return (passed, sentence, output) for a program that has run once for each Setup.

    Args:
        number: of the exercise.
        program: path of the program.
        answer_language: "en" or "zh".
        results: of runner.run(), for each run.
        folder: has a folder for each run, with the records of its ranks.
    """
    global language
    language = answer_language
    module = load_check(number)
    starts = setups(number)
    counts = [len(setup.local_ranks) for setup in starts]
    runs = [read_records(Path(folder, str(k)), count) for k, count in enumerate(counts)]
    output = show_output(runs[0])
    try:
        for k, result in enumerate(results):  # none after one that hangs
            variables = starts[k].environment if k else {}
            may_fail = getattr(module, "MAY_FAIL", False)
            refuse_what_did_not_end(result, runs[k], program, may_fail, variables)
        return True, module.check(*runs), output
    except Refused as refused:
        return False, str(refused), output
    except Exception as error:  # a program may put anything into its variables
        found = f"{type(error).__name__}: {error}"
        text = say(
            f"I cannot read what the program did ({found}): please keep the names and the types of"
            " its variables.",
            f"无法读取程序的结果（{found}）：请保留变量的名字和类型。",
        )
        return False, text, output


def load_check(number):
    return importlib.import_module(f"exercises.{folder_of(number).name}.check")


def read_records(folder, count):
    """Return the Records of all ranks. A rank that was killed has an empty one.

    In place of the images in a batch there are their numbers in the data of rank 0.
    """
    records = []
    for rank in range(count):
        path = folder / f"record-{rank}"
        records.append(pickle.loads(path.read_bytes()) if path.exists() else Record(rank))
    data = records[0].data
    if data is not None:
        numbers = {key(image): number for number, image in enumerate(data)}
        for record in records:
            record.events = [
                number_images(event, data[0].numel(), numbers) for event in record.events
            ]
    return records


def number_images(event, size, numbers):
    """Return an event with the numbers of images in place of the images.

    A batch of another size is no batch of images, and an image that rank 0 does not have is -1.
    """
    if event.kind != "batch":
        return event
    batch, is_training = event.value
    if batch.dim() < 2 or batch[0].numel() != size:
        return event._replace(kind="other batch")
    return event._replace(value=([numbers.get(key(image), -1) for image in batch], is_training))


def key(image):
    return image.numpy().tobytes()


def show_output(ranks):
    """Return what the ranks printed, each line with its rank."""
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
    source = Path(program).read_text().splitlines()
    names = ", ".join(f"{name}={value}" for name, value in variables.items())
    run = say(f", in the run with {names}", f"（运行时 {names}）") if names else ""
    if result == "hangs":
        places = say("; ", "；").join(where(rank, source) for rank in ranks)
        refuse(
            f"The ranks wait for each other forever{run}: {places}.",
            f"各 rank 一直在互相等待{run}：{places}。",
        )
    if result == "limit":
        places = say("; ", "；").join(where(rank, source, "is", "运行") for rank in ranks)
        refuse(
            f"The program did not end within the time limit{run}: {places}.",
            f"程序在时限内没有结束{run}：{places}。",
        )
    if result == "failed" and not may_fail:
        failed = [rank for rank in ranks if rank.exit_code != 0 and not rank.waits]
        rank = min(failed, key=lost_another, default=ranks[0])
        if lost_another(rank):
            others = say("; ", "；").join(
                where(other, source) for other in ranks if other is not rank
            )
            refuse(
                f"Rank {rank.rank} waited for another rank in {line_of(rank, source)}, but"
                f" {others}.",
                f"rank {rank.rank} 在{line_of(rank, source)} 等待其他 rank，但{others}。",
            )
        text = where(rank, source)
        refuse(f"The program failed{run}: {text}.", f"程序出错{run}：{text}。")


def lost_another(rank):
    """Return whether a rank failed because another one had failed or ended."""
    words = ("Connection closed", "Connection reset", "likely closed", "Broken pipe", "Timed out")
    return rank.error is not None and any(word in rank.error[1] for word in words)


def line_of(rank, source):
    text = source[rank.line - 1].strip() if rank.line else ""
    return say(f"line {rank.line}, `{text}`", f"第 {rank.line} 行 `{text}`")


def where(rank, source, verb="waits", chinese_verb="等待"):
    """Return in which line a rank waits, failed or ended."""
    line = line_of(rank, source)
    if rank.waits:
        return say(
            f"rank {rank.rank} {verb} in {line}", f"rank {rank.rank} 在{line} {chinese_verb}"
        )
    if rank.error:
        error = describe_error(rank)
        return say(f"rank {rank.rank}, {line}: {error}", f"rank {rank.rank}，{line}：{error}")
    if rank.exit_code is None:
        return say(f"rank {rank.rank} was killed", f"rank {rank.rank} 已被杀死")
    return say(
        f"rank {rank.rank} has ended with exit code {rank.exit_code}",
        f"rank {rank.rank} 已结束，退出码 {rank.exit_code}",
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
    return [
        number for batch, is_training in values(rank, "batch") if is_training for number in batch
    ]


def evaluated(rank):
    """Return the numbers of the images that went through the model of a rank, in order."""
    return [number for batch, _ in values(rank, "batch") for number in batch]


def epochs(rank, count):
    """Return the images of a rank in `count` equal parts, or None if there are no such parts."""
    numbers = images(rank)
    size, rest = divmod(len(numbers), count)
    if rest or not size:
        return None
    return [numbers[k * size : (k + 1) * size] for k in range(count)]


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


def messages(rank, *names):
    """Return the Messages of a rank, all or those of these collectives."""
    return [one for one in values(rank, "message") if not names or one.name in names]


def variable(rank, name):
    """Return a variable of the program; refuse the program if it has none of this name."""
    try:
        return pickle.loads(rank.variables[name])
    except Exception:
        return refuse(
            f"I expected a variable `{name}` at the end of the program: please keep the name, and"
            " do not move it into a function.",
            f"程序结束时应该有变量 `{name}`：请保留这个变量名，也不要把它放进函数。",
        )


# Comparing


def first_difference(ranks):
    """Return the number of the first training step after which the weights of ranks differ.

    Counted from 1; None if they are always equal.
    """
    for k, these in enumerate(zip(*map(steps, ranks), strict=False), 1):
        if not all(same(these[0].weights, step.weights) for step in these[1:]):
            return k
    return None


def same(a, b, tolerance=0.0):
    """Return whether two lists of tensors are equal, up to a difference."""
    return len(a) == len(b) and distance(a, b) <= tolerance


def distance(a, b):
    """Return the largest difference of two lists of tensors."""
    return max((float((x - y).abs().max()) for x, y in zip(a, b, strict=True)), default=0.0)


def train_alone(ranks, max_norm=None):
    """Train as one process would, with the images that all ranks read in each training step.

    The model is the variable `model` of the program; the loss is cross entropy, the optimizer plain
    SGD, and the class of an image the brightest of its first four pixels.

    Args:
        ranks: Records.
        max_norm: to clip the gradient to, or None.

    Returns:
        The weights after each training step: a list of lists of tensors.
    """
    model = copy.deepcopy(variable(ranks[0], "model"))
    data = ranks[0].data
    targets = data[:, :4].argmax(dim=1)
    parameters = list(model.parameters())
    for parameter, weight in zip(parameters, values(ranks[0], "before")[0].weights, strict=True):
        parameter.data.copy_(weight)
    results = []
    for k, parts in enumerate(zip(*map(batches, ranks), strict=True)):
        numbers = [number for part in parts for number in part]
        refuse_unknown_images(numbers)
        lr = steps(ranks[0])[k].lr
        model.zero_grad()
        nn.functional.cross_entropy(model(data[numbers]), targets[numbers]).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= lr * parameter.grad
        results.append([parameter.detach().clone() for parameter in parameters])
    return results


def refuse_unknown_images(numbers):
    if -1 in numbers:
        refuse(
            "Some ranks train on images that rank 0 does not have: all ranks must draw the same"
            " images, and divide them afterwards.",
            "有的 rank 用 rank 0 没有的图像训练：各 rank 应生成相同的数据集，然后再划分。",
        )


def refuse_repeated_images(ranks, count):
    """Refuse ranks that do not train on each of `count` images once in all."""
    parts = [set(images(rank)) for rank in ranks]
    numbers = [number for rank in ranks for number in images(rank)]
    refuse_unknown_images(numbers)
    if not numbers:
        refuse(
            "I see no image that is trained: call the model with the images.",
            "没有看到用图像训练：应该用图像调用模型。",
        )
    if all(len(part) == count for part in parts):
        refuse(
            f"Each rank trained on all {count} images, so each image was trained on every rank.",
            f"每个 rank 都用全部 {count} 张图像训练，所以每张图像在每个 rank 上都训练了一次。",
        )
    if all(part == parts[0] for part in parts):
        share = len(parts[0]) / count
        refuse(
            f"All ranks trained on the same images, {listed(parts[0])}: together they saw"
            f" {share:.0%} of the training set.",
            f"所有 rank 用的图像相同（{listed(parts[0])}）：合起来只用了训练集的 {share:.0%}。",
        )
    if several := [number for number in parts[0] if any(number in part for part in parts[1:])]:
        refuse(
            f"{len(several)} images were trained on several ranks, for example image"
            f" {min(several)}.",
            f"有 {len(several)} 张图像，几个 rank 都用了，例如图像 {min(several)}。",
        )
    if missing := set(range(count)) - set(numbers):
        refuse(
            f"{len(missing)} of {count} images were never trained, for example image"
            f" {min(missing)}.",
            f"{count} 张图像中，有 {len(missing)} 张从未用到，例如图像 {min(missing)}。",
        )
    if len(numbers) > count:
        refuse(
            f"{len(numbers) - count} images were trained more than once.",
            f"有 {len(numbers) - count} 张图像用了不止一次。",
        )


def refuse_other_training(ranks, max_norm=None):
    """Refuse a program whose ranks differ, or do not train as one process with all their images."""
    if any(not steps(rank) for rank in ranks):
        refuse(
            "I see no training step: expected a call of `optimizer.step()`.",
            "没有看到训练步：程序应该调用 `optimizer.step()`。",
        )
    if k := first_difference(ranks):
        refuse(
            f"After training step {k}, the weights of the ranks differ: each rank trains a model of"
            " its own.",
            f"第 {k} 个训练步之后，各 rank 的权重不同：每个 rank 各训各的模型。",
        )
    counts = {len(steps(rank)) for rank in ranks}
    if len(counts) > 1:
        refuse(
            f"The ranks took different numbers of training steps: {listed(counts)}.",
            f"各 rank 的训练步数不同：{listed(counts)}。",
        )
    before = values(ranks[0], "before")[0].weights
    if same(before, steps(ranks[0])[-1].weights):
        refuse("The training does not change the weights.", "训练没有改变权重。")
    clips = say(" and clips their gradient", "并裁剪梯度") if max_norm else ""
    for k, weights in enumerate(train_alone(ranks, max_norm), 1):
        if not same(weights, steps(ranks[0])[k - 1].weights, 1e-4):
            refuse(
                f"The ranks have equal weights, but after training step {k} not those of one"
                f" process that trains on the images of all ranks{clips}.",
                f"各 rank 的权重相同，但第 {k} 个训练步之后，与单进程用所有 rank 的图像"
                f"训练{clips}的结果不同。",
            )


def refuse_different_weights(ranks):
    """Refuse ranks that have different weights after a training step."""
    if k := first_difference(ranks):
        refuse(
            f"After training step {k}, the weights of the ranks differ.",
            f"第 {k} 个训练步之后，各 rank 的权重不同。",
        )


def refuse_other_weights(ranks, torch_ranks):
    """Refuse a program whose weights differ by one bit from the program with torch's DDP."""
    if values(ranks[0], "torch's DDP"):
        refuse(
            "The program uses torch's DDP: please write your own.",
            "程序用了 torch 的 DDP：请自己实现。",
        )
    refuse_unfinished_messages(ranks[0])
    first = [values(rank, "before")[0].weights for rank in ranks if steps(rank)]
    if len(first) == 2 and not same(*first):
        refuse("The ranks begin with different weights.", "各 rank 的初始权重不同。")
    if first and not same(first[0], values(torch_ranks[0], "before")[0].weights):
        refuse(
            "The ranks begin with equal weights, but not with those that rank 0 had at first.",
            "各 rank 的初始权重相同，但不是 rank 0 原来的权重。",
        )
    refuse_different_weights(ranks)
    if len(steps(ranks[0])) != len(steps(torch_ranks[0])):
        refuse(
            f"The program took {len(steps(ranks[0]))} training steps, torch's DDP took"
            f" {len(steps(torch_ranks[0]))}.",
            f"程序训练了 {len(steps(ranks[0]))} 步，"
            f"torch 的 DDP 训练了 {len(steps(torch_ranks[0]))} 步。",
        )
    if k := first_difference([ranks[0], torch_ranks[0]]):
        size = distance(steps(ranks[0])[k - 1].weights, steps(torch_ranks[0])[k - 1].weights)
        refuse(
            f"The ranks have equal weights, but after training step {k} they are not those of"
            f" torch's DDP: the largest difference is {size:.2g}.",
            f"各 rank 的权重相同，但第 {k} 个训练步之后，与 torch 的 DDP 不同："
            f"最大相差 {size:.2g}。",
        )
    if values(ranks[0], "old wait"):
        refuse(
            "A training step waits again for the messages of the step before: empty the list, else"
            " it grows with every step.",
            "一个训练步又在等待上一步的消息：请清空列表，否则它每一步都会变长。",
        )


def refuse_late_messages(rank, allowed=0):
    """Refuse gradients that are not sent during the backward pass, or that it waits for.

    Args:
        rank: a Record.
        allowed: messages per training step that may begin after the backward pass.
    """
    sent = gradient_messages(rank)
    if not sent:
        refuse(
            "I see no message with gradients: please use functions of torch.distributed.",
            "没有看到发送梯度的消息：请使用 torch.distributed 的函数。",
        )
    late = [message for message in sent if not message.in_backward]
    if len(late) == len(sent) or len(late) > allowed * len(steps(rank)):
        refuse(
            f"{len(late)} of {len(sent)} messages began after the backward pass.",
            f"{len(sent)} 条消息中，有 {len(late)} 条在反向传播之后才开始。",
        )
    if True in values(rank, "wait"):
        refuse(
            "The backward pass waits for its messages: start each with async_op=True, and wait in"
            " finish_gradients().",
            "反向传播要等消息发送完成：请用 async_op=True 启动，再在 finish_gradients() 中等待。",
        )
    computed, total = sent[0].products, values(rank, "backward")[0]
    if computed > 0.75 * total:
        refuse(
            f"The first message began when the backward pass had computed {computed} of its {total}"
            " matrix products: send each part as soon as it is complete.",
            f"第一条消息发出时，反向传播的 {total} 次矩阵乘法已经算完 {computed} 次："
            "各部分应该一就绪就发送。",
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
                f"The program sends messages, but does not wait for {unfinished} of them before it"
                " uses the tensors: they may arrive too late.",
                f"程序发送了消息，但使用张量之前，没有等待其中的 {unfinished} 条完成："
                "消息可能来不及到达。",
            )
        if event.kind in (begin, end):
            is_between = event.kind == begin
            unfinished = 0
        elif is_between and event.kind == "message":
            unfinished += 1
        elif is_between and event.kind == "wait":
            unfinished -= 1


def refuse_unequal_messages(ranks):
    """Refuse ranks of which one has called a collective more often than the other."""
    counts = [len(messages(rank)) for rank in ranks]
    if counts[0] != counts[1]:
        refuse(
            f"Rank 0 called {counts[0]} collectives, rank 1 called {counts[1]}: one rank stopped"
            " waiting only because the other one had ended.",
            f"rank 0 调用了 {counts[0]} 次集合通信操作，rank 1 调用了 {counts[1]} 次："
            "一个 rank 不再等待，只是因为另一个已经结束。",
        )


def gradient_messages(rank):
    """Return the Messages of a rank after its first forward pass.

    Without broadcasts: torch's DDP sends some before the second step, when it divides buckets anew.
    """
    kinds = [event.kind for event in rank.events]
    events = rank.events[kinds.index("batch") :] if "batch" in kinds else []
    sent = [event.value for event in events if event.kind == "message"]
    return [message for message in sent if message.name not in ("broadcast", "barrier")]


def sent_per_step(rank):
    """Return how many messages a rank sent per training step, and of how many bytes."""
    sent = gradient_messages(rank)
    count = len(steps(rank))
    size = sum(message.size for message in sent) / count
    return say(
        f"{len(sent) / count:g} with {size:,.0f} bytes",
        f"{len(sent) / count:g} 条，共 {size:,.0f} 字节",
    )


def refuse_repeated_run(ranks, again):
    """Refuse a program whose second run did not end with the weights of the first."""
    if not same(steps(ranks[0])[-1].weights, steps(again[0])[-1].weights):
        refuse(
            "Two runs of the program end with different weights: their random numbers differ.",
            "程序运行两次，最后的权重不同：两次的随机数不一样。",
        )


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
            texts.append(say(f"{first} to {last}", f"{first} 到 {last}"))
        else:
            texts += map(str, range(first, last + 1))
    if len(texts) > 6:
        texts = [*texts[:5], "..."]
    return say(", ", "、").join(texts)


def weights_of(module):
    return [p.detach().clone() for p in module.parameters()]
