"""What 06 adds to common.models: timm's models, deterministic training, averaged weights."""

import copy
import itertools
import os

import torch
from torch import nn

from common.errors import UserError
from common.models import build_model as build_common_model


def make_deterministic(deterministic):
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_model(args, dataset):
    """Build the untrained model of --arch.

    Args:
        args: reads arch, channels_last, deterministic and evaluate.
        dataset: has channels, image_size (height, width) and num_classes.

    Raises:
        UserError: there is no such model, it cannot take such images, or it cannot be trained with
            --deterministic on a GPU.
    """
    build = _build_timm if args.arch.startswith("timm:") else build_common_model
    model = build(args, dataset)
    if args.deterministic and not args.evaluate and torch.cuda.is_available():
        _check_deterministic(args.arch, model)
    return model.to(
        memory_format=torch.channels_last if args.channels_last else torch.contiguous_format
    )


def _check_deterministic(arch, model):
    """Refuse a model with a layer whose gradients depend on the order of a GPU's threads.

    torch.use_deterministic_algorithms() names such layers. Among torchvision's models only alexnet
    and vgg have one. A pool to 1x1 is not one, since torch computes a mean instead.
    """
    for layer in model.modules():
        if isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size not in (1, (1, 1)):
            raise UserError(
                f"--deterministic: on a GPU torch cannot train {arch} with it, because of "
                f"{layer}; expected another --arch, as resnet18, or no --deterministic"
            )


def _build_timm(args, dataset):
    try:
        import timm
    except ImportError:
        raise UserError(f"--arch {args.arch}: timm is not installed; pip install timm") from None
    name = args.arch.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(f"--arch {args.arch}: no such model in timm; timm.list_models() names them")
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=dataset.channels)


class AveragedModel:
    """The exponential moving average of a model: `module` is a copy that holds the averages.

    The result is that of torch.optim.swa_utils.AveragedModel(model,
    multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True), bit for bit. That class waits for
    the GPU in each step and starts a kernel for each integer buffer; here one call averages all
    floating-point tensors.

    Args:
        model: nn.Module, the model in training.
        decay: float, the weight of the average so far. The first update copies the model.
    """

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        tensors = [list(itertools.chain(m.parameters(), m.buffers())) for m in (self.module, model)]
        pairs = list(zip(*tensors, strict=True))
        self.floats = [
            [t.detach() for t in ts]
            for ts in zip(*(p for p in pairs if p[0].is_floating_point()), strict=True)
        ]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    def update(self, first):
        """Average the weights after a training step; `first` says whether it was the first one."""
        torch._foreach_lerp_(*self.floats, 1 if first else 1 - self.decay)

    def copy_counters(self):
        """Copy the integer buffers, such as batch norm's number of batches."""
        for mine, current in self.counters:
            mine.copy_(current)
