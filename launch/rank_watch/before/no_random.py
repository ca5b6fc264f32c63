"""Let both runs draw alike what they draw at random: --no-random."""

import random
import sys
import zlib

import torch
from rank_watch.hooks import replace
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import Subset
from torch.utils.data._utils import fetch as torch_fetch


def install():
    """Switch off dropout, and layers that skip blocks; seed each sample by its index."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        replace(functional, name, pass_on)
    replace(functional, "scaled_dot_product_attention", attend)
    register_module_forward_pre_hook(before_forward)
    replace(torch_fetch._MapDatasetFetcher, "fetch", fetch)


def pass_on(real, x, p=0.5, training=True, inplace=False):
    return real(x, p, False, inplace)


def attend(real, *args, **kwargs):
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return real(*args[:4], *[0.0][: len(args) - 4], *args[5:], **kwargs)


def before_forward(module, args):
    name = type(module).__name__.lower()
    if not list(module.children()) and ("drop" in name or "stochasticdepth" in name):
        module.training = False
    if isinstance(module, nn.RNNBase):
        module.dropout = 0.0


def fetch(real, fetcher, indices):
    """Read a batch, so that a sample has the same random crop whoever reads it, and when."""
    dataset, positions = fetcher.dataset, indices if fetcher.auto_collation else []
    while isinstance(dataset, Subset):
        dataset, positions = dataset.dataset, [dataset.indices[at] for at in positions]
    if not fetcher.auto_collation or hasattr(dataset, "__getitems__"):  # which reads a whole batch
        return real(fetcher, indices)
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    samples = []
    for position in positions:
        seed = zlib.crc32(repr(position).encode())
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        samples.append(dataset[position])
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy:
        numpy.random.set_state(states[2])
    return fetcher.collate_fn(samples)
