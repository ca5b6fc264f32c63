"""Models by name, for the images and classes of a dataset."""

import itertools

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from common.errors import UserError, one_line


def build_model(args, dataset):
    """Build the untrained model of --arch.

    Args:
        args: reads arch.
        dataset: has channels, image_size (height, width) and num_classes.

    Raises:
        UserError: there is no such model, or it cannot take such images.
    """
    channels = dataset.channels
    size = dataset.image_size
    num_classes = dataset.num_classes
    try:
        model = _new_model(args.arch, channels, size, num_classes)
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, *size))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = one_line(error)
        raise UserError(
            f"--arch {args.arch} cannot take {size[0]}x{size[1]} images ({reason}); try resnet18"
        ) from None
    return model.train()


def _new_model(name, channels, size, num_classes):
    if name == "mnist_net":
        return MnistNet(channels, size, num_classes)
    if name == "small_net":
        return SmallNet(channels, num_classes)
    if name == "cifar_resnet20":
        return CifarResNet20(channels, num_classes)
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UserError(
            f"--arch {name}: no such model in torchvision; "
            "try resnet18, cifar_resnet20, mnist_net or small_net"
        )
    options = {"num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # These old models have a second output for training unless told otherwise.
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        # A vision transformer learns a position for each patch of an image of this size.
        options["image_size"] = size[0]
    model = torchvision.models.get_model(name, **options)
    if channels != 3:
        _replace_stem(model, channels)
    return model


class MnistNet(nn.Module):
    """The small convolutional model of many MNIST examples: 1.2 million weights for 28x28 images.

    forward takes floats (N, channels, *image_size) and returns logits (N, num_classes).
    """

    def __init__(self, channels=1, image_size=(28, 28), num_classes=10):
        super().__init__()
        # The convolutions take 4 pixels, the pool halves.
        height, width = ((side - 4) // 2 for side in image_size)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * height * width, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, num_classes),
        )

    def forward(self, images):
        return self.classifier(self.features(images))


class SmallNet(nn.Sequential):
    """Five convolutions with batch norm, 0.25 million weights: fast enough on a CPU.

    Each convolution halves the image, so a 32x32 image ends as one value per channel. The last
    batch norm then sees one value per image, so a small batch hurts it first, as in large models.

    Takes floats (N, channels, height, width) and returns logits (N, num_classes).
    """

    def __init__(self, channels=3, num_classes=10):
        widths = (channels, 16, 32, 64, 128, 128)
        layers = []
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes)
        )

    def forward(self, images):  # torch 2.9 compiles no model whose forward is one of torch's own
        return super().forward(images)


class CifarResNet20(nn.Module):
    """ResNet-20 for 32x32 images: 0.27 million weights (He et al. 2015, section 4.2).

    torchvision's ResNets are made for 224x224 images and shrink them by four before the first
    block. This one keeps 32x32 pixels for a third of its layers. Nineteen 3x3 convolutions and one
    linear layer; shortcuts have no weights.

    Takes floats (N, channels, height, width) and returns logits (N, num_classes).
    """

    def __init__(self, channels=3, num_classes=10):
        super().__init__()
        convolution = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(
            BasicBlock(16, 16),
            BasicBlock(16, 16),
            BasicBlock(16, 16),
            BasicBlock(16, 32, 2, PaddedShortcut()),
            BasicBlock(32, 32),
            BasicBlock(32, 32),
            BasicBlock(32, 64, 2, PaddedShortcut()),
            BasicBlock(64, 64),
            BasicBlock(64, 64),
        )
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images):
        return self.classifier(self.blocks(self.stem(images)))


class PaddedShortcut(nn.Module):
    """The shortcut of a block that halves the image and doubles the channels; it has no weights.

    It takes every second pixel, and pads the new channels with zeros.
    """

    def forward(self, features):
        return F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 0, features.size(1)))


def _replace_stem(model, channels):
    """Replace the first convolution of a torchvision model by one that takes `channels`, not 3."""
    name, stem = next((name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d))
    bias = stem.bias is not None
    new = nn.Conv2d(
        channels, stem.out_channels, stem.kernel_size, stem.stride, stem.padding, bias=bias
    )
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
