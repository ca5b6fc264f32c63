"""Read from a torchvision model in which order its gradients become ready, and how long each takes.

The model is built on the meta device: no memory, no time, no weights.
"""

import functools
from typing import NamedTuple

import torch
import torchvision
from torch import nn

from common.errors import UserError

COUNTED = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
BYTES = 4  # per gradient, in float32


class Layer(NamedTuple):
    """A layer with weights. Its backward pass takes twice its multiply-adds."""

    gradients: int  # bytes
    multiply_adds: int  # of the forward pass, per image


@functools.cache
def torchvision_layers(name):
    """Return the layers of a torchvision model of images, in the order of its backward pass: that
    of the forward pass reversed.

    Raises:
        UserError: there is no such model, or it has weights in other kinds of layers, for example
            an attention's.
    """
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UserError(f"{name}: no such model of images in torchvision; try resnet50")
    side = 299 if name == "inception_v3" else 224
    model = build_on_meta(name, side)
    layers = []

    def note(module, _, output):
        gradients = BYTES * sum(weight.numel() for weight in module.parameters())
        # each number of the output is a sum over one row of the weights
        layers.append(Layer(gradients, output.numel() * module.weight[0].numel()))

    for module in model.modules():
        if isinstance(module, COUNTED) and module.weight is not None:
            module.register_forward_hook(note)
    with torch.no_grad():
        model.eval()(torch.empty(1, 3, side, side, device="meta"))
    weights = BYTES * sum(weight.numel() for weight in model.parameters())
    if sum(layer.gradients for layer in layers) != weights:
        raise UserError(
            f"{name}: has weights outside of convolutions, linear layers and norms, or uses a "
            f"layer twice, so the order of its {weights / 1e6:.0f} MB of gradients is not known"
        )
    return tuple(reversed(layers))


def build_on_meta(name, side):
    """Build a torchvision model without memory for its weights; see build."""
    try:
        with torch.device("meta"):
            return build(name, side)
    except NotImplementedError:  # RegNets compute their widths with real tensors
        return build(name, side).to("meta")


def build(name, side):
    """Build a torchvision model for images of side x side pixels."""
    options = {}
    if name.startswith("vit_"):  # has one weight per position
        options = {"image_size": side}
    elif name.startswith("maxvit"):
        options = {"input_size": (side, side)}
    elif name in ("googlenet", "inception_v3"):  # without their second output for training
        options = {"aux_logits": False, "init_weights": False}
    return torchvision.models.get_model(name, **options)
