"""The schedulers of the ranks must decide on one number, and the training must be that of one."""

from exercises.judge.judging import refuse, refuse_other_training, refuse_repeated_images, steps
from exercises.sentences import say

EPOCHS = 8
FIRST_LR = 1.0


def check(ranks):
    rates = [[step.lr for step in steps(rank)] for rank in ranks]
    for k, (first, second) in enumerate(zip(*rates, strict=False), 1):
        if first != second:
            refuse(
                "In training step {step}, the learning rate is {first:g} on rank 0 and {second:g}"
                " on rank 1: the schedulers got different numbers.",
                step=k,
                first=first,
                second=second,
            )
    refuse_repeated_images(ranks, 256, EPOCHS)
    refuse_other_training(ranks)
    if rates[0][0] != FIRST_LR or rates[0][-1] > FIRST_LR / 2:
        refuse(
            "The learning rate goes from {first:g} to {last:g}: it should begin at 1, and be halved"
            " when the loss falls by less than a tenth.",
            first=rates[0][0],
            last=rates[0][-1],
        )
    return say(
        "the ranks halve the learning rate in the same training steps, from {first:g} to {last:g}.",
        first=rates[0][0],
        last=rates[0][-1],
    )
