"""The ranks must exchange gradients once per training step, and learn the same as one process."""

from exercises.judging import messages, refuse, refuse_other_training, say, steps

STEPS = 2
PARAMETERS = 2  # tensors of the model; a mend by hand may send each


def check(ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            f"The optimizer took {count} training steps; expected {STEPS}, with four batches each.",
            f"优化器更新了 {count} 次；应该是 {STEPS} 次，每次四个 batch。",
        )
    refuse_other_training(ranks)
    sent = len(messages(ranks[0], "all_reduce"))
    if sent > STEPS * PARAMETERS:
        refuse(
            f"{sent} messages for {STEPS} training steps: the ranks exchange gradients after every"
            " batch.",
            f"{STEPS} 个训练步有 {sent} 条消息：各 rank 在每个 batch 之后都交换梯度。",
        )
    return say(
        f"{sent} messages for {STEPS} training steps, and the weights are those of one process.",
        f"{STEPS} 个训练步有 {sent} 条消息，权重与单进程相同。",
    )
