"""Rank 0 must print what both ranks counted, and the program must end."""

import re

from exercises.judge.judging import evaluated, refuse, right_answers
from exercises.judge.runner import OTHER_IMAGES, Setup
from exercises.sentences import say

SETUPS = [Setup(), OTHER_IMAGES]


def check_run(ranks):
    a, b = (len(evaluated(rank)) for rank in ranks)
    if (a, b) != (50, 50):
        refuse(
            "Rank 0 evaluated {a} images and rank 1 {b}: each should evaluate half of 100.",
            a=a,
            b=b,
        )
    right = right_answers(ranks[0])
    truth, part = int(right.sum()), int(right[::2].sum())
    printed = [re.findall(r"(\d+) of 100", rank.output) for rank in ranks]
    if not printed[0]:
        refuse("Rank 0 printed no line with `... of 100 answers are correct`.")
    if printed[1]:
        refuse("Rank 1 printed the result too: only rank 0 should print.")
    number = int(printed[0][-1])
    if number != truth:
        own = say(", the answers of rank 0 alone") if number == part else ""
        refuse(
            "Rank 0 printed {number} correct answers{own}; both ranks together have {truth}.",
            number=number,
            own=own,
            truth=truth,
        )
    return say("rank 0 printed {truth}, the correct answers of both ranks.", truth=truth)
