"""The program must end, with the ranks equal and most images trained."""

from exercises.judge.judging import images, refuse, refuse_different_ends, steps
from exercises.sentences import say


def check(ranks):
    if not all(map(steps, ranks)):
        refuse("At least one rank took no training step.")
    refuse_different_ends(ranks)
    counts = [len(steps(rank)) for rank in ranks]
    parts = [set(images(rank)) - {-1} for rank in ranks]  # a mend may add empty images
    if len(both := parts[0] & parts[1]) > 10:  # a DistributedSampler may repeat one
        refuse(
            "{count} images were trained on both ranks: the images of a rank are its own.",
            count=len(both),
        )
    used = len(parts[0] | parts[1])
    if used < 120:
        refuse("Only {used} of 150 images were trained: both ranks have at least 60.", used=used)
    return say(
        "the ranks took {counts[0]} and {counts[1]} training steps, with {used} of 150 images,"
        " and end with equal weights.",
        counts=counts,
        used=used,
    )
