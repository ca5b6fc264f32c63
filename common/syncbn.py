"""Batch norm over the images of all ranks: PyTorch's own on GPUs, written out here for CPUs."""

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError


def convert_sync_batchnorm(model, device=None):
    """Return the model with synchronized batch norm: PyTorch's on GPUs, ours elsewhere.

    Args:
        device: torch.device on which the model will train. None: where it is now.

    Raises:
        UserError: the model has a batch norm of another library, which may do more, as timm's
            BatchNormAct2d applies an activation. A converted one would only normalize.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) not in PLAIN:
            found = f"{type(module).__name__} may do more than batch norm"
            raise UserError(
                f"--sync-bn: {found}; leave out --sync-bn, or use a model of torchvision"
            )
    tensors = model.state_dict().values()  # a batch norm without weights has its statistics
    on_gpu = device.type == "cuda" if device else any(tensor.is_cuda for tensor in tensors)
    if on_gpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if isinstance(model, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return SyncBatchNorm.like(model)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, device))
    return model


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over the images of all ranks, as if they were one batch.

    Ranks may hold different numbers of images. Mean and variance depend on the images of every
    rank, so gradients flow through them to every rank: SumOverRanks has a backward of its own.
    Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 1, with the sums over all ranks.

    forward takes and returns (N, C) or (N, C, ...) of any float type.
    """

    @classmethod
    def like(cls, norm):
        """Return a SyncBatchNorm with the settings, weights and statistics of an ordinary one.

        The tensors are the same objects, so frozen weights stay frozen.
        """
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
            setattr(new, name, tensor)
        return new.train(norm.training)

    @torch.compiler.disable  # torch 2.11 compiles it to wrong gradients on a CPU, without a word
    def forward(self, images):
        if not self.training:
            return super().forward(images)
        dims = [d for d in range(images.ndim) if d != 1]  # all but the channels
        shape = [-1 if d == 1 else 1 for d in range(images.ndim)]
        x = images.to(torch.promote_types(images.dtype, torch.float32))

        # The mean first, then the variance around it: E[x^2] - E[x]^2 would lose digits where the
        # mean is large.
        count = x.numel() // x.size(1)
        sums = SumOverRanks.apply(torch.cat([x.sum(dims), x.new_tensor([count])]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        x = x - mean.view(shape)
        variance = SumOverRanks.apply(x.square().sum(dims)) / total
        if total < 2:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")

        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, share)
                # unbiased, as in PyTorch
                self.running_var.lerp_(variance * total / (total - 1), share)
        x = x * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            x = x * self.weight.view(shape) + self.bias.view(shape)
        return x.to(images.dtype)

    def _check_input_dim(self, images):
        if images.ndim < 2:
            raise ValueError(f"expected (N, C) or (N, C, ...), got {tuple(images.shape)}")


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, with a gradient.

    The output of every rank contains the input of this rank once. The gradient of the input is
    therefore the sum of the gradients of all outputs.
    """

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


# they only normalize
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)
