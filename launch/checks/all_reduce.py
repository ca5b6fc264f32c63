"""How long an all_reduce takes, and which rank is missing if it does not end."""

import datetime
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.report import synchronize
from launch.checks import messages
from launch.checks.messages import PULSE

SIZES = (2**12, 2**16, 2**20, 2**24, 2**26)  # bytes of an all_reduce
LARGE = 2**29  # bytes, on GPUs: NVLink reaches its bandwidth only with large messages


def measure(pulse, store, rank, world_size, device):
    """Join the process group and time all_reduce.

    Returns:
        list of (bytes, seconds), the same on every rank.
    """
    pulse.at("connecting")
    is_gpu = device.type != "cpu"
    backend = dist.get_default_backend_for_device(device)
    options = {"timeout": datetime.timedelta(seconds=3 * messages.SILENCE)}
    if is_gpu:
        torch.accelerator.set_device_index(device.index)  # each thread has its own current device
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    if is_gpu:  # 06 uses gloo beside NCCL
        pulse.at("all_reduce by gloo")
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    times = []
    for size in (*SIZES, LARGE) if backend == "nccl" else SIZES:
        pulse.at(f"all_reduce of {text_of(size)}")
        tensor = torch.full([size // 4], rank + 1.0, device=device)
        seconds = time_all_reduce(tensor, 1)
        if not (tensor == world_size * (world_size + 1) / 2).all():
            raise RuntimeError(f"all_reduce of {text_of(size)} gave {tensor.unique().tolist()[:4]}")
        repeats = min(20, max(1, int(0.5 / seconds)))  # half a second in all
        repeats = from_rank_0(repeats, device)
        pulse.at(f"all_reduce of {text_of(size)}, {repeats} more")
        seconds = from_rank_0(time_all_reduce(tensor, repeats), device)
        times.append((size, seconds))
        if seconds > 0.5:  # the next size, of 16 times as many bytes, could take SILENCE
            break
    pulse.at("done")
    return times


def from_rank_0(number, device):
    """Return the number of rank 0 on every rank, so that all ranks decide alike."""
    tensor = torch.tensor(number, device=device)
    dist.broadcast(tensor, src=0)
    return tensor.item()


def time_all_reduce(tensor, repeats):
    """Return the seconds per all_reduce, of `repeats` that are all done on this device."""
    synchronize(tensor.device)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    synchronize(tensor.device)
    return (time.perf_counter() - start) / repeats


class Outcome(NamedTuple):
    """The outcome of measure(), and what each rank was doing at its end."""

    times: list | None  # what it returned
    error: Exception | None  # what it raised
    stages: dict  # {rank: its last stage}
    silent: list  # ranks without a sign of life


def watch(store, world_size, work):
    """Run work() of rank 0 in a thread, and watch that every rank lives and makes progress.

    Returns:
        Outcome.
    """
    times = []
    errors = []

    def run():
        try:
            times.append(work())
        except Exception as error:  # any error belongs in the report
            errors.append(error)

    stages = {}  # {rank: its last stage}
    beats = {}  # {rank: its last message}
    heard = {}  # {rank: when its last message came}
    progress = time.monotonic()  # when a rank last reached another stage

    def look():
        """Wait for the next pulse, and read the message of each rank."""
        nonlocal progress
        time.sleep(PULSE)
        for rank in range(world_size):
            message = store.get(f"pulse {rank}").decode()
            if message == beats.get(rank):
                continue
            beats[rank] = message
            heard[rank] = time.monotonic()
            stage = message.split(" ", 1)[1]
            if stage != stages.get(rank):
                stages[rank] = stage
                progress = time.monotonic()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() - progress < messages.SILENCE:
        look()
    end = time.monotonic()
    # Listen a while longer, to learn which ranks are silent.
    while not times and time.monotonic() - end < 8 * PULSE:
        look()
    silent = [] if times else [rank for rank, last in heard.items() if last < end]
    return Outcome(times[0] if times else None, errors[0] if errors else None, stages, silent)


def text_of(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def bandwidth(size, seconds, world_size):
    """Return the bus bandwidth in bytes per second.

    It is that of the slowest link, comparable for any number of ranks: in an all_reduce of n ranks,
    each sends 2 (n - 1) / n bytes per byte (nccl-tests, PERFORMANCE.md).
    """
    return size / seconds * 2 * (world_size - 1) / world_size
