"""Each image must count once in the evaluation, on one of the ranks."""

import re
from collections import Counter

from exercises.judge.judging import evaluated, refuse, right_answers, variable
from exercises.judge.runner import OTHER_IMAGES, Setup
from exercises.sentences import say

SETUPS = [Setup(), OTHER_IMAGES]
IMAGES = 101
LEAST, MOST = 40, 61  # images of a rank: about half of them


def check_run(ranks):
    correct, total = counted(ranks[0])
    truth = int(right_answers(ranks[0]).sum())
    if all(len(set(evaluated(rank))) == IMAGES for rank in ranks):
        refuse(
            "Each rank evaluated all {images} images: they should share the work.", images=IMAGES
        )
    counts = Counter(number for rank in ranks for number in evaluated(rank))
    if missing := len(set(range(IMAGES)) - set(counts)):
        refuse(
            "Images that were not evaluated: {missing} of {images}.", missing=missing, images=IMAGES
        )
    sizes = [len(evaluated(rank)) for rank in ranks]
    if min(sizes) < LEAST or max(sizes) > MOST:
        refuse(
            "Rank 0 evaluated {sizes[0]} images and rank 1 {sizes[1]}: each should evaluate about"
            " half of them.",
            sizes=sizes,
        )
    number, times = counts.most_common(1)[0]
    reason = ""
    if total == sizes[0]:
        reason = say(", those of rank 0 alone")
    elif times > 1:
        reason = say(": image {number} was evaluated twice", number=number)
    if total != IMAGES:
        refuse(
            "The program counted {total} answers for {images} images{reason}.",
            total=total,
            images=IMAGES,
            reason=reason,
        )
    if correct != truth:
        refuse(
            "The program counted {correct} correct answers, but {truth} of {images} are"
            " correct{reason}.",
            correct=correct,
            truth=truth,
            images=IMAGES,
            reason=reason,
        )
    return say(
        "each of {images} images counts once, and {truth} answers are correct.",
        images=IMAGES,
        truth=truth,
    )


def counted(rank):
    """Return how many answers are correct and how many there are, as a rank printed it last."""
    printed = re.findall(r"(\d+)(?:\.0)? of (\d+)", rank.output)
    correct, total = printed[-1] if printed else (variable(rank, x) for x in ("correct", "total"))
    return int(correct), int(total)
