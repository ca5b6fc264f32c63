"""Record what one rank of a training does, and send it to the monitor: hashes, never the data."""

import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from rank_watch.places import (
    is_own,
    own_line,
    own_line_of_error,
    place_of_thread,
    recorded_calls,
)
from rank_watch.script import rank, say, write_error_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, get_worker_info
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.weak import WeakIdKeyDictionary

PATIENCE = 5  # seconds to connect to the monitor
SETTINGS = ("lr", "momentum", "betas", "weight_decay")  # of a parameter group
STATISTICS = ("running_mean", "running_var")  # of batch norm
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("barrier", "monitored_barrier"),
)
SOURCES = ("torch", "GPU", "numpy", "random")  # of random numbers
# of a DTensor, of a FlatParameter of FSDP, and of the original parameters in it
SHARD_MARKS = ("placements", "_local_shard", "_fsdp_flattened")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

GPU_ERROR = re.compile("CUDA|NCCL|NVIDIA|device_ids", re.IGNORECASE)
NO_GPU = (
    "check_ranks.py: the script asks for a GPU, and PyTorch sees none: expected "
    'init_process_group("gloo"), and the model and the data on the CPU (docs/check-ranks.md)'
)

exit_process = os._exit
recorder = None  # of this process


class Recorder:
    """Watches the training of this process, from install() to finish().

    It collects events, which are dictionaries, and sends them to the monitor as lines of JSON. The
    monitor is a process that rank 0 starts.

    It holds no object of the script: a DDP that only the recorder held would go on to average.
    """

    def __init__(self, max_steps, epoch_steps):
        self.max_steps = max_steps  # training steps, after which the run ends; 0: never
        self.epoch_steps = epoch_steps  # batches, after which each pass over a loader ends; 0: all
        self.pid = os.getpid()
        self.thread = threading.get_ident()  # that trains
        self.rank = None
        self.world_size = None
        self.connection = None  # to the monitor
        self.events = []  # that are not sent yet
        self.sending = threading.RLock()  # two threads add events and send them
        self.verdict = None  # of the monitor: {"code": ..., "text": ...}
        self.listener = None  # a thread, which ends when the verdict is there
        self.finishing = threading.Lock()
        self.started_processes = False  # with mp.spawn

        self.communicates = False  # a collective has called another one
        self.optimizers = WeakIdKeyDictionary()  # an optimizer: its number
        self.optimizer_count = 0  # of all that have stepped, also of those that are gone
        self.sizes = WeakIdKeyDictionary()  # of each optimizer: its parameters
        self.step_code = None  # of torch's function that calls the hooks around a step
        self.steps = WeakIdKeyDictionary()  # of each optimizer
        self.all_steps = 0
        self.gradients = []
        self.wrapped = WeakIdKeyDictionary()  # a module inside a DDP: the number of the DDP
        self.ddps = WeakIdKeyDictionary()  # a DDP: its number
        self.ddp_count = 0
        self.names = WeakIdKeyDictionary()  # a parameter: its name
        self.held = WeakIdKeyDictionary()  # a parameter: the number of its DDP
        self.used = {}  # the number of a DDP that looks for unused parameters: uses of each
        self.root = None  # the module whose forward pass runs, and which no other module calls
        self.root_pass = 0  # the number of this forward pass
        self.passes = 0  # forward passes that were noted
        # a loader: where it was made, and how many were used before
        self.loader_lines = WeakIdKeyDictionary()
        self.loaders = WeakIdKeyDictionary()  # a loader: its number, from its first pass on
        self.iterators = WeakIdKeyDictionary()  # of a loader: the loader's number
        self.beginning = None  # the number of the loader whose iterator is made now
        self.data_sets = []  # of each loader: a function that returns it, or None if it is gone
        self.kept = []  # data sets that probe() reads
        self.worker_states = []  # (loader, shared array)
        self.shared = None  # with the workers that are started now: states, and which moved
        self.random_states = {}  # source: hash
        # a model: lines at which it was evaluated since the last training pass
        self.evaluated = WeakIdKeyDictionary()

    # What torch calls

    def install(self):
        """Make torch report what it does to this recorder, for the rest of this process's life."""
        global recorder
        recorder = self
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        register_module_forward_pre_hook(self.before_forward)
        register_module_forward_hook(self.after_forward, with_kwargs=True, always_call=True)
        # init_device_mesh() has a name of its own for the function
        for owner in (dist, dist.distributed_c10d, dist.device_mesh):
            replace(owner, "init_process_group", self.join)
        for owner in (dist, dist.distributed_c10d):
            for name in COLLECTIVES:
                replace(owner, name, functools.partial(self.communicate, name))
            replace(owner, "destroy_process_group", self.destroy)
        replace(DistributedDataParallel, "__init__", self.wrap)
        replace(torch.autograd, "backward", self.backward)  # which loss.backward() calls
        replace(torch.amp.GradScaler, "update", self.scale)
        replace(ReduceLROnPlateau, "step", self.follow)
        replace(DataLoader, "__init__", self.make_loader)
        replace(DataLoader, "__iter__", self.begin_loader)
        replace(DataLoader, "__len__", self.length)
        replace(torch_loader._BaseDataLoaderIter, "_next_index", self.next_index)
        replace(torch_loader._BaseDataLoaderIter, "__next__", self.next_batch)
        replace(torch_fetch._MapDatasetFetcher, "fetch", fetch_in_worker)
        replace(random, "seed", functools.partial(note_seed, "random"))
        if numpy := sys.modules.get("numpy"):
            replace(numpy.random, "seed", functools.partial(note_seed, "numpy"))
        replace(torch, "save", self.save)
        replace(os, "_exit", self.leave)
        spawning = sys.modules["torch.multiprocessing.spawn"]
        for owner in (spawning, torch.multiprocessing):
            replace(owner, "start_processes", self.start_processes)
        sys.addaudithook(self.audit)

    def join(self, real, *args, **kwargs):
        if self.connection or dist.is_initialized() or os.getpid() != self.pid:
            return real(*args, **kwargs)
        result = real(*args, **kwargs)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size == 1:
            flush_files()
            self.finish_alone()
            exit_process(self.exit_code(0))
        self.connect()
        return result

    def destroy(self, real, *args, **kwargs):
        result = real(*args, **kwargs)
        if not dist.is_initialized():  # the training is over, and main() returns before finish()
            self.kept = [data_set() for data_set in self.data_sets]
        return result

    def communicate(self, name, real, *args, **kwargs):
        if self.communicates or self.connection is None:
            return real(*args, **kwargs)
        self.communicates = True  # all_gather_object() calls all_gather()
        self.add("collective", name=name, line=own_line(), group=group_of(args, kwargs))
        self.flush()
        try:
            return real(*args, **kwargs)
        finally:
            self.communicates = False

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
        self.add("model", name=type(module).__name__)
        return result

    def before_step(self, optimizer, args, kwargs):
        self.step_code = sys._getframe(1).f_code
        if self.is_stepping(sys._getframe(2)):  # ZeroRedundancyOptimizer steps another optimizer
            return
        self.root = None
        parameters = parameters_of(optimizer)
        self.gradients = fingerprints(parameter.grad for parameter in parameters)
        if self.sizes.get(optimizer) != len(parameters):  # new, or with another group of parameters
            self.sizes[optimizer] = len(parameters)
            if optimizer not in self.optimizers:
                self.optimizers[optimizer] = self.optimizer_count
                self.optimizer_count += 1
            self.add(
                "optimizer",
                optimizer=self.optimizers[optimizer],
                name=type(optimizer).__name__,
                names=[self.names.get(parameter, "") for parameter in parameters],
                models=[self.held.get(parameter) for parameter in parameters],
                before=fingerprints(parameters),
            )

    def after_step(self, optimizer, args, kwargs):
        if self.is_stepping(sys._getframe(2)):
            return
        self.all_steps += 1
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        settings = [
            {name: group[name] for name in SETTINGS if name in group}
            for group in optimizer.param_groups
        ]
        self.mark("step")
        self.add(
            "step",
            optimizer=self.optimizers[optimizer],
            settings=settings,
            gradients=self.gradients,
            weights=fingerprints(parameters_of(optimizer)),
            ddps=list(self.ddps.values()),
            line=own_line(),
        )
        self.flush()
        last = self.max_steps and self.steps[optimizer] >= self.max_steps
        if last and os.getpid() == self.pid:  # not in a fork, such as of mp.Process
            flush_files()
            self.finish("steps", steps=self.steps[optimizer])
            exit_process(self.exit_code(0))

    def is_stepping(self, frame):
        """Return whether an optimizer is in its step, in this frame or outside of it."""
        while frame and frame.f_code is not self.step_code:
            frame = frame.f_back
        return frame is not None

    def before_forward(self, module, args):
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
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
                    self.add("tensor parallel")
        self.mark("outside")
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
        self.add(
            "forward",
            model=type(module.module if ddp else module).__name__,
            ddp=self.ddps[module] if ddp else None,
            inside=self.wrapped.get(module),
            sync=bool(getattr(module, "require_backward_grad_sync", True)),
            training=training,
            grad=torch.is_grad_enabled(),
            joins=bool(ddp and module._join_config.enable),
            inputs=hashes_of_samples(args),
            line=line,
            **values,
        )
        self.flush()  # a collective that the other ranks do not call may end this process

    def after_forward(self, module, args, kwargs, output=None):
        if module is self.root:
            self.root = None
            # The hook before it gets no kwargs. After an error this one gets None in their place.
            if kwargs and module.training:
                inputs = hashes_of_samples((args, kwargs))
                self.add("inputs", forward=self.root_pass, hashes=inputs)
            self.mark("forward")

    def backward(self, real, *args, **kwargs):
        self.add("backward", in_step=self.is_stepping(sys._getframe()))
        return real(*args, **kwargs)

    def scale(self, real, scaler, *args, **kwargs):
        result = real(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self.add("scale", value=scaler.get_scale())
        return result

    def follow(self, real, scheduler, metrics, *args, **kwargs):
        with contextlib.suppress(TypeError, ValueError):
            self.add("follow", value=float(metrics), line=own_line())
        return real(scheduler, metrics, *args, **kwargs)

    # Data

    def make_loader(self, real, loader, *args, **kwargs):
        self.loader_lines[loader] = own_line(), len(self.data_sets)
        return real(loader, *args, **kwargs)

    def begin_loader(self, real, loader):
        if get_worker_info() is not None:
            return real(loader)
        if loader not in self.loaders:
            self.add_loader(loader)
        number = self.beginning = self.loaders[loader]
        self.mark("before a loader")
        self.shared = multiprocessing.get_context("fork").RawArray("q", 2 * len(SOURCES))
        self.worker_states.append((number, self.shared))
        self.add("epoch", loader=number)
        try:
            iterator = real(loader)
            self.iterators[iterator] = number
            return iterator
        finally:
            self.beginning = self.shared = None
            self.mark("loader")

    def length(self, real, loader):
        return min(real(loader), self.epoch_steps or sys.maxsize)

    def add_loader(self, loader):
        self.loaders[loader] = len(self.data_sets)
        self.data_sets.append(weak_data_set(loader))
        sampler, dataset = loader.sampler, loader.dataset
        values = {"iterable": isinstance(dataset, IterableDataset)}
        if not values["iterable"]:
            base, indices = base_of(dataset)
            shuffles = getattr(sampler, "shuffle", None)
            values |= {
                "size": length_of(dataset),
                "base": [type(base).__name__, length_of(base)],
                "subset": indices,
                "share": length_of(sampler) if loader.batch_size else None,
                "sampler": type(loader.batch_sampler if is_custom(loader) else sampler).__name__,
                "replacement": bool(getattr(sampler, "replacement", False)),
                "shuffle": isinstance(sampler, RandomSampler) or shuffles,
                "seed": getattr(sampler, "seed", None),
                "replicas": getattr(sampler, "num_replicas", None),
                "drop_last": bool(loader.drop_last),
                "batch_size": loader.batch_size,
            }
        line, older = self.loader_lines.get(loader, ("", 0))
        self.add("loader", line=line or own_line(), older=older, **values)

    def next_index(self, real, iterator):
        number = self.iterators.get(iterator, self.beginning)
        # An iterator with workers draws their seed, and asks for indices, while it is made.
        self.mark("loading" if self.shared is None else "loader")
        try:
            indices = real(iterator)
        except StopIteration:
            if number is not None:
                self.add("epoch ends", loader=number)
            raise
        self.mark("sampler")
        if number is not None:
            self.add("indices", loader=number, indices=numbers_in(indices))
        return indices

    def next_batch(self, real, iterator):
        enough = self.epoch_steps and iterator._num_yielded >= self.epoch_steps
        if enough and not is_at_its_end(iterator):
            self.add("epoch is cut")
            raise StopIteration
        self.mark("outside")
        batch = real(iterator)
        self.mark("loading")
        self.add("batch", loader=self.iterators.get(iterator))
        return batch

    def probe(self):
        """Send hashes of three samples of each data set, read with the same random numbers."""
        numpy = sys.modules.get("numpy")
        for number, data_set in enumerate(self.data_sets):
            base = data_set()
            hashes = []
            with contextlib.suppress(Exception):  # of the reader's data set, or it is gone
                for index in (0, len(base) // 2, len(base) - 1) * 2:
                    torch.manual_seed(0)
                    random.seed(0)
                    if numpy:
                        numpy.random.seed(0)
                    hashes.append(hash_of(base[index]))
            repeated = hashes[:3] == hashes[3:]  # else it draws from a generator of its own
            self.add("samples", loader=number, hashes=hashes[:3] if repeated else [])

    # Random numbers

    def mark(self, span):
        """Note whether random numbers were drawn since the last mark, in the span that ends now."""
        if threading.get_ident() != self.thread:
            return
        for source, state in random_states().items():
            before = self.random_states.get(source)
            self.random_states[source] = state
            if before is not None and before != state:
                self.add("draw", span=span, source=source, state=state)

    # Files

    def save(self, real, value, file, *args, **kwargs):
        if isinstance(file, str | os.PathLike):
            self.add("write", path=os.path.abspath(file), mode="w", line=own_line())
        return real(value, file, *args, **kwargs)

    def audit(self, event, args):
        if event != "open" or os.getpid() != self.pid:
            return
        path, mode, _ = args
        if not isinstance(path, str) or not isinstance(mode, str) or mode[0] not in "wax":
            return
        private = ("/.cache/", "__pycache__", "torchinductor")
        system = path.startswith(("/dev/", "/proc/", "/sys/"))
        if not (system or any(part in path for part in private)) and (line := own_line()):
            self.add("write", path=os.path.abspath(path), mode=mode[0], line=line)

    # Processes that this one starts

    def start_processes(self, real, fn, *args, **kwargs):
        self.started_processes = True
        return real(Watched(fn, self.max_steps, self.epoch_steps), *args, **kwargs)

    # Messages

    def add(self, kind, **values):
        if os.getpid() == self.pid:  # not in a worker of a loader
            with self.sending:
                self.events.append({"kind": kind} | values)

    def connect(self):
        """Connect to the monitor, which rank 0 starts. Its address is in the group's store."""
        store = dist.PrefixStore("check_ranks", dist.distributed_c10d._get_default_store())
        if self.rank == 0:
            listener = socket.create_server(("", 0), backlog=self.world_size)
            token = secrets.token_hex(16)
            monitor = Path(__file__).with_name("monitor.py")
            arguments = [listener.fileno(), token, self.world_size]
            subprocess.Popen(
                [sys.executable, str(monitor), *map(str, arguments)],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
            )
            port = listener.getsockname()[1]
            listener.close()
            store.set("address", json.dumps([socket.gethostname(), port, token]))
        host, port, token = json.loads(store.get("address"))
        hosts = [os.environ.get("MASTER_ADDR"), host]
        if host == socket.gethostname():
            hosts.insert(0, "127.0.0.1")
        me = {"rank": self.rank, "host": socket.gethostname()}
        for name in filter(None, hosts):
            with contextlib.suppress(OSError):
                self.connection = socket.create_connection((name, port), PATIENCE)
                self.send([{"kind": "hello", "token": token} | me])
                self.replies = self.connection.makefile()
                if self.replies.readline():  # the monitor accepts the token
                    break
                self.connection = None
        if self.connection is None:
            sys.exit(f"check_ranks.py: rank {self.rank} cannot connect to {host}:{port} of rank 0")
        self.connection.settimeout(None)
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def send(self, events):
        text = "".join(json.dumps(event, default=as_plain) + "\n" for event in events)
        with self.sending:
            self.connection.sendall(text.encode())

    def flush(self):
        if self.connection is None or os.getpid() != self.pid:
            return
        with self.sending, contextlib.suppress(OSError):  # the monitor has ended
            events, self.events = self.events, []
            self.send(events)

    def listen(self):
        """Answer the monitor's questions, until it sends its verdict or ends."""
        with contextlib.suppress(OSError):
            for line in self.replies:
                message = json.loads(line)
                if message["kind"] == "verdict":
                    self.verdict = message
                    break
                self.flush()
                at = place_of_thread(self.thread)
                self.send([{"kind": "calls", "question": True} | calls_so_far(at)])
        if self.verdict is None:
            text = "check_ranks.py: the process that compares the ranks has ended too early"
            self.verdict = {"code": 1, "text": text, "now": False}
            print(text, file=sys.stderr)
        if self.verdict and self.verdict["now"]:  # this rank hangs, or will never be needed again
            self.write_error_file()
            flush_files()
            exit_process(self.exit_code(0))

    # The end

    def leave(self, real, code):
        if os.getpid() == self.pid:
            error, line = f"exit code {code}", own_line()
            if exception := sys.exc_info()[1]:
                error, line = one_line(exception), own_line_of_error(exception)
            self.finish("failed" if code else "end", error=error, line=line)
            code = self.exit_code(code)
        real(code)

    def finish(self, why, **values):
        """Send what is left, and wait for the verdict. Once: later calls return at once."""
        if os.getpid() != self.pid or not self.finishing.acquire(blocking=False):
            return
        if self.connection is None:
            if why != "failed":
                self.finish_alone()
            return
        if why != "failed":
            self.probe()
        for number, array in self.worker_states:
            if any(array):  # else its workers were those of the epoch before
                self.add("worker", loader=number, states=list(array))
        for number, times in self.used.items():
            self.add("used", model=number, times=times)
        self.add("calls", **calls_so_far(at=""))
        self.add("done", why=why, **values)
        self.flush()
        self.listener.join()
        self.write_error_file()

    def finish_alone(self):
        """Say what is wrong in a process that has no other rank."""
        if self.started_processes:
            return
        count = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", 1)))
        self.rank = rank()
        text = (
            "check_ranks.py: one process, so there are no ranks to compare: expected two or more; "
            "torchrun --nproc-per-node=2 launch/check_ranks.py train.py; with one GPU, on the CPU: "
            "CUDA_VISIBLE_DEVICES= torchrun ..."
        )
        if count > 1 and dist.is_initialized():
            text = "check_ranks.py: the process group was made in a way that is not watched"
        elif count > 1:
            text = (
                f"found: {self.all_steps} training steps, and no process group: the script "
                f"never called init_process_group(), so each of the {count} processes trains a "
                "model of its own (docs/copy-setup-distributed.md)"
            )
        self.verdict = {"code": 1 if text.startswith("found") else 2, "text": text}
        if self.rank == 0:
            print(text, flush=True)
            self.write_error_file()

    def exit_code(self, code):
        """Return the exit code of this process, whose script ended with `code`."""
        if code == 0 and self.rank == 0 and self.verdict:
            return self.verdict["code"]
        return code

    def write_error_file(self):
        """Let torchrun print the findings as the cause, last of all."""
        if self.rank == 0 and self.verdict and self.verdict["code"]:
            write_error_file(self.verdict["text"])


class Watched:
    """A function that mp.spawn calls, in a process that is watched."""

    def __init__(self, function, max_steps, epoch_steps):
        self.function = function
        self.options = max_steps, epoch_steps

    def __call__(self, *args):
        if recorder is None:
            Recorder(*self.options).install()
        else:  # this process is a fork
            recorder.pid, recorder.thread = os.getpid(), threading.get_ident()
            recorder.started_processes = False
        watch(lambda: self.function(*args))


def watch(function):
    """Call function() under the recorder of this process, and exit as it ends."""
    code = 0
    try:
        variables = function()  # of the script, which Python also keeps until its end
        recorder.finish("end")
        del variables
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        recorder.finish("failed" if code else "end", error=f"exit code {code}", line=own_line())
    except BaseException as error:
        code = 1
        if not recorder.verdict:  # else the run is over, and other ranks have ended
            print_error(error)
        recorder.finish("failed", error=one_line(error), line=own_line_of_error(error))
        if GPU_ERROR.search(str(error)) and not torch.cuda.is_available():
            say(NO_GPU)
    code = recorder.exit_code(code)
    if code:
        flush_files()
        exit_process(code)  # mp.spawn would print a traceback of this


def flush_files():
    """Write what the script has printed, or written to files that are open: os._exit() does not."""
    for file in gc.get_objects():
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or detached
                file.flush()


def print_error(error):
    """Print an exception as Python does, from the first frame of the script on."""
    trace = error.__traceback__
    while trace and not is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def one_line(error):
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def calls_so_far(at):
    return {"at": at, "calls": recorded_calls(), "cpu": time.process_time()}


def replace(owner, name, function):
    """Replace a function by function(the replaced one, its arguments)."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapper(*args, **kwargs):
        return function(real, *args, **kwargs)

    setattr(owner, name, wrapper)


# Hashes


def as_integers(tensor):
    """Return the bits of a tensor, flat, as whole numbers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous().view(-1)
    return tensor.view(INTEGERS[tensor.element_size()])


def fingerprints(tensors):
    """Return a number for each tensor, which is equal for equal bits, or None: unknown, sharded.

    It is the sum of the bits, read as whole numbers, without the carry: the order in which a device
    adds does not matter.
    """
    with torch.no_grad():
        numbers = []
        for tensor in tensors:
            if tensor is None or not is_whole(tensor):
                numbers.append(None)
                continue
            integers = as_integers(tensor)
            kind = torch.int64 if integers.element_size() < 4 else integers.dtype
            numbers.append(integers.sum(dtype=kind))
        known = [number.long() for number in numbers if number is not None]
        known = [number.to(known[0].device) for number in known]  # a model may be on two GPUs
        values = iter(torch.stack(known).tolist() if known else [])
        return [None if number is None else next(values) for number in numbers]


def is_whole(tensor):
    """Return whether a rank has all of a tensor, not a shard of it."""
    sharded = any(hasattr(tensor, mark) for mark in SHARD_MARKS)
    return not sharded and tensor.layout == torch.strided


def is_tensor_parallel(module):
    """Return whether its parameters are divided otherwise than once, by fully_shard()."""
    by_fsdp = any(hasattr(part, "_get_fsdp_state") for part in module.modules())
    placements = [getattr(parameter, "placements", ()) for parameter in module.parameters()]
    return any(sum(not one.is_replicate() for one in of) > by_fsdp for of in placements)


def hash_of(value):
    """Return a hash of a sample of a data set: of its tensors, arrays, numbers and strings."""
    total = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            leaf = as_integers(leaf).cpu().numpy()
        if isinstance(leaf, str | bytes | int | float | complex | None):
            data = repr(leaf).encode()
        elif hasattr(leaf, "tobytes") and str(getattr(leaf, "dtype", "")) != "object":
            data = leaf.tobytes()
        else:  # its text may be an address
            raise TypeError(f"{type(leaf).__name__}: expected a tensor, array, number or string")
        total = zlib.crc32(data, total)
    return total


def hashes_of_samples(args):
    """Return a hash for each sample of a batch of inputs, or None: unknown."""
    try:
        with torch.no_grad():
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim()]
            tensors = [x.cpu() for x in tensors if len(x) == len(tensors[0])]
            return [hash_of(sample) for sample in zip(*tensors, strict=True)] or None
    except (RuntimeError, TypeError):
        return None


def random_states():
    """Return a hash of the state of each generator of random numbers: {source: hash}."""
    states = {"torch": zlib.crc32(torch.get_rng_state().numpy().tobytes())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["GPU"] = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    states["random"] = hash(random.getstate()[1])
    return states


def group_of(args, kwargs):
    """Return the name of the process group in the arguments of a collective, or "": the default."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD:
            return value.group_name
    return ""


def is_at_its_end(iterator):
    """Return whether an iterator of a DataLoader has no more batches, if its sampler knows."""
    with contextlib.suppress(TypeError):
        return iterator._num_yielded >= len(iterator._index_sampler)
    return False


# In the workers of a loader

seeds = {}  # {source: the last seed}


def note_seed(source, real, *args, **kwargs):
    seeds[source] = zlib.crc32(repr((args, kwargs)).encode())  # hash() differs between processes
    return real(*args, **kwargs)


def last_seeds():
    return seeds | {"torch": torch.initial_seed() >> 1}


def fetch_in_worker(real, fetcher, indices):
    """Note the random numbers with which the first worker begins, and whether it draws any.

    A data set that seeds for each sample begins with its last seed.
    """
    worker = get_worker_info()
    states = recorder.shared
    if worker is None or worker.id or states is None:
        return real(fetcher, indices)
    before, seeds_before = random_states(), last_seeds()
    result = real(fetcher, indices)
    after, seeds_after = random_states(), last_seeds()
    for k, source in enumerate(SOURCES):
        if source in before:
            start = before[source]
            if seeds_before.get(source) != seeds_after.get(source):
                start = seeds_after[source]
            states[2 * k] = states[2 * k] or start
            states[2 * k + 1] |= before[source] != after[source]
    return result


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def as_plain(value):
    """Return what JSON can hold of a value that it does not know, such as a number of numpy."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def numbers_in(indices):
    """Return indices as lists of whole numbers, one for each sample, or None: they are others.

    A sampler may give (epoch, index) for each sample.
    """
    try:
        if hasattr(indices, "tolist"):
            indices = indices.tolist()
        if not isinstance(indices, list | tuple):
            indices = [indices]
        return [list(map(int, one if isinstance(one, tuple) else [one])) for one in indices]
    except (TypeError, ValueError):
        return None


def base_of(dataset):
    """Return the data set inside of Subsets, and the indices in it, or None: all."""
    indices = None
    while isinstance(dataset, Subset):
        inner = dataset.indices
        indices = [int(inner[k]) for k in (range(len(inner)) if indices is None else indices)]
        dataset = dataset.dataset
    return dataset, indices


def weak_data_set(loader):
    """Return a function that returns the data set inside of Subsets, or None if it is gone."""
    base, _ = base_of(loader.dataset)
    try:
        return weakref.ref(base)
    except TypeError:  # a list, which lives as long as the loader at least
        loader = weakref.ref(loader)
        return lambda: loader() and base_of(loader().dataset)[0]


def count_use(times, place, parameter):
    times[place] += 1


def is_custom(loader):
    """Return whether the script gave the loader its own sampler of batches."""
    return type(loader.batch_sampler).__name__ not in ("BatchSampler", "NoneType")


def length_of(value):
    try:
        return len(value)
    except TypeError:
        return None
