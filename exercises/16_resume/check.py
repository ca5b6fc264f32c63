"""A continued epoch must train the images that were not yet trained."""

from exercises.judge.judging import batches, refuse, refuse_unknown_images, same, steps, values
from exercises.judge.runner import Setup
from exercises.sentences import say

IMAGES = 256
STEPS = 8
KILLED = (3, 5)  # the steps after which the job is killed, in two runs
SETUPS = [Setup(environment={"KILLED_AFTER": killed}) for killed in KILLED]


def check(*runs):
    for killed, ranks in zip(KILLED, runs, strict=True):
        refuse_bad_restart(killed, ranks)
    return say("the epoch continued where it was interrupted: each image was trained once.")


def refuse_bad_restart(killed, ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            "The epoch had {count} training steps in all; expected {steps}: {killed}, then {rest}.",
            count=count,
            steps=STEPS,
            killed=killed,
            rest=STEPS - killed,
        )
    if len(values(ranks[0], "loader")) == 1 and reads_after(ranks[0], killed):
        refuse(
            "All {steps} training steps come from one iterator of a DataLoader. A job that starts"
            " again has no such iterator, only its checkpoint.",
            steps=STEPS,
        )
    begin, end = values(ranks[0], "before")[killed], steps(ranks[0])[killed - 1]
    if not same(begin.weights, end.weights):
        refuse(
            "After the restart, the training did not begin with the weights after step {killed}:"
            " they are in the checkpoint.",
            killed=killed,
        )
    before, after = [], []
    for rank in ranks:
        trained = batches(rank)
        before += [number for batch in trained[:killed] for number in batch]
        after += [number for batch in trained[killed:] for number in batch]
    refuse_unknown_images(before + after)
    if again := set(before) & set(after):
        refuse(
            "{again} images were trained before and after the restart at step {killed}, for"
            " example image {example}; {missing} images were never trained.",
            again=len(again),
            killed=killed,
            example=min(again),
            missing=IMAGES - len(set(before + after)),
        )
    if missing := IMAGES - len(set(before + after)):
        refuse(
            "{missing} of {images} images were never trained in this epoch.",
            missing=missing,
            images=IMAGES,
        )


def reads_after(rank, step):
    """Return whether a rank reads images after this training step."""
    kinds = [event.kind for event in rank.events]
    last = max((place for place, kind in enumerate(kinds) if kind == "read"), default=0)
    return kinds[:last].count("step") >= step
