"""Both ranks must evaluate the same model: weights, and running statistics of the training."""

import torch

from exercises.judge.judging import (
    refuse,
    refuse_different_weights,
    refuse_repeated_images,
    same,
    values,
)
from exercises.sentences import say

IMAGES = 256
TOLERANCE = 0.05  # ranks may average their variances in several ways


def check(ranks):
    refuse_repeated_images(ranks, IMAGES)
    refuse_different_weights(ranks)
    if not all(values(rank, "batch norm") for rank in ranks):
        refuse("I see no batch norm in the model.")
    evaluations = [evaluation(rank) for rank in ranks]
    refuse_other_statistics(evaluations)
    refuse_foreign_statistics(evaluations[0][0], ranks)
    return say("both ranks evaluated the same weights and the same running statistics.")


def evaluation(rank):
    """Return the running statistics in each forward pass after the last training step."""
    last = max(k for k, event in enumerate(rank.events) if event.kind == "step")
    layers = [event.value for event in rank.events[last:] if event.kind == "batch norm"]
    if not layers:
        refuse("Rank {rank} evaluated no image.", rank=rank.rank)
    layers = [layer for layer in layers if not layer.training]
    if not layers:
        refuse(
            "The evaluation used the statistics of its own batch: expected model.eval() before it."
        )
    count = sum(layer.images for layer in layers)
    if count != IMAGES / 2:
        refuse(
            "Rank {rank} evaluated {count} images instead of half of {images}.",
            rank=rank.rank,
            count=count,
            images=IMAGES,
        )
    return [layer.buffers for layer in layers]


def refuse_other_statistics(of_ranks):
    """Refuse running statistics that differ between ranks or forward passes."""
    first = of_ranks[0][0]
    if "running_mean" not in first:
        refuse("The batch norm keeps no running statistics.")
    for rank, of_rank in enumerate(of_ranks):
        for name in ("running_mean", "running_var"):
            for buffers in of_rank:
                if not same([first[name]], [buffers[name]]):
                    a, b = float(first[name][0]), float(buffers[name][0])
                    refuse(
                        "The ranks evaluated different models: the {name} of the first pixel is"
                        " {a:.6f} on rank 0 and {b:.6f} on rank {rank}.",
                        name=name,
                        a=a,
                        b=b,
                        rank=rank,
                    )


def refuse_foreign_statistics(used, ranks):
    """Refuse running statistics that are not those of a rank, or between those of the ranks."""
    collected = [values(rank, "statistics")[-1:] for rank in ranks]
    if not all(collected) or float(used["running_mean"].abs().sum()) == 0:
        refuse(
            "The running statistics are as before the training: the evaluation needs those that"
            " training has collected."
        )
    for name in ("running_mean", "running_var"):
        own = torch.stack([buffers[0][name] for buffers in collected])
        low, high = own.min(dim=0).values, own.max(dim=0).values
        if not torch.equal(used[name].clamp(low - TOLERANCE, high + TOLERANCE), used[name]):
            refuse(
                "Both ranks evaluated the same {name}, but not one that the training has"
                " collected: {used:.6f} for the first pixel, where the ranks had {a:.6f} and"
                " {b:.6f}.",
                name=name,
                used=float(used[name][0]),
                a=float(own[0, 0]),
                b=float(own[1, 0]),
            )
