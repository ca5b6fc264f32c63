"""The way of 06's images to the device, ahead of the step that needs them.

Loader workers decode, crop and mirror images as bytes. The device converts them to numbers.
"""

import contextlib
import multiprocessing
import signal
import sys
from multiprocessing import util

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from common.data import START_METHOD
from common.errors import UserError
from common.images import MEAN, STD
from common.machine import cores_per_process
from imagenet import signals
from imagenet.datasets import DummyImages

MAX_DAMAGED = 0.01  # the share of images that may be unreadable


def build_loader(dataset, sampler, workers, device, local_world_size=1):
    """Build the ordinary DataLoader, for batches of uint8 images.

    Args:
        dataset: Images or DummyImages.
        sampler: GlobalBatchSampler.
        workers: int, or None for this process's share of the cores, less two beside a GPU (for
            DummyImages, none).
        device: torch.device of the model.
        local_world_size: int, the processes on this machine, which share its cores.
    """
    has_gpu = device.type != "cpu"
    if workers is None:
        cores = cores_per_process(local_world_size)
        if has_gpu:  # for this process itself: its main thread, autograd, pinned memory and NCCL
            cores = max(1, cores - 2)
        workers = 0 if isinstance(dataset, DummyImages) else cores
    # When Python exits it sends SIGTERM to the workers, which ignore it, and waits for them.
    util.Finalize(None, _kill_workers, exitpriority=100)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context=START_METHOD if workers else None,
        persistent_workers=workers > 0,
        pin_memory=has_gpu,
        collate_fn=tuple,  # __getitems__ has made a batch already
        worker_init_fn=_ignore_signals,
    )


def build_normalize(channels_last, device):
    """Return the function that makes images on the device the input of a model.

    It turns uint8 (N, 3, H, W) into float32 with a mean of about 0 and a deviation of about 1.
    """
    mean = torch.tensor(MEAN, device=device)[:, None, None]
    std = torch.tensor(STD, device=device)[:, None, None]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def normalize(images):
        return (images.contiguous(memory_format=memory_format) / std).sub_(mean / std)

    return normalize


class DeviceLoader:
    """Batches on the device: (images uint8, targets).

    On a GPU, each is copied while the step before it computes.

    Args:
        dataset, sampler, workers: see build_loader.
        d: Distributed.
        group: a gloo process group of all ranks.
    """

    def __init__(self, dataset, sampler, workers, d, group):
        self.loader = build_loader(dataset, sampler, workers, d.device, d.local_world_size)
        self.device = d.device
        self.stream = torch.Stream(d.device) if d.device.type != "cpu" else None
        self.damaged = DamagedImages(dataset, group)

    def __len__(self):
        return len(self.loader)

    def report_damaged(self):
        """Name the damaged images that any rank has found. Every rank must call it."""
        self.damaged.sync()

    def __iter__(self):
        batches = self._load()
        return batches if self.stream is None else self._copy_ahead(batches)

    def _load(self):
        """Yield (images, targets) on the CPU."""
        for images, targets, damaged in self.loader:
            self.damaged.add(damaged)
            yield images, targets

    def _copy_ahead(self, batches):
        """Yield batches on the device, each of which was copied on a stream of its own."""
        ready = None  # the batch before, which is on the device
        for batch in batches:
            with self.stream:
                copied = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            if ready is not None:
                yield ready
            current = torch.accelerator.current_stream()
            current.wait_stream(self.stream)
            for tensor in copied:  # its memory is not reused while a step reads it
                tensor.record_stream(current)
            ready = copied
        if ready is not None:
            yield ready


class DamagedImages:
    """The damaged images of a dataset. Rank 0 names each of them once; too many are an error.

    Args:
        dataset: Images.
        group: a gloo process group of all ranks.
    """

    def __init__(self, dataset, group):
        self.dataset = dataset
        self.group = group
        self.known = set()  # indices that all ranks know of
        self.new = set()  # indices that this rank has found since

    def add(self, indices):
        """Note what this rank found."""
        self.new |= set(indices.tolist())

    def sync(self):
        """Exchange what the ranks found. Every rank must call it.

        Raises:
            UserError: more than 1 % of the images are damaged.
        """
        per_rank = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(per_rank, self.new, group=self.group)
        new = set().union(*per_rank) - self.known
        self.known |= new
        self.new = set()
        if dist.get_rank(self.group) == 0:
            for index in sorted(new):
                print(
                    f"damaged, left out: {self.dataset.paths[index]}", file=sys.stderr, flush=True
                )
        if len(self.known) > MAX_DAMAGED * len(self.dataset):
            raise UserError(
                f"{len(self.known)} of {len(self.dataset)} images are damaged, for example "
                f"{self.dataset.paths[min(self.known)]}: expected at most {MAX_DAMAGED:.0%}; "
                "delete or replace them"
            )


def _ignore_signals(worker):
    """Leave signals to the main process, which needs its workers until it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.ignore()
    # If the main process is killed, a worker with a batch to deliver would wait for ever.
    signals.exit_when_parent_dies()
    show = sys.excepthook

    def show_unless_disconnected(kind, *rest):
        # After Ctrl-C the main process closes the connection while a worker delivers a batch.
        if not issubclass(kind, ConnectionError):
            show(kind, *rest)

    sys.excepthook = show_unless_disconnected


def _kill_workers():
    # Otherwise the DataLoader reports the workers as lost.
    with contextlib.suppress(
        AttributeError, ValueError
    ):  # Windows has no SIGCHLD, nor may a thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
