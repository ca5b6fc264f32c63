"""A continued epoch must train the images that were not yet trained."""

from exercises.judge.judging import batches, refuse, refuse_unknown_images, steps, values
from exercises.sentences import say

IMAGES = 256
STEPS = 8
KILLED = 3  # the step after which the job was killed


def check(ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            "The epoch had {count} training steps in all; expected {steps}: {killed}, then {rest}.",
            count=count,
            steps=STEPS,
            killed=KILLED,
            rest=STEPS - KILLED,
        )
    if len(values(ranks[0], "loader")) == 1:
        refuse(
            "All {steps} training steps come from one iterator of a DataLoader. A job that starts"
            " again has no such iterator, only its checkpoint.",
            steps=STEPS,
        )
    before, after = [], []
    for rank in ranks:
        trained = batches(rank)
        before += [number for batch in trained[:KILLED] for number in batch]
        after += [number for batch in trained[KILLED:] for number in batch]
    refuse_unknown_images(before + after)
    if again := set(before) & set(after):
        refuse(
            "{again} images were trained before and after the restart, for example image"
            " {example}; {missing} images were never trained.",
            again=len(again),
            example=min(again),
            missing=IMAGES - len(set(before + after)),
        )
    if missing := IMAGES - len(set(before + after)):
        refuse(
            "{missing} of {images} images were never trained in this epoch.",
            missing=missing,
            images=IMAGES,
        )
    return say("the epoch continued where it was interrupted: each image was trained once.")
