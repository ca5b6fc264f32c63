"""Both ranks must evaluate the same model: weights, and running statistics of the training."""

import torch

from exercises.judge.judging import (
    refuse,
    refuse_different_weights,
    refuse_repeated_images,
    same,
    say,
    values,
)

IMAGES = 256
TOLERANCE = 0.05  # ranks may average their variances in several ways


def check(ranks):
    refuse_repeated_images(ranks, IMAGES)
    refuse_different_weights(ranks)
    if not all(values(rank, "batch norm") for rank in ranks):
        refuse("I see no batch norm in the model.", "模型中没有看到 BN。")
    evaluations = [evaluation(rank) for rank in ranks]
    refuse_other_statistics(evaluations)
    refuse_foreign_statistics(evaluations[0][0], ranks)
    return say(
        "both ranks evaluated the same weights and the same running statistics.",
        "两个 rank 评估时，权重相同，滑动均值和方差也相同。",
    )


def evaluation(rank):
    """Return the running statistics in each forward pass after the last training step."""
    last = max(k for k, event in enumerate(rank.events) if event.kind == "step")
    layers = [event.value for event in rank.events[last:] if event.kind == "batch norm"]
    if not layers:
        refuse(f"Rank {rank.rank} evaluated no image.", f"rank {rank.rank} 没有评估图像。")
    layers = [layer for layer in layers if not layer.training]
    if not layers:
        refuse(
            "The evaluation used the statistics of its own batch: expected model.eval() before it.",
            "评估时，BN 用的是当前 batch 的统计量：评估之前应该调用 model.eval()。",
        )
    count = sum(layer.images for layer in layers)
    if count != IMAGES / 2:
        refuse(
            f"Rank {rank.rank} evaluated {count} images instead of half of {IMAGES}.",
            f"rank {rank.rank} 评估了 {count} 张图像，而不是 {IMAGES} 张的一半。",
        )
    return [layer.buffers for layer in layers]


def refuse_other_statistics(of_ranks):
    """Refuse running statistics that differ between ranks or forward passes."""
    first = of_ranks[0][0]
    if "running_mean" not in first:
        refuse("The batch norm keeps no running statistics.", "BN 没有记录滑动均值和方差。")
    for rank, of_rank in enumerate(of_ranks):
        for name in ("running_mean", "running_var"):
            for buffers in of_rank:
                if not same([first[name]], [buffers[name]]):
                    a, b = float(first[name][0]), float(buffers[name][0])
                    refuse(
                        f"The ranks evaluated different models: the {name} of the first pixel is"
                        f" {a:.6f} on rank 0 and {b:.6f} on rank {rank}.",
                        f"各 rank 评估的模型不同：第一个像素的 {name}"
                        f" 在 rank 0 上是 {a:.6f}，在 rank {rank} 上是 {b:.6f}。",
                    )


def refuse_foreign_statistics(used, ranks):
    """Refuse running statistics that are not those of a rank, or between those of the ranks."""
    collected = [values(rank, "statistics")[-1:] for rank in ranks]
    if not all(collected) or float(used["running_mean"].abs().sum()) == 0:
        refuse(
            "The running statistics are as before the training: the evaluation needs those that"
            " training has collected.",
            "滑动均值和方差还是训练之前的值：评估要用训练中得到的值。",
        )
    for name in ("running_mean", "running_var"):
        own = torch.stack([buffers[0][name] for buffers in collected])
        low, high = own.min(dim=0).values, own.max(dim=0).values
        if not torch.equal(used[name].clamp(low - TOLERANCE, high + TOLERANCE), used[name]):
            refuse(
                f"Both ranks evaluated the same {name}, but not one that the training has"
                f" collected: {float(used[name][0]):.6f} for the first pixel, where the ranks had"
                f" {float(own[0, 0]):.6f} and {float(own[1, 0]):.6f}.",
                f"两个 rank 评估时的 {name} 相同，但不是训练中得到的值：第一个像素是"
                f" {float(used[name][0]):.6f}，而训练之后两个 rank 上分别是"
                f" {float(own[0, 0]):.6f} 和 {float(own[1, 0]):.6f}。",
            )
