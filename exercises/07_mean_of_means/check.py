"""Rank 0 must print the mean loss of all images."""

import re

from torch import nn

from exercises.judge.judging import evaluated, refuse, say, variable

OF_RANKS = (70, 30)  # images
TOLERANCE = 1e-4  # the program prints four digits


def check(ranks):
    sizes = tuple(len(set(evaluated(rank))) for rank in ranks)
    if sizes != OF_RANKS:
        refuse(
            f"Rank 0 evaluated {sizes[0]} images and rank 1 {sizes[1]}; expected {OF_RANKS[0]} and"
            f" {OF_RANKS[1]}.",
            f"rank 0 评估了 {sizes[0]} 张图像，rank 1 评估了 {sizes[1]} 张；"
            f"应该是 {OF_RANKS[0]} 张和 {OF_RANKS[1]} 张。",
        )
    printed = re.findall(r"\d+\.\d+", ranks[0].output)
    if not printed:
        refuse("Rank 0 printed no mean loss.", "rank 0 没有打印平均损失。")
    number = float(printed[-1])
    losses = losses_of(variable(ranks[0], "model"), ranks[0].data)
    truth = float(losses.mean())
    if abs(number - truth) > TOLERANCE:
        of_ranks = float(losses[:70].mean() + losses[70:].mean()) / 2
        why = ""
        if abs(number - of_ranks) < TOLERANCE:
            why = say(
                ". It is the mean of the means of the ranks, but rank 0 has 70 images and rank 1"
                " has 30",
                "。它是两个 rank 平均值的平均，但 rank 0 有 70 张图像，rank 1 有 30 张",
            )
        refuse(
            f"Rank 0 printed {number:.4f}, but the mean loss of the 100 images is {truth:.4f}"
            f"{why}.",
            f"rank 0 打印了 {number:.4f}，而 100 张图像的平均损失为 {truth:.4f}{why}。",
        )
    return say(
        f"{number:.4f} is the mean loss of 100 images.",
        f"{number:.4f} 是 100 张图像的平均损失。",
    )


def losses_of(model, data):
    """Return the loss of each image: its class is the brightest of the first four pixels."""
    targets = data[:, :4].argmax(dim=1)
    return nn.functional.cross_entropy(model(data), targets, reduction="none").detach()
