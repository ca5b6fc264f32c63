"""All ranks must stop after the same step, soon after any of them got a signal."""

from exercises.judge.judging import refuse, refuse_unequal_messages, say, steps, values
from exercises.judge.runner import Setup

NOBODY = -1
SETUPS = [Setup(environment={"SIGNALLED_RANK": rank}) for rank in (1, 0, NOBODY)]
STEPS = 20  # without a signal
SIGNAL = 5  # the step in which the signal arrives
SOON = 2  # steps after the signal


def check(*runs):
    for setup, ranks in zip(SETUPS, runs, strict=True):
        signalled = setup.environment["SIGNALLED_RANK"]
        counts = [len(steps(rank)) for rank in ranks]
        if signalled == NOBODY:
            refuse_early_end(counts)
            continue
        if any(values(rank, "signal") for rank in ranks if rank.rank != signalled):
            refuse(
                f"The program sent a signal to both ranks; expected only rank {signalled}.",
                f"程序向两个 rank 都发送了信号；应该只有 rank {signalled} 收到。",
            )
        if counts[0] != counts[1]:
            refuse(
                f"With a signal for rank {signalled}, rank 0 stopped after step {counts[0]},"
                f" rank 1 after step {counts[1]}.",
                f"信号发给 rank {signalled} 时，rank 0 在第 {counts[0]} 步后停止，"
                f"rank 1 在第 {counts[1]} 步后停止。",
            )
        if counts[0] > SIGNAL + SOON:
            refuse(
                f"The signal for rank {signalled} arrived in step {SIGNAL}, but the training"
                f" continued to step {counts[0]}.",
                f"发给 rank {signalled} 的信号在第 {SIGNAL} 步到达，"
                f"训练却继续到第 {counts[0]} 步。",
            )
        if counts[0] < SIGNAL - 1:  # a mend may stop before the step in which the signal arrives
            refuse(
                f"The training stopped after step {counts[0]}, before the signal.",
                f"训练在第 {counts[0]} 步后就停止了，此时还没有信号。",
            )
        refuse_unequal_messages(ranks)
        stopped = counts[0]
    return say(
        f"whichever rank gets the signal, both stop after step {stopped}.",
        f"无论哪个 rank 收到信号，两个 rank 都在第 {stopped} 步后停止。",
    )


def refuse_early_end(counts):
    if set(counts) != {STEPS}:
        refuse(
            f"Without a signal, the ranks took {counts[0]} and {counts[1]} training steps; expected"
            f" all {STEPS}.",
            f"没有信号时，两个 rank 分别训练了 {counts[0]} 步和 {counts[1]} 步；"
            f"应该训练完 {STEPS} 步。",
        )
