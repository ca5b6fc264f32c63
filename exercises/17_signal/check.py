"""All ranks must stop after the same step, at most five steps after any of them got a signal."""

from exercises.judge.judging import refuse, refuse_unequal_messages, steps, values
from exercises.judge.runner import Setup
from exercises.sentences import say

NOBODY = -1
SETUPS = [Setup(environment={"SIGNALLED_RANK": rank}) for rank in (1, 0, NOBODY)]
STEPS = 20  # without a signal
SIGNAL = 5  # the step in which the signal arrives
SOON = 5  # steps after the signal: a mend may vote only now and then


def check(*runs):
    for setup, ranks in zip(SETUPS, runs, strict=True):
        signalled = setup.environment["SIGNALLED_RANK"]
        counts = [len(steps(rank)) for rank in ranks]
        if signalled == NOBODY:
            refuse_early_end(counts)
            continue
        if any(values(rank, "signal") for rank in ranks if rank.rank != signalled):
            refuse(
                "The program sent a signal to both ranks; expected only rank {signalled}.",
                signalled=signalled,
            )
        if counts[0] != counts[1]:
            refuse(
                "With a signal for rank {signalled}, rank 0 stopped after step {counts[0]}, rank"
                " 1 after step {counts[1]}.",
                signalled=signalled,
                counts=counts,
            )
        if counts[0] > SIGNAL + SOON:
            refuse(
                "The signal for rank {signalled} arrived in step {signal}, but the training"
                " continued to step {counts[0]}.",
                signalled=signalled,
                signal=SIGNAL,
                counts=counts,
            )
        if counts[0] < SIGNAL - 1:  # a mend may stop before the step in which the signal arrives
            refuse("The training stopped after step {counts[0]}, before the signal.", counts=counts)
        refuse_unequal_messages(ranks)
        stopped = counts[0]
    return say("whichever rank gets the signal, both stop after step {stopped}.", stopped=stopped)


def refuse_early_end(counts):
    if set(counts) != {STEPS}:
        refuse(
            "Without a signal, the ranks took {counts[0]} and {counts[1]} training steps;"
            " expected all {steps}.",
            counts=counts,
            steps=STEPS,
        )
