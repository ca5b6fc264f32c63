"""The ranks must clip the mean of their gradients."""

from exercises.judge.judging import refuse, refuse_other_training, say, steps

MAX_NORM = 0.6  # the last mean gradient is smaller, so that a sum would be noticed


def check(ranks):
    for k, step in enumerate(steps(ranks[0]), 1):
        gradients = [gradient for gradient in step.gradients if gradient is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        if norm > MAX_NORM * 1.001:
            refuse(
                f"In training step {k}, the optimizer got a gradient with norm {norm:.3f}, more"
                f" than {MAX_NORM}.",
                f"在第 {k} 个训练步，优化器得到的梯度的范数为 {norm:.3f}，大于 {MAX_NORM}。",
            )
    refuse_other_training(ranks, max_norm=MAX_NORM)
    return say(
        "the ranks clip the mean of their gradients, as one process would.",
        "各 rank 裁剪的是平均之后的梯度，与单进程一样。",
    )
