"""The ranks must draw different flips, a second run the same ones; the model begins equal."""

import torch

from exercises.judging import refuse, refuse_repeated_run, same, say, values, variable
from exercises.runner import Setup

SETUPS = [Setup(), Setup()]


def check(ranks, again):
    a, b = (torch.cat(variable(rank, "flips")).int().tolist() for rank in ranks)
    if len(a) != 128 or len(b) != 128:
        refuse(
            f"I expected flips for 128 images on each rank, and see {len(a)} and {len(b)}.",
            f"每个 rank 应该有 128 张图像的翻转，实际为 {len(a)} 张和 {len(b)} 张。",
        )
    if a == b:
        refuse(
            "Both ranks flipped alike: the third image of a batch is flipped on both or on none.",
            "两个 rank 的翻转完全相同：例如一个 batch 的第三张图像，要么都翻转，要么都不翻转。",
        )
    for shift in range(1, 64):
        if a[shift:] == b[:-shift] or b[shift:] == a[:-shift]:
            refuse(
                f"The ranks draw the same random numbers, one of them {shift} later.",
                f"两个 rank 抽到的随机数相同，只是其中一个晚了 {shift} 个。",
            )
    if not all(30 < sum(flips) < 98 for flips in (a, b)):
        refuse(
            f"About a half of 128 images should be flipped on each rank; I see {sum(a)} and"
            f" {sum(b)}.",
            f"每个 rank 的 128 张图像应该翻转约一半，实际为 {sum(a)} 张和 {sum(b)} 张。",
        )
    first, second = (values(rank, "before")[0].weights for rank in ranks)
    if not same(first, second):
        refuse(
            "The ranks begin with different weights.",
            "各 rank 的初始权重不同。",
        )
    refuse_repeated_run(ranks, again)
    return say(
        "the ranks flip independently, and a second run flips as the first did.",
        "各 rank 的翻转互相独立；再运行一次，翻转与第一次相同。",
    )
