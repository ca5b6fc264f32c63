"""Weights from a file, into a model."""

import torch

from common.errors import UserError, one_line
from imagenet.checkpoint_file import UNREADABLE, Damaged, decode, has_checksum, read_file


def load_weights(path):
    """Return the weights in a file: a checkpoint of 06, or a plain state_dict.

    Of a checkpoint with averaged weights, those.

    Raises:
        UserError: there is no such file, or it is damaged, or it holds something else.
    """
    try:
        if has_checksum(path):
            state = decode(read_file(path))
            return state["ema"] or state["model"]
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if is_state_dict(weights):
            return weights
        reason = f"it holds a {type(weights).__name__}, not a state_dict"
    except OSError as error:
        reason = error.strerror
    except (*UNREADABLE, Damaged) as error:
        reason = one_line(error)[:200]
    raise UserError(
        f"--weights {path}: {reason}; expected a checkpoint of this script, "
        "or what torch.save(model.state_dict(), FILE) writes"
    )


def is_state_dict(weights):
    if not isinstance(weights, dict):
        return False
    return all(isinstance(weight, torch.Tensor) for weight in weights.values())


def load_into(model, weights, path):
    """Load a state_dict into a model.

    Raises:
        UserError: it does not fit.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path} does not fit this model ({reason}): expected weights of this --arch; for "
            "other classes, --new-head"
        ) from None
