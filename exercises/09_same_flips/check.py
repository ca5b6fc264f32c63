"""The ranks must draw different flips, a second run the same ones; they train one model."""

from itertools import combinations

import torch

from exercises.judge.judging import (
    refuse,
    refuse_different_weights,
    refuse_repeated_run,
    same,
    say,
    values,
)
from exercises.judge.runner import LATER, Setup

SETUPS = [Setup(), LATER]
IMAGES = 128  # of each rank
SHIFTS = 100  # numbers by which one rank may be behind the other
DEPENDENT = 28  # of 128 flips, more or fewer equal ones than half: five standard deviations


def check(ranks, again):
    if not ranks[0].data.equal(ranks[1].data):
        refuse(
            "The ranks draw different images: set one seed for all ranks first, and the seed of"
            " the rank after the data are built.",
            "各 rank 的图像不同：应该先用相同的随机种子构建数据，再设置包含 rank 的随机种子。",
        )
    flips = [flips_of(rank) for rank in ranks]
    a, b = (torch.cat(of_rank).tolist() for of_rank in flips)
    if len(a) != IMAGES or len(b) != IMAGES:
        refuse(
            f"Each rank should train on {IMAGES} images; I see {len(a)} and {len(b)}.",
            f"每个 rank 应该用 {IMAGES} 张图像训练，实际为 {len(a)} 张和 {len(b)} 张。",
        )
    if not all(30 < sum(flips) < 98 for flips in (a, b)):
        refuse(
            f"About a half of {IMAGES} images should be flipped on each rank; I see {sum(a)} and"
            f" {sum(b)}.",
            f"每个 rank 的 {IMAGES} 张图像应该翻转约一半，实际为 {sum(a)} 张和 {sum(b)} 张。",
        )
    refuse_equal_flips(flips, a, b)
    refuse_dependent_flips(a, b)
    refuse_other_models(ranks)
    for rank, second in zip(ranks, again, strict=True):
        if not same(flips_of(rank), flips_of(second)):
            refuse(
                f"In a second run, rank {rank.rank} flips other images: its random numbers do not"
                " follow from a seed.",
                f"再运行一次，rank {rank.rank} 翻转的图像不同：它的随机数不是由随机种子决定的。",
            )
    refuse_repeated_run(ranks, again)
    return say(
        "the ranks flip independently, and a second run flips as the first did.",
        "各 rank 的翻转互相独立；再运行一次，翻转与第一次相同。",
    )


def flips_of(rank):
    """Return which images of each batch a rank flipped: a list of tensors of 0 and 1.

    A flipped image is not one of the data.
    """
    return [
        torch.tensor([int(number == -1) for number in batch]) for batch, _ in values(rank, "batch")
    ]


def refuse_equal_flips(flips, a, b):
    """Refuse random numbers that occur twice."""
    if a == b:
        refuse(
            "Both ranks flipped alike: the third image of a batch is flipped on both or on none.",
            "两个 rank 的翻转完全相同：例如一个 batch 的第三张图像，要么都翻转，要么都不翻转。",
        )
    batches = [(r, k, batch) for r, of_rank in enumerate(flips) for k, batch in enumerate(of_rank)]
    for (r, k, first), (s, m, second) in combinations(batches, 2):
        if first.equal(second):
            refuse(
                f"Rank {r} in batch {k} and rank {s} in batch {m} flip the same places: their"
                " random numbers are equal.",
                f"rank {r} 的 batch {k} 与 rank {s} 的 batch {m} 翻转的位置相同：随机数一样。",
            )
    for shift in range(1, SHIFTS):
        if a[shift:] == b[:-shift] or b[shift:] == a[:-shift]:
            refuse(
                f"The ranks draw the same random numbers, one of them {shift} later.",
                f"两个 rank 抽到的随机数相同，只是其中一个晚了 {shift} 个。",
            )


def refuse_dependent_flips(a, b):
    equal = sum(x == y for x, y in zip(a, b, strict=True))
    if abs(equal - IMAGES / 2) > DEPENDENT:
        refuse(
            f"The flips of a rank depend on those of the other: {equal} of {IMAGES} are equal,"
            " and a half would be by chance.",
            f"两个 rank 的翻转互相依赖：{IMAGES} 个中有 {equal} 个相同，独立时应该约有一半。",
        )


def refuse_other_models(ranks):
    first, second = (values(rank, "before")[0].weights for rank in ranks)
    if not same(first, second):
        refuse(
            "The ranks begin with different weights.",
            "各 rank 的初始权重不同。",
        )
    refuse_different_weights(ranks)
