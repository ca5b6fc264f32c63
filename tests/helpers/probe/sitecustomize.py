"""Log what a script of the ladder trains on.

Each process appends to $PROBE/PID.jsonl the indices of every batch and every loss. Dropout is
switched off: each rank draws its own random numbers, so results would depend on the world size.
With PROBE_DTYPE=float64, the model computes in float64.
"""

import json
import os

import torch
import torch.distributed as dist

from common import models
from common.data import MemoryImages


def tell(**what):
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(os.path.join(os.environ["PROBE"], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps({"rank": rank} | what) + "\n")


def fetch(self, indices, original=MemoryImages.__getitems__):
    tell(images=len(self), indices=[int(i) for i in indices])
    return original(self, indices)


def loss(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
    value = original(self, outputs, targets)
    tell(loss=value.item())
    return value


def build(args, dataset, original=models.build_model):
    model = original(args, dataset)
    dtype = getattr(torch, os.environ.get("PROBE_DTYPE", "float32"))

    model.register_forward_pre_hook(lambda _, images: images[0].to(dtype))
    return model.to(dtype)


def convolve(self, images, weight, bias, original=torch.nn.Conv2d._conv_forward):
    """Convolve float64 images with one matrix product: on a CPU, ten times faster than PyTorch's
    convolution.
    """
    if images.dtype != torch.float64:
        return original(self, images, weight, bias)
    assert bias is None and self.groups == 1 and self.dilation == (1, 1)
    size = self.kernel_size
    pad = self.padding
    stride = self.stride
    height, width = (
        (n + 2 * p - k) // s + 1
        for n, p, k, s in zip(images.shape[2:], pad, size, stride, strict=True)
    )
    columns = torch.nn.functional.unfold(images, size, padding=pad, stride=stride).transpose(0, 1)
    outputs = weight.flatten(1) @ columns.reshape(columns.shape[0], -1)
    return outputs.view(-1, len(images), height, width).transpose(0, 1)


models.build_model = build
torch.nn.Conv2d._conv_forward = convolve
MemoryImages.__getitems__ = fetch
torch.nn.CrossEntropyLoss.forward = loss
torch.nn.Dropout.forward = lambda self, x: x
