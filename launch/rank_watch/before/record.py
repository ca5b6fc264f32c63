"""Note the losses, gradients and settings of each training step, and what evaluations print."""

import builtins
import functools
import logging
import os
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rank_watch import script
from rank_watch.before import no_random
from rank_watch.hashes import parameters_of
from rank_watch.hooks import replace
from rank_watch.places import own_line
from rank_watch.watched.optimizers import SETTINGS
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # in names of parameters
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SMALL = 4  # elements of a tensor of sums or counts


class Record:
    """Notes what a rank, or the one process, does in each training step."""

    def __init__(self, recorder, options):
        self.recorder = recorder
        self.options = options
        self.folder = None  # of the first weights
        self.models = 0  # whose first weights were saved
        self.names = WeakIdKeyDictionary()  # a parameter: its name, of models that have run
        self.modes = {True: WeakIdKeyDictionary(), False: WeakIdKeyDictionary()}  # trains: as names
        self.lines = set()  # at which the script asked for the length of a loader
        self.stepping = 0  # ZeroRedundancyOptimizer steps another optimizer in its step
        self.evaluates = False  # the last forward pass did not train

    def install(self):
        self.recorder.add("before", options=self.options)
        register_module_forward_pre_hook(self.before_forward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        replace(torch.autograd, "backward", self.backward)
        for owner in (nn.utils, nn.utils.clip_grad):
            replace(owner, "clip_grad_norm_", self.clip)
        replace(DataLoader, "__len__", self.length)
        for owner in (dist, dist.distributed_c10d):
            replace(owner, "all_reduce", self.reduce)
        replace(builtins, "print", self.print)
        replace(logging.Logger, "handle", self.log)
        if self.options["no_random"]:
            no_random.install()

    # The model

    def before_forward(self, module, args):
        parameter = next(module.parameters(), None)
        if parameter is None:
            return
        if module is self.recorder.models.root:
            self.evaluates = not (module.training and torch.is_grad_enabled())
        if parameter in self.modes[module.training]:
            return
        model = module.module if isinstance(module, DistributedDataParallel) else module
        names = [plain(name) for name, _ in model.named_parameters()]
        known = list(zip(model.parameters(), names, strict=True))
        self.modes[module.training].update(known)
        norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
        batch_norm = any(one.training and type(one) is not nn.SyncBatchNorm for one in norms)
        half = parameter.element_size() < 4 or torch.is_autocast_enabled(parameter.device.type)
        self.recorder.add("mode", batch_norm=batch_norm, half=half)
        if parameter not in self.names:
            self.names.update(known)
            self.recorder.add("weights", loaded=self.begin_with(model), folder=self.folder)

    def begin_with(self, model):
        """Save the first weights of a model on rank 0, and return whether that is possible."""
        state = {plain(name): whole(tensor) for name, tensor in named_tensors(model)}
        rank = script.rank() if self.recorder.rank is None else self.recorder.rank
        if rank == 0 and os.getpid() == self.recorder.pid:
            self.folder = self.folder or tempfile.mkdtemp(prefix="check_ranks-")
            torch.save(state, Path(self.folder) / f"{self.models}.pt")
            self.models += 1
        return not any(hasattr(parameter, "_fsdp_flattened") for parameter in model.parameters())

    # The training step

    def backward(self, real, tensors, *args, **kwargs):
        of = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        values = [whole(tensor).sum().tolist() for tensor in of]
        self.recorder.add("loss", value=sum(values))
        return real(tensors, *args, **kwargs)

    def clip(self, real, parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norms = self.norms(parameters)
        norm = real(parameters, *args, **kwargs)
        self.recorder.add("clipped", norm=whole(norm).tolist(), norms=norms)
        return norm

    def norms(self, parameters):
        """Return the norm of each gradient: {name: norm}."""
        known = [one for one in parameters if one.grad is not None]
        grads = [one.grad.to_dense() if one.grad.is_sparse else one.grad for one in known]
        values = [whole(grad.float().norm()).tolist() for grad in grads]
        names = [self.names.get(one, f"parameter {k}") for k, one in enumerate(known)]
        return dict(zip(names, values, strict=True))

    def before_step(self, optimizer, args, kwargs):
        self.stepping += 1
        if self.stepping > 1:
            return
        groups = [
            {"names": [self.names.get(one, "") for one in group["params"]]}
            | {name: group[name] for name in SETTINGS if name in group}
            for group in optimizer.param_groups
        ]
        norms = self.norms(parameters_of(optimizer))
        self.recorder.add("gradient", groups=groups, norms=norms, line=own_line())

    def after_step(self, optimizer, args, kwargs):
        self.stepping -= 1

    # Data

    def length(self, real, loader):
        line = own_line()
        if line not in self.lines and not self.recorder.all_steps:
            self.lines.add(line)
            self.recorder.add("asks for length", line=line)
        return real(loader)

    # Numbers of an evaluation

    def reduce(self, real, tensor, *args, **kwargs):
        if self.evaluates:
            small = isinstance(tensor, torch.Tensor) and tensor.numel() <= SMALL
            values = tensor.detach().double().flatten().tolist() if small else []
            self.recorder.add("reduces", values=values)
        return real(tensor, *args, **kwargs)

    def print(self, real, *values, **kwargs):
        if not any(isinstance(value, torch.Tensor) and value.numel() > SMALL for value in values):
            self.add_numbers(" ".join(map(str, values)))
        return real(*values, **kwargs)

    def log(self, real, logger, record):
        self.add_numbers(record.getMessage())
        return real(logger, record)

    def add_numbers(self, text):
        """Note the numbers in a line that the script prints, and the text around them."""
        numbers = NUMBER.findall(text)
        if numbers and self.evaluates and os.getpid() == self.recorder.pid:
            self.recorder.add("number", text=NUMBER.sub("#", text), numbers=numbers)


def named_tensors(model):
    """Return the (name, tensor) of the parameters and buffers of a model."""
    return [*model.named_parameters(), *model.named_buffers()]


def plain(name):
    """Return the name of a parameter without those of wrappers."""
    return functools.reduce(lambda text, wrapper: text.replace(wrapper, ""), WRAPPERS, name)


def whole(tensor):
    """Return a tensor, of which the ranks may have shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
