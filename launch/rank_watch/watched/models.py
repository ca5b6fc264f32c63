"""The models: what DistributedDataParallel holds, and forward and backward passes."""

import functools
import sys
import threading

from rank_watch.hooks import replace
from rank_watch.places import own_line

if torch := sys.modules.get("torch"):
    from rank_watch.hashes import fingerprints, hashes_of_inputs, is_tensor_parallel
    from torch import nn
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.weak import WeakIdKeyDictionary

STATISTICS = ("running_mean", "running_var")  # of batch norm


class Models:
    """Notes forward passes, their inputs, and what DistributedDataParallel holds."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.wrapped = WeakIdKeyDictionary()  # a module inside a DDP: the number of the DDP
        self.ddps = WeakIdKeyDictionary()  # a DDP: its number
        self.ddp_count = 0
        self.names = WeakIdKeyDictionary()  # a parameter: its name
        self.held = WeakIdKeyDictionary()  # a parameter: the number of its DDP
        self.used = {}  # the number of a DDP that looks for unused parameters: uses of each
        self.root = None  # the module whose forward pass runs, and which no other module calls
        self.root_pass = 0  # the number of this forward pass
        self.passes = 0  # forward passes that were noted
        # a model: lines at which it was evaluated since the last training pass
        self.evaluated = WeakIdKeyDictionary()

    def wrap(self, real, ddp, module, *args, **kwargs):
        result = real(ddp, module, *args, **kwargs)
        number = self.ddps[ddp] = self.ddp_count
        self.ddp_count += 1
        for part in module.modules():
            self.wrapped[part] = number
        times = []
        for name, parameter in module.named_parameters():
            self.names[parameter] = name
            if not parameter.requires_grad:
                continue  # DDP leaves it out, also if it is to train later
            self.held[parameter] = number
            if ddp.find_unused_parameters:
                count = functools.partial(count_use, times, len(times))
                parameter.register_post_accumulate_grad_hook(count)
                times.append(0)
        if times:
            self.used[number] = times
        self.recorder.add("model", name=type(module).__name__)
        return result

    def before_forward(self, module, args):
        if torch.compiler.is_compiling() or threading.get_ident() != self.recorder.thread:
            return
        ddp = isinstance(module, DistributedDataParallel)
        if self.root is not None and not ddp:
            return
        if torch._C._current_graph_task_id() != -1:  # computed again, in the backward pass
            return
        parameters = list(module.parameters())
        trains = module.training and any(parameter.requires_grad for parameter in parameters)
        if not parameters or (module.training and not trains):
            return  # a loss function, a transform of images
        if self.root is None:
            self.root = module
            self.root_pass = self.passes
            if any(parameter not in self.names for parameter in parameters):
                for name, parameter in module.named_parameters():
                    self.names.setdefault(parameter, name)
                if is_tensor_parallel(module):
                    self.recorder.add("tensor parallel")
            if ddp and any(p.requires_grad and p not in self.held for p in parameters):
                self.recorder.add("not held")
        self.recorder.mark("outside")
        self.add_forward(module, args, ddp)

    def add_forward(self, module, args, ddp):
        training = module.training
        line = own_line()
        values = {}
        if training:
            self.evaluated.clear()
        elif line not in self.evaluated.setdefault(module, set()):
            self.evaluated[module].add(line)
            model = module.module if ddp else module
            norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            buffers = [getattr(norm, name) for norm in norms for name in STATISTICS]
            ddps = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
            if not any(of.will_sync_module_buffers() for of in ddps):  # else rank 0's are taken
                values["statistics"] = fingerprints(buffers)
            values["weights"] = fingerprints(model.parameters())
        self.passes += 1
        inputs, tensors = hashes_of_inputs(args)
        self.recorder.add(
            "forward",
            model=type(module.module if ddp else module).__name__,
            ddp=self.ddps[module] if ddp else None,
            inside=self.wrapped.get(module),
            sync=bool(getattr(module, "require_backward_grad_sync", True)),
            training=training,
            mode=(module.module if ddp else module).training,  # model.eval() may leave out the DDP
            grad=torch.is_grad_enabled(),
            joins=bool(ddp and module._join_config.enable),
            inputs=inputs,
            tensors=tensors if training else [],
            line=line,
            **values,
        )
        self.recorder.flush()  # a collective that the other ranks do not call may end this process

    def after_forward(self, module, args, kwargs, output=None):
        if module is self.root:
            self.root = None
            # The hook before it gets no kwargs. After an error this one gets None in their place.
            if kwargs and module.training:
                inputs, tensors = hashes_of_inputs((args, kwargs))
                self.recorder.add("inputs", forward=self.root_pass, hashes=inputs, tensors=tensors)
            self.recorder.mark("forward")

    def backward(self, real, *args, **kwargs):
        self.recorder.add("backward", in_step=self.recorder.optimizers.is_stepping(sys._getframe()))
        return real(*args, **kwargs)

    def finish(self, why):
        for number, times in self.used.items():
            self.recorder.add("used", model=number, times=times)


def count_use(times, place, parameter):
    times[place] += 1


def install(recorder):
    models = recorder.models = Models(recorder)
    recorder.at_end.append(models.finish)
    register_module_forward_pre_hook(models.before_forward)
    register_module_forward_hook(models.after_forward, with_kwargs=True, always_call=True)
    replace(DistributedDataParallel, "__init__", models.wrap)
    replace(torch.autograd, "backward", models.backward)  # which loss.backward() calls


def judge(runs, judgment):
    """Nothing: the other files compare what is noted here."""
