"""Networks by name: torchvision's zoo, fitted to the dataset, and a small one for MNIST."""

import difflib

import torch
import torchvision
from torch import nn

from common.errors import UserError, one_line

ZOO = torchvision.models.list_models(module=torchvision.models)


def build_model(args, dataset):
    """Build the network of --arch, untrained, for the images and classes of a dataset.

    Args:
        args: the shared flags; reads arch, batch_size and channels_last.
        dataset: has channels, image_size (height, width) and num_classes.

    Raises:
        UserError: there is no such network, or it cannot take such images.
    """
    if args.arch == "mnist_net":
        net = MnistNet(dataset.channels, dataset.image_size, dataset.num_classes)
    elif args.arch in ZOO:
        # Two old networks have a second output for training unless told otherwise.
        extra = {"aux_logits": False, "init_weights": True} if args.arch in ("googlenet", "inception_v3") else {}
        net = torchvision.models.get_model(args.arch, num_classes=dataset.num_classes, **extra)
        if dataset.channels != 3:
            _replace_stem(net, dataset.channels)
    else:
        near = difflib.get_close_matches(args.arch, [*ZOO, "mnist_net"], n=3) or ["resnet18", "mnist_net"]
        raise UserError(f"--arch {args.arch}: no such network in torchvision; did you mean {', '.join(near)}?")
    _check_fit(net, args, dataset)
    return net.to(memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)


class MnistNet(nn.Module):
    """The small convolution net that every MNIST example trains: 1.2 million weights for 28x28 images.

    forward takes floats (N, channels, *image_size) and returns logits (N, num_classes).
    """

    def __init__(self, channels=1, image_size=(28, 28), num_classes=10):
        super().__init__()
        height, width = ((side - 4) // 2 for side in image_size)  # the convolutions take 4 pixels, the pool halves
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * height * width, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes)
        )  # fmt: skip

    def forward(self, images):
        return self.classifier(self.features(images))


def _replace_stem(net, channels):
    """Give the first convolution another number of input channels: the zoo's networks all take 3."""
    name, stem = next((name, m) for name, m in net.named_modules() if isinstance(m, nn.Conv2d))
    parent, _, attribute = name.rpartition(".")
    bias = stem.bias is not None
    new = nn.Conv2d(channels, stem.out_channels, stem.kernel_size, stem.stride, stem.padding, bias=bias)
    setattr(net.get_submodule(parent), attribute, new)


@torch.no_grad()
def _check_fit(net, args, dataset):
    """Send one blank image through, so that a network made for other images says so here and in one line."""
    height, width = dataset.image_size
    try:
        net.eval()(torch.zeros(1, dataset.channels, height, width))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = one_line(error)
        raise UserError(f"--arch {args.arch} cannot take {height}x{width} images ({reason}); try resnet18") from None
    if args.batch_size == 1 and any(isinstance(m, nn.BatchNorm2d) for m in net.modules()):
        raise UserError(f"--batch-size 1: {args.arch} has batch norm, which needs 2 images or more to learn from")
    net.train()
