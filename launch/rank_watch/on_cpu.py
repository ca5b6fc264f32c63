"""Run a script that asks for GPUs on the CPU: its devices, nccl, streams and mixed precision.

A torch.device("cuda") of the script stays one, so that the script takes the branches of a GPU. It
becomes the CPU where the script hands it to PyTorch. torch.compile() returns the model as it is:
on a CPU, to compile takes longer than the steps that are watched.
"""

import contextlib
import functools
import inspect
import os
import re
import time
import traceback
import types
from collections import defaultdict

import torch
import torch.distributed as dist
from rank_watch.hooks import replace
from rank_watch.places import is_own, one_line, own_line_of_error
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data import DataLoader

VARIABLE = "RANK_WATCH_ON_CPU"  # tells it to the processes that mp.spawn starts
# What launchers say of the processes on this machine
LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")

GPU_ERROR = re.compile(r"CUDA|NCCL|NVIDIA|device_ids|\bGPUs?\b", re.IGNORECASE)
GPU_PACKAGES = "triton|flash_attn|apex|bitsandbytes|transformer_engine|xformers|mamba_ssm"
NO_KERNEL = re.compile(
    rf"\b({GPU_PACKAGES})\b|FlashAttention|the 'CPU' backend|Backend gloo|ProcessGroupGloo"
)

# What functions of torch.cuda and torch.accelerator return
ANSWERS = {
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "current_accelerator": torch.device("cuda"),
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),
    "get_device_properties": types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=2**34, multi_processor_count=1
    ),
    "mem_get_info": (2**34, 2**34),
    "get_memory_info": (2**34, 2**34),
    "memory_stats": defaultdict(int),
    "memory_summary": "",
}
ZERO = re.compile("(max_)?memory_(allocated|reserved|cached|usage)|utilization|temperature")
NOTHING = re.compile(
    "init|synchronize|empty_cache|ipc_collect|reset_.*|set_stream|set_per_process.*"
)

chosen_gpu = 0


def install():
    """Let PyTorch use the CPU wherever the script asks for a GPU."""
    os.environ[VARIABLE] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile()
    replace_devices()
    replace_cuda()
    replace_mixed_precision()
    replace_distributed()


def explain(error, tool, command):
    """Return the line that says where a script asks for a GPU, or None: its error is another.

    `command` starts the tool, for a flag --cpu after it.
    """
    text = one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line for frame in frames if is_own(frame.filename)][-1:]
    searched = " ".join([text, *own] if isinstance(error, AssertionError) else [text])
    asks = GPU_ERROR.search(searched)
    where = own_line_of_error(error) or "the script"
    if isinstance(error, FileNotFoundError):  # its path may have such a name
        return None
    if VARIABLE in os.environ:
        inside = any(re.search(rf"/({GPU_PACKAGES})/", frame.filename) for frame in frames)
        if asks or inside or NO_KERNEL.search(text):
            return f"{tool}: --cpu cannot replace what {where} asks of a GPU: {text}"
    elif asks and not torch.cuda.is_available():
        return (
            f"{tool}: {where} asks for a GPU, and PyTorch sees none ({text}): expected the flag "
            f"--cpu, as in {command} --cpu train.py (docs/check-ranks.md)"
        )
    return None


# Devices


def replace_devices():
    factories = {function.__name__ for function in _device_constructors()} | {"normal"}
    for name in dir(torch):
        if name in factories or name.endswith("_like"):
            replace(torch, name, with_cpu)
    for name in dir(torch.Tensor):
        if name.startswith("new_"):
            replace(torch.Tensor, name, with_cpu)
    replace(torch.Tensor, "to", move)
    replace(torch.Tensor, "cpu", lambda real, tensor, *args, **kwargs: tensor.to("cpu"))
    replace(torch.Tensor, "cuda", lambda real, tensor, *args, **kwargs: tensor.clone())
    replace(torch.Tensor, "pin_memory", lambda real, tensor, *args: tensor)
    replace(torch.Tensor, "record_stream", lambda *args: None)
    replace(torch.Tensor, "type", with_cpu)
    replace(nn.Module, "to", move_module)
    replace(DeviceContext, "__init__", with_cpu)  # of set_default_device() and "with device:"
    replace(torch, "set_default_tensor_type", with_cpu)
    replace(torch, "load", load)
    replace(DataLoader, "__init__", make_loader)
    torch.Generator = Generator


def on_cpu(value):
    """Return the CPU for a GPU, the CPU's type for a type of tensors, and other values as they are.

    No other argument of the functions replaced here can be a string with these beginnings.
    """
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return value.replace(".cuda", "")
    return value


def with_cpu(real, *args, **kwargs):
    kwargs = {name: on_cpu(value) for name, value in kwargs.items()}
    if isinstance(kwargs.get("device"), int):  # the number of a GPU
        kwargs["device"] = "cpu"
    return real(*map(on_cpu, args), **kwargs)


def move_module(real, target, *args, **kwargs):
    """Call target.to(): its first argument may be the number of a GPU."""
    if args and isinstance(args[0], int):
        args = ["cpu", *args[1:]]
    return with_cpu(real, target, *args, **kwargs)


def move(real, tensor, *args, **kwargs):
    """Return a copy, as between a GPU and the CPU: the script may change one of the two later."""
    result = move_module(real, tensor, *args, **kwargs)
    devices = [*args[:1], kwargs.get("device")]
    moves = any(isinstance(device, int | str | torch.device) for device in devices)
    return tensor.clone() if result is tensor and moves else result


def load(real, file, map_location=None, *args, **kwargs):
    return real(file, "meta" if str(map_location) == "meta" else "cpu", *args, **kwargs)


def make_loader(real, loader, *args, **kwargs):
    real(loader, *args, **kwargs)
    loader.pin_memory = False


class AnyGenerator(type(torch._C.Generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=AnyGenerator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


# torch.cuda and torch.accelerator


def replace_cuda():
    calls = {name: functools.partial(answer, value) for name, value in ANSWERS.items()}
    calls |= {"device_count": local_world_size, "set_device": set_device}
    calls |= {"current_device": current_device, "manual_seed": seed, "manual_seed_all": seed}
    calls |= {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    for name in ("Stream", "ExternalStream", "Event", "current_stream", "default_stream"):
        calls[name] = Stream
    for name in ("stream", "StreamContext", "device", "device_of", "device_index"):
        calls[name] = no_context
    # of torch.accelerator, with their old names
    for name in ("index", "idx"):
        calls |= {f"set_device_{name}": set_device, f"current_device_{name}": current_device}
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator):
        for name in dir(owner):
            if name in calls:
                setattr(owner, name, calls[name])
            elif ZERO.fullmatch(name):
                setattr(owner, name, functools.partial(answer, 0))
            elif NOTHING.fullmatch(name):
                setattr(owner, name, functools.partial(answer, None))
            elif name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
                setattr(owner, name, getattr(torch, name))
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, name, functools.partial(answer, None))


def answer(value, *args, **kwargs):
    return value


def no_context(*args, **kwargs):
    return contextlib.nullcontext()


def local_world_size():
    """Return the number of processes on this machine, each of which takes one GPU."""
    known = [os.environ[name] for name in LOCAL_WORLD_SIZES if os.environ.get(name)]
    return int(re.match(r"\d+", known[0]).group()) if known else 2


def set_device(gpu):
    global chosen_gpu
    gpu = torch.device(gpu).index if isinstance(gpu, str | torch.device) else gpu
    chosen_gpu = gpu or 0


def current_device():
    return chosen_gpu


def seed(value):
    torch.default_generator.manual_seed(value)


def get_rng_state(gpu=None):
    return torch.get_rng_state()


def set_rng_state(state, gpu=None):
    torch.set_rng_state(state)


class Stream:
    """A stream, or an event: on the CPU, each call has ended when it returns."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        self.time = time.perf_counter()

    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)

    def record_event(self, event=None):
        event = event or Stream()
        event.record()
        return event

    def query(self):
        return True

    def is_capturing(self):
        return False

    def wait(self, other=None):
        pass

    synchronize = wait_stream = wait_event = wait

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


# Mixed precision and attention


def replace_mixed_precision():
    replace(torch.autocast, "__init__", autocast)
    replace(torch.amp.GradScaler, "__init__", disable_scaler)
    replace(nn.attention, "sdpa_kernel", no_context)


def autocast(real, context, device_type, dtype=None, **kwargs):
    """Make an autocast of the CPU, with bfloat16, which needs no GradScaler."""
    if device_type == "cuda":
        device_type = "cpu"
        dtype = torch.bfloat16 if dtype in (None, torch.float16) else dtype
    real(context, device_type, dtype=dtype, **kwargs)


def disable_scaler(real, scaler, *args, **kwargs):
    real(scaler, *args, **kwargs)
    scaler._enabled = False


# Processes


def replace_distributed():
    sums = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
    functions = dict.fromkeys(("init_process_group", "new_group"), make_group)
    functions |= dict.fromkeys(sums, average)
    functions |= {"init_device_mesh": with_cpu, "barrier": barrier}
    # init_device_mesh() has names of its own for functions
    for owner in (dist, dist.distributed_c10d, dist.device_mesh):
        for name in functions.keys() & set(dir(owner)):
            replace(owner, name, functions[name])
    replace(DeviceMesh, "__init__", with_cpu)
    replace(DistributedDataParallel, "__init__", wrap)
    replace(nn.SyncBatchNorm, "forward", sync_batch_norm)
    replace(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None)


def make_group(real, *args, **kwargs):
    """Make a process group of gloo."""
    values = inspect.signature(real).bind(*args, **kwargs).arguments
    values |= {"device_id": None, "pg_options": None}
    if "nccl" in (values.get("backend") or "nccl"):
        values["backend"] = "gloo"
    return real(**values)


def barrier(real, group=None, async_op=False, device_ids=None):
    return real(group, async_op)


def average(real, *args, **kwargs):
    """Call a collective. gloo cannot average: it sums up what is divided before."""
    values = inspect.signature(real).bind(*args, **kwargs).arguments
    if values.get("op") == dist.ReduceOp.AVG:
        values["op"] = dist.ReduceOp.SUM
        count = dist.get_world_size(values.get("group"))
        with torch.no_grad():
            if "tensor" in values:
                values["tensor"].div_(count)
            elif "input" in values:
                values["input"] = values["input"] / count
            else:
                values["input_list"] = [tensor / count for tensor in values["input_list"]]
    return real(**values)


def wrap(real, ddp, module, device_ids=None, output_device=None, *args, **kwargs):
    real(ddp, module, None, None, *args, **kwargs)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient, ctx.group), None


def sync_batch_norm(real, norm, x):
    """Return what SyncBatchNorm returns: torch's own takes only tensors of GPUs."""
    group = norm.process_group or dist.group.WORLD
    if not norm.training or not dist.is_initialized():
        return real(norm, x)
    dims = [d for d in range(x.dim()) if d != 1]  # all but the channels
    shape = [1, -1] + [1] * (x.dim() - 2)
    values = x.float()
    counts = values.new_tensor([x.numel() / x.size(1)])
    sums = SumOverRanks.apply(torch.cat([values.sum(dims), counts]), group)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    values = values - mean.view(shape)
    variance = SumOverRanks.apply(values.square().sum(dims), group) / count
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(variance * count / (count - 1), share)
    result = values * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        result = result * norm.weight.view(shape) + norm.bias.view(shape)
    return result.to(x.dtype)
