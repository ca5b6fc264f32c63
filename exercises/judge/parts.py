"""What the checks of models and optimizers have in common of which each rank holds a part."""

from exercises.sentences import say


def first_gradients(rank):
    """Return the gradients that all optimizers of a rank get in the first training step."""
    found = []
    for event in rank.events:
        if event.kind == "before":
            found += event.value.gradients
        elif found and event.kind in ("batch", "backward"):
            break
    return [gradient for gradient in found if gradient is not None]


def norm(tensors):
    return sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5


def why_other_weights(ranks, expected):
    """Say that the first gradients are a sum, if so, however they are divided.

    Args:
        ranks: Records of ranks that hold parts.
        expected: the gradients of the whole model.
    """
    times = norm(g for rank in ranks for g in first_gradients(rank)) / norm(expected)
    if abs(times - len(ranks)) > 0.01:
        return ""
    return say(
        ". The gradients are {times:.3g} times as large, as a sum over the ranks is; expected the"
        " mean",
        times=times,
    )
