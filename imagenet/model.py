"""What 06 adds to common.models: timm's models, channels_last, and the groups of parameters with and without decay."""

import torch

from common.errors import UserError
from common.models import build_model as build_common_model


def build_model(args, dataset):
    """Build the untrained model of --arch.

    Args:
        args: reads arch and channels_last.
        dataset: has channels, image_size (height, width) and num_classes.

    Raises:
        UserError: there is no such model, or it cannot take such images.
    """
    build = _build_timm if args.arch.startswith("timm:") else build_common_model
    return build(args, dataset).to(memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)


def _build_timm(args, dataset):
    try:
        import timm
    except ImportError:
        raise UserError(f"--arch {args.arch}: timm is not installed; pip install timm") from None
    name = args.arch.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(f"--arch {args.arch}: no such model in timm; timm.list_models() names them")
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=dataset.channels)


def parameter_groups(model, weight_decay):
    """Return the weights, which decay, and the norms and biases, which weight decay does not help."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    norms_and_biases = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": norms_and_biases, "weight_decay": 0.0}]
