"""The ranks must exchange gradients once per training step, and learn the same as one process."""

from exercises.judge.judging import (
    gradient_messages,
    refuse,
    refuse_other_training,
    say,
    steps,
    values,
)

STEPS = 2
BATCH_SIZE = 16  # of a rank
GRADIENTS = 4 * 68  # bytes of the gradients of all weights


def check(ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            f"The optimizer took {count} training steps; expected {STEPS}, with four batches each.",
            f"优化器更新了 {count} 次；应该是 {STEPS} 次，每次四个 batch。",
        )
    largest = max(len(batch) for batch, _ in values(ranks[0], "batch"))
    if largest > BATCH_SIZE:
        refuse(
            f"A forward pass had {largest} images: accumulate gradients instead, so that only"
            f" {BATCH_SIZE} images must fit in memory.",
            f"一次前向传播有 {largest} 张图像：请改用梯度累积，"
            f"这样内存只需容纳 {BATCH_SIZE} 张图像。",
        )
    refuse_other_training(ranks)
    sent = gradient_messages(ranks[0])
    size = sum(message.size for message in sent)
    if size > 1.5 * STEPS * GRADIENTS:  # a mend may also send losses
        refuse(
            f"{len(sent)} messages with {size:,} bytes for {STEPS} training steps, although the"
            f" gradients have {GRADIENTS} bytes: the ranks exchange them more than once per step.",
            f"{STEPS} 个训练步有 {len(sent)} 条消息，共 {size:,} 字节，而梯度只有"
            f" {GRADIENTS} 字节：各 rank 每步交换梯度不止一次。",
        )
    return say(
        f"{len(sent)} messages with {size:,} bytes for {STEPS} training steps, and the weights are"
        " those of one process.",
        f"{STEPS} 个训练步有 {len(sent)} 条消息，共 {size:,} 字节，权重与单进程相同。",
    )
