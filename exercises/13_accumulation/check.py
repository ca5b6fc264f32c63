"""The ranks must exchange gradients once per training step, and learn the same as one process."""

from exercises.judge.judging import (
    gradient_messages,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    steps,
    values,
)
from exercises.sentences import say

STEPS = 2
BATCH_SIZE = 16  # of a rank
GRADIENTS = 4 * 68  # bytes of the gradients of all weights


def check(ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            "The optimizer took {count} training steps; expected {steps}, with four batches each.",
            count=count,
            steps=STEPS,
        )
    largest = max(len(batch) for batch, _ in values(ranks[0], "batch"))
    if largest > BATCH_SIZE:
        refuse(
            "A forward pass had {largest} images: accumulate gradients instead, so that only"
            " {batch_size} images must fit in memory.",
            largest=largest,
            batch_size=BATCH_SIZE,
        )
    refuse_other_training(ranks)
    refuse_repeated_images(ranks, 256)
    sent = gradient_messages(ranks[0])
    size = sum(message.size for message in sent)
    if size > 1.5 * STEPS * GRADIENTS:  # a mend may also send losses
        why = ""
        if values(ranks[0], "backward without sync") and all(values(ranks[0], "torch's DDP")):
            why = say(
                ". no_sync() held only for the backward pass, but DDP decides in the forward pass:"
                " move `ddp(batch)` into it too"
            )
        refuse(
            "{sent} messages with {size:,} bytes for {steps} training steps, although the"
            " gradients have {gradients} bytes: the ranks exchange them more than once per"
            " step{why}.",
            sent=len(sent),
            size=size,
            steps=STEPS,
            gradients=GRADIENTS,
            why=why,
        )
    return say(
        "{sent} messages with {size:,} bytes for {steps} training steps, and the weights are"
        " those of one process.",
        sent=len(sent),
        size=size,
        steps=STEPS,
    )
