"""Run a program in one rank, and record what it does: images, messages, training steps, the end."""

import contextlib
import datetime
import functools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup, Work, _functional_collectives, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader

TICK = 0.1  # seconds between two reports of a rank
SLOW_SAVE = 0.5  # seconds that torch.save takes here; at first there is no file, then an empty one

COMPUTED = {  # operations at which the memory is measured
    "aten::mm": "product",
    "aten::addmm": "product",
    "aten::bmm": "product",
    "aten::relu": "relu",
    "aten::threshold_backward": "relu",
}
LARGE = 30_000  # bytes: the weights of the exercises that measure, but not their activations

# Collectives as torch's dispatcher names them, for DDP in C++ too, and as people write them
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    # of torch.distributed._functional_collectives
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
FUNCTIONAL = "_c10d_functional"  # their namespace


class Event(NamedTuple):
    """Something that a rank did."""

    kind: str  # "batch", "message", "before", "step", "wait", "save", "load", ...
    value: Any
    time: float = 0.0  # in seconds, of a clock that all ranks share


class Message(NamedTuple):
    """A collective that a rank has called."""

    name: str  # as people write it: "all_reduce"
    size: int  # bytes of the tensors that this rank gives
    in_backward: bool  # called while the backward pass ran
    products: int  # matrix products since the backward pass began, or the one before
    line: int  # of the program
    ranks: tuple  # that take part: those of the group; the sender and the receiver


class Computed(NamedTuple):
    """An operation of which memory is measured before it begins."""

    name: str  # "product" or "relu", forward or backward
    in_backward: bool
    held: int  # bytes of all tensors that are at least LARGE


class Step(NamedTuple):
    """The state of an optimizer's parameters before or after a training step."""

    weights: list  # a tensor for each parameter
    gradients: list  # a tensor or None for each parameter
    lr: float
    state_bytes: int  # of the optimizer's state on this rank


class BatchNorm(NamedTuple):
    """A batch norm layer before its forward pass."""

    training: bool
    images: int
    buffers: dict  # name to tensor


class Record:
    """What one rank did. It is pickled, and read by the checks in another process."""

    def __init__(self, rank):
        self.rank = rank
        self.events = []  # in the order in which they happened
        self.gpu = None  # that the program made the current one
        self.visible_gpus = None  # in CUDA_VISIBLE_DEVICES, if the program has set it
        self.data = None  # the first table of random numbers, which are the images
        self.variables = {}  # of the program, when it ended: name to pickled value
        self.output = ""
        self.exit_code = None  # None: the rank was stopped
        self.signal = None  # name of the signal that killed the rank
        self.error = None  # (type, message) of the exception that ended the program
        self.line = 0  # where the program ended or waits; 0: outside its file
        self.waits = False  # in a call, when the rank was stopped


class Recorder(TorchDispatchMode):
    """Records what the program of this process does while the recorder is active."""

    def __init__(self, program, rank):
        super().__init__()
        self.program = str(program)
        self.record = Record(rank)
        self.in_backward = False
        self.products = 0  # matrix products since the backward pass began that runs, or ran last
        self.works = weakref.WeakSet()  # collectives that the program has waited for
        self.collected = (
            weakref.WeakKeyDictionary()
        )  # future of torch.futures.collect_all() to the futures in it
        self.old_works = weakref.WeakSet()  # those before the last training step
        self.depth = 0  # of the modules whose forward pass runs
        self.thread = threading.get_ident()
        self.log = None  # file for the messages: a rank that is killed leaves no record
        self.ddp = None  # of torch, called last
        self.local = threading.local()  # of another thread: the moment at which its work began
        self.measures = "MEASURES" in os.environ
        self.storages = {}  # id of a tensor's storage to a weak reference
        self.unwaited = set()  # addresses of the results of functional collectives

    def add(self, kind, value=None):
        self.record.events.append(Event(kind, value, time.monotonic()))

    def line(self):
        """Return the line of the program in which its thread is."""
        frame = sys._current_frames()[self.thread]
        while frame and frame.f_code.co_filename != self.program:
            frame = frame.f_back  # not in a variable that stays: a cycle would keep all tensors
        return frame.f_lineno if frame else 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", FUNCTIONAL) and name in COLLECTIVES:
            self.add_message(name, args)
        if func.name() in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.products += 1
        if self.measures and func.name() in COMPUTED:
            if not any(event.kind == "before" for event in self.record.events):  # the step judged
                time.sleep(0.01)  # a thread of gloo may still hold the tensors of a collective
            held = self.held()
            self.add("computed", Computed(COMPUTED[func.name()], self.in_backward, held))
        result = func(*args, **(kwargs or {}))
        if self.measures:
            for tensor in filter(is_data, tree_leaves(result)):
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        if namespace == FUNCTIONAL and name in COLLECTIVES:
            self.unwaited |= {x.data_ptr() for x in tree_leaves(result) if is_data(x)}
        elif namespace == FUNCTIONAL and name == "wait_tensor":
            self.add_wait_for(args[0])
        if func.name() == "aten::randn" and self.record.data is None and result.dim() > 1:
            if "OTHER_IMAGES" in os.environ:
                result.copy_(result.roll(4, dims=-1))  # the first four pixels say the class
            self.record.data = result.clone()
        return result

    def held(self):
        """Return the bytes of all large tensors that are alive, autograd's too."""
        alive = [storage() for storage in self.storages.values()]
        sizes = [storage.nbytes() for storage in alive if storage is not None]
        return sum(size for size in sizes if size >= LARGE)

    def add_message(self, name, args):
        tensors = []
        for arg in args:  # all_reduce has one list of tensors, all_gather its inputs at the end
            tensors = [x for x in tree_leaves(arg) if is_data(x)] or tensors
        size = 0 if name == "barrier" else sum(tensor.nbytes for tensor in tensors)
        moment = getattr(self.local, "moment", (self.in_backward, self.products))
        ranks = self.ranks_of(COLLECTIVES[name], args)
        message = Message(COLLECTIVES[name], size, *moment, self.line(), ranks)
        self.add("message", message)
        if self.log:
            words = (message.name, message.size, message.line, time.monotonic(), *ranks)
            print(*words, file=self.log)

    def ranks_of(self, name, args):
        """Return the ranks of a collective's group, or the sender and the receiver of a message."""
        if isinstance(args[-1], str):  # in functional collectives
            group = distributed_c10d._resolve_process_group(args[-1])
        else:
            group = ProcessGroup.unbox(next(arg for arg in args if is_group(arg)))
        ranks = distributed_c10d.get_process_group_ranks(group)
        if name == "send":
            return self.record.rank, ranks[args[2]]
        return (ranks[args[2]], self.record.rank) if name == "recv" else tuple(ranks)

    def seen(self, function):
        """Return a function for another thread, in which the recorder sees what it does.

        What it sends belongs to this moment: a thread may run later than the backward pass that
        gave it the work, and no rank waits for it.
        """
        moment = (self.in_backward, self.products)

        def run(*args, **kwargs):
            is_seen = hasattr(self.local, "moment")
            self.local.moment = moment
            with contextlib.nullcontext() if is_seen else self:
                return function(*args, **kwargs)

        return run

    # What torch calls

    def watch_torch(self):
        """Make torch report what it does to this recorder. For the rest of this process's life."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.add_step("before", optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self.add_step("step", optimizer))
        replace(nn.Module, "_call_impl", self.forward)  # global hooks do not see keyword arguments
        replace(torch.autograd, "backward", self.backward)  # which loss.backward() calls
        replace(TensorDataset, "__getitem__", self.read_image)
        replace(DataLoader, "__iter__", self.begin_loader)
        replace(dataloader._BaseDataLoaderIter, "__next__", self.next_batch)
        for waiting, name in ((Work, "wait"), (Work, "is_completed"), (torch._C.Future, "wait")):
            replace(waiting, name, self.wait)
        replace(torch.futures, "collect_all", self.collect_all)
        replace(_functional_collectives, "wait_tensor", self.wait_tensor)
        replace(threading.Thread, "start", self.start_thread)
        replace(ThreadPoolExecutor, "submit", self.submit)
        replace(torch.distributed, "reduce", self.reduce)
        replace(torch, "save", self.save)
        replace(torch, "load", self.load)
        replace(os, "kill", self.kill)

    def add_step(self, kind, optimizer):
        self.note_torchs_own(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weights = [local(p.detach()).clone() for p in parameters]
        gradients = [None if p.grad is None else local(p.grad).clone() for p in parameters]
        lr = float(optimizer.param_groups[0]["lr"])
        state = [local(x) for x in tree_leaves(list(optimizer.state.values())) if is_data(x)]
        state_bytes = sum(x.numel() * x.element_size() for x in state)
        self.add(kind, Step(weights, gradients, lr, state_bytes))
        self.old_works |= self.works

    def note_torchs_own(self, value):
        """Note a module or optimizer that does what some exercises ask the reader to write."""
        if type(value).__module__.startswith(("torch.distributed", "torch.nn.parallel")):
            self.add("torch's own", type(value).__name__)

    def forward(self, real, module, *args, **kwargs):
        """Run the forward pass of a module, and note what goes in and what comes out."""
        self.note_torchs_own(module)
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if isinstance(module, DistributedDataParallel):
            self.ddp = module
            self.add("torch's DDP", module.require_backward_grad_sync)
        inputs = [*args, *kwargs.values()]
        if self.depth == 0 and inputs and is_data(inputs[0]):
            self.add("batch", (inputs[0].detach().clone(), torch.is_grad_enabled()))
        if is_batch_norm:
            self.add("batch norm", BatchNorm(module.training, len(inputs[0]), buffers_of(module)))
        self.depth += 1
        try:
            output = real(module, *args, **kwargs)
        finally:
            self.depth -= 1
        if is_batch_norm and module.training:
            self.add("statistics", buffers_of(module))
        return output

    def backward(self, real, *args, **kwargs):
        if self.ddp and not self.ddp.require_backward_grad_sync:
            self.add("backward without sync")
        self.in_backward = True
        self.products = 0
        try:
            return real(*args, **kwargs)
        finally:
            self.in_backward = False
            self.add("backward", self.products)

    def begin_loader(self, real, loader):
        self.add("loader", loader.num_workers)
        if not isinstance(loader.dataset, IterableDataset):
            loader.num_workers = 0  # to see which images it reads
        return real(loader)

    def next_batch(self, real, iterator):
        """Note how many images a loader gives: a batch, or one."""
        batch = real(iterator)
        images = next(filter(is_data, tree_leaves(batch)), None)
        if images is not None:
            self.add("loaded", len(images) if images.dim() > 1 else 1)
        return batch

    def wait(self, real, work, *args, **kwargs):
        """Note that the program has waited until a collective was complete."""
        result = real(work, *args, **kwargs)
        if result is not False:  # of is_completed()
            for one in self.collected.get(work, [work]):
                if one in self.old_works:
                    self.add("old wait", self.stops_backward())
                elif one not in self.works:
                    self.add("wait", self.stops_backward())
                self.works.add(one)
        return result

    def stops_backward(self):
        """Return whether the backward pass goes on only after what this thread does now.

        None in another thread, which stops nothing.
        """
        return self.in_backward if threading.get_ident() == self.thread else None

    def wait_tensor(self, real, tensor):
        self.add_wait_for(tensor)
        return real(tensor)

    def add_wait_for(self, tensor):
        """Note that the program waits for the result of a functional collective."""
        address = getattr(tensor, "elem", tensor).data_ptr()  # it may be wrapped
        if address in self.unwaited:  # else it is complete
            self.unwaited.remove(address)
            self.add("wait", self.stops_backward())

    def start_thread(self, real, thread):
        thread.run = self.seen(thread.run)
        return real(thread)

    def submit(self, real, pool, function, *args, **kwargs):
        return real(pool, self.seen(function), *args, **kwargs)

    def reduce(self, real, tensor, dst=None, *args, **kwargs):
        """Reduce a tensor, but leave it as it was on other ranks than dst: gloo may not."""
        own = tensor.detach().clone()
        work = real(tensor, dst, *args, **kwargs)
        if work is None and dst not in (None, torch.distributed.get_rank()):
            tensor.detach().copy_(own)
        return work

    def collect_all(self, real, futures):
        """Remember which futures a program waits for, if it waits for their collection."""
        result = real(futures)
        self.collected[result] = list(futures)
        return result

    def kill(self, real, pid, number):
        if pid == os.getpid():
            self.add("signal", number)
        return real(pid, number)

    def read_image(self, real, dataset, index):
        if isinstance(index, int):  # as a DataLoader asks for it
            self.add("read", index)
        return real(dataset, index)

    def save(self, real, obj, f, *args, **kwargs):
        if not is_file(f):
            return real(obj, f, *args, **kwargs)
        self.add("save", keys_of(obj))
        time.sleep(SLOW_SAVE / 2)
        if not isinstance(f, str | os.PathLike):  # an open one
            return real(obj, f, *args, **kwargs)
        Path(f).touch()
        time.sleep(SLOW_SAVE / 2)
        new = f"{f}.{self.record.rank}"
        real(obj, new, *args, **kwargs)
        os.replace(new, f)  # at once: else two ranks that write it would see this or that error
        return None

    def load(self, real, f, *args, **kwargs):
        if is_file(f):
            self.add("load")
        try:
            return real(f, *args, **kwargs)
        except EOFError:
            raise EOFError(f"{f} is not complete: a rank still writes it") from None

    def pretend_gpus(self, count):
        """Make torch say that this machine has GPUs, for a program that only chooses one."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        for module in (torch.cuda, torch.accelerator):
            module.is_available = lambda: True
            module.device_count = lambda: count
        torch.cuda.set_device = torch.accelerator.set_device_index = self.set_gpu
        torch.cuda.current_device = lambda: self.record.gpu or 0
        torch.accelerator.current_device_index = torch.cuda.current_device

    def set_gpu(self, device):
        self.record.gpu = device if isinstance(device, int) else torch.device(device).index

    # The end

    def finish(self, module):
        """Keep the variables of a program that others can read: numbers, tensors, models."""
        self.record.visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, types.ModuleType):
                if isinstance(value, DistributedDataParallel):  # cannot be pickled
                    value = value.module
                self.record.variables[name] = b""  # of one that others cannot read
                with contextlib.suppress(Exception):  # a program may have anything
                    self.record.variables[name] = pickle.dumps(value)

    def fail(self, error):
        """Keep the exception that ended the program, and its line."""
        frames = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in frames if frame.filename == self.program]
        lines = [frame.lineno for frame in frames]
        if isinstance(error, SyntaxError) and error.filename == self.program:
            lines.append(error.lineno)
        self.record.line = lines[-1] if lines else 0
        message = str(error)
        if isinstance(error, AssertionError) and not message and frames:
            message = frames[-1].line
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause:
            message += f" (after {type(cause).__name__}: {cause})"
        self.record.error = (type(error).__name__, message)
        if self.record.line:
            print(f"line {self.record.line}:")
        print(*traceback.format_exception_only(error), sep="\n")


def is_data(value):
    return isinstance(value, torch.Tensor)


def is_group(value):
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def local(tensor):
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_file(value):
    """Return whether this is a path or an open file, not a buffer, in which tensors are pickled."""
    return isinstance(value, str | os.PathLike) or hasattr(value, "name")


def keys_of(value):
    """Return the keys of a checkpoint, and of the dictionaries and modules in it."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if not isinstance(value, dict):
        return []
    return [*map(str, value), *(key for part in value.values() for key in keys_of(part))]


def buffers_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def replace(owner, name, function):
    """Replace a function by function(the replaced one, its arguments)."""
    real = getattr(owner, name)
    wrapper = functools.wraps(real)(lambda *args, **kwargs: function(real, *args, **kwargs))
    setattr(owner, name, wrapper)


class MovedDatetime(datetime.datetime):
    """A datetime that asks time.time() for the time, as its today() does already."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def move_clocks(seconds):
    """Make the clocks of time and datetime go so many seconds ahead."""
    replace(time, "time", lambda real: real() + seconds)
    replace(time, "time_ns", lambda real: real() + seconds * 10**9)
    for name in ("localtime", "gmtime", "ctime"):
        replace(time, name, lambda real, when=None: real(time.time() if when is None else when))
    replace(time, "asctime", lambda real, when=None: real(when or time.localtime()))
    replace(time, "strftime", lambda real, form, when=None: real(form, when or time.localtime()))
    datetime.datetime = MovedDatetime


def has_text(value):
    """Return whether this is a string or bytes, or a tuple with one in it."""
    return any(isinstance(leaf, str | bytes) for leaf in tree_leaves(value))


exit_process = os._exit  # the program's os._exit() also writes the record


def run_rank(program, rank, environment, folder, connection):
    """Run the program as rank `rank`: called in a new process.

    The rank reports what it does every TICK seconds through the connection, and writes its Record
    to `folder` at the end. If the connection says "stop", or ends, the process ends.
    """
    os.environ.update(environment)
    later = int(os.environ.get("LATER", 0))
    if later:
        move_clocks(later)
    os.setpgrp()  # a signal for the group of this process does not reach check.py
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.chdir(folder)  # a program may save files
    torch.set_num_threads(1)
    torch.seed()  # else all ranks would go on with the random numbers of the server process
    np.random.seed()
    output = open(folder / f"output-{rank}", "w+", buffering=1)  # noqa: SIM115
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.stdout

    recorder = Recorder(program, rank)
    recorder.log = open(folder / f"messages-{rank}", "w", buffering=1)  # noqa: SIM115
    end = threading.Lock()  # the record is written once
    watcher = threading.Thread(target=report, args=(recorder, folder, connection, end), daemon=True)
    watcher.start()  # before threads are watched
    recorder.watch_torch()
    if "PRETENDED_GPUS" in environment:
        recorder.pretend_gpus(int(environment["PRETENDED_GPUS"]))

    module = types.ModuleType("__main__")
    module.__file__ = str(program)
    # Else the hash of a string would be the same in all processes of one server
    module.hash = lambda value: hash((rank, later, value) if has_text(value) else value)
    sys.modules["__main__"] = module
    sys.argv = [str(program)]
    sys.path.insert(0, os.path.dirname(program))
    pid = os.getpid()

    def leave(code):
        if os.getpid() != pid:  # in a worker of a DataLoader
            exit_process(code)
        recorder.record.exit_code = code
        with end:
            recorder.finish(module)
            write(recorder, folder)
            exit_process(code)

    os._exit = leave
    code = 0
    try:
        source = compile(program.read_text(encoding="utf-8"), str(program), "exec")
        with recorder:
            exec(source, module.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code)
    except BaseException as error:
        code = 1
        recorder.fail(error)
    leave(code)


def report(recorder, folder, connection, end):
    """Tell the parent how far this rank is, until it is told to stop."""
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            connection.send((recorder.line(), len(recorder.record.events), time.process_time()))
            if connection.poll(TICK):
                connection.recv()
                break
    with end:
        recorder.record.line = recorder.line()
        recorder.record.waits = True
        recorder.finish(sys.modules["__main__"])
        write(recorder, folder)
        exit_process(1)


def write(recorder, folder):
    record = recorder.record
    sys.stdout.flush()
    record.output = (folder / f"output-{record.rank}").read_text(errors="replace")
    new = folder / f"record-{record.rank}.new"
    with new.open("wb") as file:
        pickle.dump(record, file)
    new.rename(folder / f"record-{record.rank}")
