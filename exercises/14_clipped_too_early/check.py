"""The ranks must clip the mean of their gradients."""

from exercises.judge.judging import refuse, refuse_other_training, refuse_repeated_images, steps
from exercises.sentences import say

MAX_NORM = 0.6  # the last mean gradient is smaller, so that a sum would be noticed


def check(ranks):
    for k, step in enumerate(steps(ranks[0]), 1):
        gradients = [gradient for gradient in step.gradients if gradient is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        if norm > MAX_NORM * 1.001:
            refuse(
                "In training step {step}, the optimizer got a gradient with norm {norm:.3f}, more"
                " than {max_norm}.",
                step=k,
                norm=norm,
                max_norm=MAX_NORM,
            )
    refuse_other_training(ranks, max_norm=MAX_NORM)
    refuse_repeated_images(ranks, 256)
    return say("the ranks clip the mean of their gradients, as one process would.")
