"""Rank 0 must print what both ranks counted, and the program must end."""

import re

from exercises.judge.judging import evaluated, refuse, say, variable


def check(ranks):
    a, b = (len(evaluated(rank)) for rank in ranks)
    if (a, b) != (50, 50):
        refuse(
            f"Rank 0 evaluated {a} images and rank 1 {b}: each should evaluate half of 100.",
            f"rank 0 评估了 {a} 张图像，rank 1 评估了 {b} 张：每个 rank 应该评估 100 张的一半。",
        )
    truth, part = right_answers(ranks[0])
    printed = [re.findall(r"(\d+) of 100", rank.output) for rank in ranks]
    if not printed[0]:
        refuse(
            "Rank 0 printed no line with `... of 100 answers are correct`.",
            "rank 0 没有打印 `... of 100 answers are correct` 这一行。",
        )
    if printed[1]:
        refuse(
            "Rank 1 printed the result too: only rank 0 should print.",
            "rank 1 也打印了结果：应该只由 rank 0 打印。",
        )
    number = int(printed[0][-1])
    if number != truth:
        own = (
            say(", the answers of rank 0 alone", "，这只是 rank 0 的结果") if number == part else ""
        )
        refuse(
            f"Rank 0 printed {number} correct answers{own}; both ranks together have {truth}.",
            f"rank 0 打印的正确数是 {number}{own}；两个 rank 合计为 {truth}。",
        )
    return say(
        f"rank 0 printed {truth}, the correct answers of both ranks.",
        f"rank 0 打印了 {truth}，即两个 rank 合计的正确数。",
    )


def right_answers(rank):
    """Return the correct answers to all images, and to those of the rank."""
    right = variable(rank, "model")(rank.data).argmax(dim=1) == rank.data[:, :4].argmax(dim=1)
    return int(right.sum()), int(right[rank.rank :: 2].sum())
