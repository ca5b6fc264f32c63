"""A training step must have 96 images and learning rate 0.5, on two processes and on three."""

from exercises.judge.judging import (
    batches,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    say,
    steps,
)
from exercises.judge.runner import Setup

SETUPS = [Setup(), Setup(local_ranks=(0, 1, 2))]
IMAGES = 768
BATCH_SIZE = 96
LR = 0.5


def check(*runs):
    for ranks in runs:
        n = len(ranks)
        refuse_other_training(ranks)
        sizes = {sum(map(len, parts)) for parts in zip(*map(batches, ranks), strict=True)}
        if sizes != {BATCH_SIZE}:
            size = max(sizes - {BATCH_SIZE})
            refuse(
                f"With {n} processes, a training step had {size} images instead of {BATCH_SIZE}.",
                f"{n} 个进程时，一个训练步用了 {size} 张图像，而不是 {BATCH_SIZE} 张。",
            )
        refuse_repeated_images(ranks, IMAGES)
        if wrong := [step.lr for step in steps(ranks[0]) if abs(step.lr - LR) > 1e-6]:
            refuse(
                f"With {n} processes, the learning rate was {wrong[0]:g} instead of {LR}: the"
                " global batch size is that of one process, so the learning rate is too.",
                f"{n} 个进程时，学习率为 {wrong[0]:g}，而不是 {LR}："
                "全局 batch size 与单进程时相同，学习率也应该相同。",
            )
    return say(
        f"two and three processes train with {BATCH_SIZE} images per step and learning rate {LR}.",
        f"无论是两个还是三个进程，每步都用 {BATCH_SIZE} 张图像，学习率都是 {LR}。",
    )
