"""Networks by name, fitted to the dataset: torchvision's, timm's, a small one for MNIST; synchronised batch norm."""

import difflib
import itertools

import torch
import torch.distributed as dist
import torchvision
from torch import nn

from common.distributed import sum_over_ranks
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
    elif args.arch == "small_net":
        net = SmallNet(dataset.channels, dataset.num_classes)
    elif args.arch in ZOO:
        # Two old networks have a second output for training unless told otherwise.
        extra = {"aux_logits": False, "init_weights": True} if args.arch in ("googlenet", "inception_v3") else {}
        net = torchvision.models.get_model(args.arch, num_classes=dataset.num_classes, **extra)
        if dataset.channels != 3:
            _replace_stem(net, dataset.channels)
    elif args.arch.startswith("timm:"):
        net = _build_timm(args.arch, dataset)
    else:
        near = difflib.get_close_matches(args.arch, [*ZOO, "mnist_net", "small_net"], n=3) or ["resnet18", "mnist_net"]
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


class SmallNet(nn.Sequential):
    """Five convolutions with batch norm, 0.25 million weights: quick enough on a CPU for experiments of many runs.

    Each convolution halves the sides, so that a 32x32 image ends as one value a channel, and the last batch norms
    know no more of a batch than its images: as in large networks, they are the first to suffer if it is small.

    Takes floats (N, channels, height, width) and returns logits (N, num_classes).
    """

    def __init__(self, channels=3, num_classes=10):
        layers, widths = [], (channels, 16, 32, 64, 128, 128)
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def convert_sync_batchnorm(net):
    """The network with batch norm over the images of all ranks: PyTorch's own on GPUs, SyncBatchNorm elsewhere."""
    if any(p.is_cuda for p in net.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if isinstance(net, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return SyncBatchNorm.like(net)
    for name, child in net.named_children():
        setattr(net, name, convert_sync_batchnorm(child))
    return net


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm whose mean and variance are those of the images of all ranks, as one large batch would have them.

    PyTorch has the same for GPUs only. Each rank may have another number of images. The statistics are part of
    the network's function, so gradients flow through them to the images of every rank: that is what makes the
    sum over ranks below a function with a gradient of its own. Ioffe and Szegedy, "Batch Normalization", 2015,
    algorithm 1, with the sums taken over all ranks.

    forward takes and returns (N, C) or (N, C, ...) of any float type.
    """

    @classmethod
    def like(cls, norm):
        """One with the weights, the running statistics and the settings of an ordinary batch norm."""
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for tensor in norm.state_dict().values():  # none, if it has neither weights nor statistics
            new.to(tensor.device, tensor.dtype if tensor.is_floating_point() else None)
        new.load_state_dict(norm.state_dict())
        return new.train(norm.training)

    def forward(self, images):
        if not self.training:
            return super().forward(images)
        others = [d for d in range(images.ndim) if d != 1]  # every dimension but the channels
        shape = [-1 if d == 1 else 1 for d in range(images.ndim)]
        x = images.to(torch.promote_types(images.dtype, torch.float32))

        # First the mean, then the mean square of what is left, which loses no digits where the mean is large.
        count = x.numel() // x.size(1)
        sums = SumOverRanks.apply(torch.cat([x.sum(others), x.new_tensor([count])]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        x = x - mean.view(shape)
        variance = SumOverRanks.apply(x.square().sum(others)) / total
        if count < 2 and total < 2:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")

        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * total / (total - 1), share)  # there, and only there, unbiased
        x = x * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        return x.to(images.dtype)

    def _check_input_dim(self, images):
        if images.ndim < 2:
            raise ValueError(f"expected (N, C) or (N, C, ...), got {tuple(images.shape)}")


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, with a gradient.

    Every rank's output depends on this rank's input, each with weight one, so the gradient of the input is the
    sum over ranks of the gradients of the output: the same function again.
    """

    @staticmethod
    def forward(ctx, tensor):
        return sum_over_ranks(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return sum_over_ranks(gradient)


def _build_timm(arch, dataset):
    """A network of the timm package, which is not installed with the rest."""
    try:
        import timm
    except ImportError:
        raise UserError(f"--arch {arch}: timm is not installed; pip install timm") from None
    name = arch.partition(":")[2]
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3) or ["resnet50"]
        raise UserError(f"--arch {arch}: no such network in timm; did you mean {', '.join(f'timm:{n}' for n in near)}?")
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=dataset.channels)


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
    together = getattr(args, "sync_bn", False) and dist.is_initialized() and dist.get_world_size() > 1
    if args.batch_size == 1 and not together and any(isinstance(m, nn.BatchNorm2d) for m in net.modules()):
        raise UserError(f"--batch-size 1: {args.arch} has batch norm, which needs 2 images or more to learn from")
    net.train()
