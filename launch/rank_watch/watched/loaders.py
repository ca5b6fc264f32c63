"""The DataLoaders: which samples each rank reads to train, and in which order."""

import contextlib
import functools
import itertools
import math
import multiprocessing
import random
import sys
import weakref
import zlib
from collections import Counter
from types import NoneType

from rank_watch.compare import (
    COPY,
    DATA,
    RIGHT_IF_SHARED,
    equal,
    expected_samples,
    loaders_together,
    most_shared,
    ordinal,
    values_of,
)
from rank_watch.hooks import replace
from rank_watch.places import own_line
from rank_watch.watched.random_numbers import SOURCES

if torch := sys.modules.get("torch"):
    import torch.distributed as dist
    from rank_watch.hashes import hash_of, random_states
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, get_worker_info
    from torch.utils.data import dataloader as torch_loader
    from torch.utils.data._utils import fetch as torch_fetch
    from torch.utils.weak import WeakIdKeyDictionary


current = None  # the Loaders of this process, which the workers inherit


class Loaders:
    """Notes which samples the DataLoaders give."""

    def __init__(self, recorder):
        self.recorder = recorder
        # a loader: where it was made, and how many were used before
        self.loader_lines = WeakIdKeyDictionary()
        self.kinds = {}  # (samples of the base, line, samples) of a loader: its key
        self.keys = WeakIdKeyDictionary()  # a loader: its name in each process
        self.real_length = DataLoader.__len__
        self.loaders = WeakIdKeyDictionary()  # a loader: its number, from its first pass on
        self.iterators = WeakIdKeyDictionary()  # of a loader: the loader's number
        self.beginning = None  # the number of the loader whose iterator is made now
        self.data_sets = []  # of each loader: a function that returns it, or None if it is gone
        self.kept = []  # data sets that probe() reads
        self.worker_states = []  # (loader, shared array)
        self.shared = None  # with the workers that are started now: states, and which moved

    def make_loader(self, real, loader, *args, **kwargs):
        self.loader_lines[loader] = own_line(), len(self.data_sets)
        result = real(loader, *args, **kwargs)
        if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
            with contextlib.suppress(TypeError):  # a data set without a length
                self.keys[loader] = self.key_of(loader.dataset)
        return result

    def key_of(self, dataset):
        """Return a name of a loader, by which the script before it was converted knows it too."""
        base = dataset
        while isinstance(base, Subset):
            base = base.dataset
        kind = len(base), own_line(), len(dataset)
        count = sum(size == kind[0] for size, *_ in self.kinds)
        return self.kinds.setdefault(kind, f"{kind[0]} samples, loader {count + 1}")

    def begin_loader(self, real, loader):
        if get_worker_info() is not None:
            return real(loader)
        if loader not in self.loaders:
            self.add_loader(loader)
        number = self.beginning = self.loaders[loader]
        self.recorder.mark("before a loader")
        self.shared = multiprocessing.get_context("fork").RawArray("q", 2 * len(SOURCES))
        self.worker_states.append((number, self.shared))
        self.recorder.add("epoch", loader=number)
        try:
            iterator = real(loader)
            self.iterators[iterator] = number
            return iterator
        finally:
            self.beginning = self.shared = None
            self.recorder.mark("loader")

    def length(self, real, loader):
        return min(real(loader), self.recorder.epoch_steps or sys.maxsize)

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
                "batches": None if loader.batch_size else length_of(loader.batch_sampler),
                "sampler": type(loader.batch_sampler if is_custom(loader) else sampler).__name__,
                "replacement": bool(getattr(sampler, "replacement", False)),
                "shuffle": isinstance(sampler, RandomSampler) or shuffles,
                "seed": getattr(sampler, "seed", None),
                "replicas": getattr(sampler, "num_replicas", None),
                "drop_last": loader.drop_last or bool(getattr(sampler, "drop_last", False)),
                "batch_size": loader.batch_size,
            }
        line, older = self.loader_lines.get(loader, ("", 0))
        with contextlib.suppress(TypeError):  # of a stream
            values["length"] = self.length(self.real_length, loader)
        key = self.keys.get(loader)
        self.recorder.add("loader", line=line or own_line(), older=older, key=key, **values)

    def next_index(self, real, iterator):
        number = self.iterators.get(iterator, self.beginning)
        # An iterator with workers draws their seed, and asks for indices, while it is made.
        self.recorder.mark("loading" if self.shared is None else "loader")
        try:
            indices = real(iterator)
        except StopIteration:
            if number is not None:
                self.recorder.add("epoch ends", loader=number)
            raise
        self.recorder.mark("sampler")
        if number is not None:
            self.recorder.add("indices", loader=number, indices=numbers_in(indices))
        return indices

    def next_batch(self, real, iterator):
        enough = self.recorder.epoch_steps and iterator._num_yielded >= self.recorder.epoch_steps
        if enough and not is_at_its_end(iterator):
            self.recorder.add("epoch is cut", loader=self.iterators.get(iterator))
            raise StopIteration
        self.recorder.mark("outside")
        batch = real(iterator)
        self.recorder.mark("loading")
        self.recorder.add("batch", loader=self.iterators.get(iterator))
        return batch

    def map_style_data_sets(self):
        """Return the data sets that draw for one sample: another may draw the order for all."""
        data_sets = [data_set() for data_set in self.data_sets]
        return [of for of in data_sets if not isinstance(of, IterableDataset | NoneType)]

    def finish(self, why):
        """Send hashes of the data sets, and the random numbers of the workers."""
        if why != "failed":
            self.probe()
        for number, array in self.worker_states:
            if any(array):  # else its workers were those of the epoch before
                self.recorder.add("worker", loader=number, states=list(array))

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
            self.recorder.add("samples", loader=number, hashes=hashes[:3] if repeated else [])

    def destroy(self, real, *args, **kwargs):
        result = real(*args, **kwargs)
        if not dist.is_initialized():  # the training is over, and main() returns before finish()
            self.kept = [data_set() for data_set in self.data_sets]
        return result


def install(recorder):
    global current
    loaders = current = recorder.loaders = Loaders(recorder)
    recorder.at_end.append(loaders.finish)
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        replace(owner, "destroy_process_group", loaders.destroy)
    replace(DataLoader, "__init__", loaders.make_loader)
    replace(DataLoader, "__iter__", loaders.begin_loader)
    replace(DataLoader, "__len__", loaders.length)
    replace(torch_loader._BaseDataLoaderIter, "_next_index", loaders.next_index)
    replace(torch_loader._BaseDataLoaderIter, "__next__", loaders.next_batch)
    replace(torch_fetch._MapDatasetFetcher, "fetch", fetch_in_worker)
    replace(random, "seed", functools.partial(note_seed, "random"))
    if numpy := sys.modules.get("numpy"):
        replace(numpy.random, "seed", functools.partial(note_seed, "numpy"))


seeds = {}  # {source: the last seed}


def is_at_its_end(iterator):
    """Return whether an iterator of a DataLoader has no more batches, if its sampler knows."""
    with contextlib.suppress(TypeError):
        return iterator._num_yielded >= len(iterator._index_sampler)
    return False


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
    states = current.shared
    if worker is None or worker.id or states is None:
        return real(fetcher, indices)
    data_set, _ = base_of(fetcher.dataset)
    before, seeds_before = random_states(data_set), last_seeds()
    result = real(fetcher, indices)
    after, seeds_after = random_states(data_set), last_seeds()
    for k, source in enumerate(SOURCES):
        if source in before:
            start = before[source]
            if seeds_before.get(source) != seeds_after.get(source):
                start = seeds_after[source]
            states[2 * k] = states[2 * k] or start
            states[2 * k + 1] |= before[source] != after[source]
    return result


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


def is_custom(loader):
    """Return whether the script gave the loader its own sampler of batches."""
    return type(loader.batch_sampler).__name__ not in ("BatchSampler", "NoneType")


def length_of(value):
    try:
        return len(value)
    except TypeError:
        return None


def judge(runs, judgment):
    if not any(run.tensor_parallel for run in runs):
        check_training_data(runs, judgment)


WHY_SET_EPOCH = f"{DATA}#why-set_epoch"

USE_SAMPLER = f"Give the loader sampler=DistributedSampler(dataset) ({DATA}#who-gets-which-image)"


def check_training_data(runs, judgment):
    """Compare which samples each rank read to train."""
    for loaders in loaders_together(runs):
        if not all(loader.trains() for loader in loaders):
            continue
        line = loaders[0].line
        if not all(loader.known for loader in loaders):
            judgment.notes.append(
                f"the samples of the loader at {line} have no numbers (an IterableDataset, or "
                "indices of another kind), so only whole batches are compared"
            )
            continue
        if not check_data_sets(runs, loaders, judgment):
            continue
        problems = [
            check(runs, loaders)
            for check in (find_shared_samples, find_repeated_samples, find_missing_samples)
        ]
        problems = [problem for problem in problems if problem]
        judgment.found.extend(problems[:1])  # the others are its consequences
        if not problems:
            count = sum(len(epoch.indices) for loader in loaders for epoch in loader.epochs)
            judgment.compared.append(f"different data ({count:,} samples at {line})")
        check_order(runs, loaders, judgment)


def check_data_sets(runs, loaders, judgment):
    """Say whether the ranks read from one data set, or have divided it: so that they compare."""
    line = loaders[0].line
    divided = any(one.sampler == "DistributedSampler" and one.replicas != 1 for one in loaders)
    if not equal([loader.size for loader in loaders]) and divided:
        sizes = values_of(runs, [f"{loader.size:,} samples" for loader in loaders])
        judgment.found.append(
            f"the ranks have different data sets at {line} ({sizes}), and a DistributedSampler "
            "divides them by index: some samples are read by several ranks, others by none. A "
            "split by hash() of a string, by the order of a set, or without a seed differs "
            f"between processes: decide it by a fixed seed ({DATA})"
        )
        return False
    if not equal([loader.base for loader in loaders]):
        sizes = values_of(runs, [f"{loader.base[1]} samples" for loader in loaders])
        judgment.notes.append(f"the ranks have different data sets at {line}: {sizes}")
        return False
    hashes = [loader.samples for loader in loaders]
    if all(hashes) and not equal(hashes):
        text = f"the data sets of the ranks at {line} have other samples at the same index"
        if divided:
            judgment.found.append(
                f"{text}, and a DistributedSampler divides them by index: some samples are read by "
                "several ranks, others by none. Build the data set with the same seed and the same "
                "order of files on all ranks; if each rank has its own share already, give the "
                f"sampler num_replicas=1, rank=0 ({DATA})"
            )
        else:
            judgment.notes.append(
                f"{text}: right if each rank has its own share of the data, wrong if a split or a "
                "list of files differs by chance"
            )
        return False
    subsets = [loader.subset and set(loader.subset) for loader in loaders]
    if all(subsets) and not equal(subsets) and (shared := most_shared(subsets)):
        judgment.found.append(
            f"each rank has another Subset of the data at {line}: {len(subsets[0]):,} samples on "
            f"rank {runs[0].rank}, of which {shared:,} are on another rank too. A random split "
            "without a seed: one rank trains on samples that another rank holds back. Give "
            f"random_split() a generator with a fixed seed ({DATA})"
        )
        return False
    return True


def find_shared_samples(runs, loaders):
    """Return a sentence if two ranks read the same samples in one epoch, or None."""
    loader = loaders[0]
    world_size = len(runs)
    where = f"({loader.sampler} at {loader.line})"
    use_sampler = USE_SAMPLER if runs[0].models else f"{USE_SAMPLER}. {RIGHT_IF_SHARED}"
    whole = all(reads_all(one) for one in loaders)
    if loader.subset is not None and not most_shared([set(one.subset) for one in loaders]):
        return None  # a share that was taken by hand
    if draws_with_replacement(loaders):
        if whole and loader.share == loader.size:  # more is a length of the script's own choice
            return (
                f"each of the {world_size} ranks draws {loader.share:,} samples per epoch from a "
                f"data set of {loader.size:,} {where}: {world_size} epochs in one. Give it "
                f"num_samples // {world_size}, and another seed on each rank ({COPY})"
            )
        if equal([one.epochs[0].indices for one in loaders]):
            return (
                f"all ranks draw the same samples {where}: seed each rank differently, after the "
                f"model is made ({COPY})"
            )
        return None
    for epoch in range(min(len(one.epochs) for one in loaders)):
        sets = [set(one.indices(epoch)) for one in loaders]
        shared = most_shared(sets)
        if shared < world_size:  # a DistributedSampler repeats up to world_size - 1 samples
            continue
        example = next(a & b for a, b in itertools.combinations(sets, 2) if a & b)
        seeds = [one.seed for one in loaders]
        remedy = remedy_of(loader, use_sampler)
        if not equal([str(seed) for seed in seeds]):
            remedy = (
                f"The seed of the {loader.sampler} differs: {values_of(runs, seeds)}. It must be "
                f"the same on all ranks ({DATA})"
            )
        elif loader.sampler == "DistributedSampler" and loader.replicas != world_size:
            remedy = (
                f"It was made for num_replicas={loader.replicas}: leave out num_replicas and rank "
                f"({COPY})"
            )
        elif loader.sampler == "DistributedSampler":
            remedy = f"Do all ranks call set_epoch() with the same number? ({WHY_SET_EPOCH})"
        return (
            f"two ranks read the same samples: {shared:,} of {len(sets[0]):,} samples of epoch "
            f"{epoch + 1} {where}, such as sample {min(example)}. {remedy}"
        )
    if whole and not loader.replicas:
        return (
            f"each of the {world_size} ranks reads the whole data set ({loader.size:,} samples per "
            f"epoch, {loader.sampler} at {loader.line}): {world_size} epochs in one. "
            f"{remedy_of(loader, use_sampler)}"
        )
    return None


def remedy_of(loader, use_sampler):
    if loader.sampler in ("RandomSampler", "SequentialSampler"):
        return use_sampler
    return (
        f"Let {loader.sampler} draw one order on all ranks, give rank r every world_size-th batch "
        f"or sample of it from r on, and return that length ({DATA}#who-gets-which-image)"
    )


def reads_all(loader):
    """Return whether an epoch of this rank is as long as the data set."""
    share = loader.share
    if loader.batches and loader.epochs[0].batches:
        share = loader.batches * max(map(len, loader.epochs[0].batches))
    return share is not None and share >= (loader.size or math.inf)


def draws_with_replacement(loaders):
    """Return whether the sampler of these loaders gives a sample several times on purpose."""
    loader = loaders[0]
    if loader.sampler in ("RandomSampler", "SequentialSampler", "DistributedSampler"):
        return loader.replacement
    epochs = [epoch for one in loaders for epoch in one.epochs]
    repeats = any(len(set(epoch.indices)) < len(epoch.indices) for epoch in epochs)
    return loader.replacement or repeats


def find_repeated_samples(runs, loaders):
    """Return a sentence if a rank reads a sample twice in one epoch, or None."""
    if draws_with_replacement(loaders):
        return None
    for run, loader in zip(runs, loaders, strict=True):
        for number, epoch in enumerate(loader.epochs):
            repeated = {k: n for k, n in Counter(epoch.indices).items() if n > 1}
            if len(repeated) >= len(runs):
                return (
                    f"rank {run.rank} reads {len(repeated):,} samples more than once in epoch "
                    f"{number + 1} ({loader.sampler} at {loader.line}), such as sample "
                    f"{min(repeated)}: right only if the sampler should draw with replacement"
                )
    return None


def find_missing_samples(runs, loaders):
    """Return a sentence if no rank reads some samples of a whole epoch, or None."""
    loader = loaders[0]
    if loader.size is None or draws_with_replacement(loaders):
        return None
    if not all(one.epochs[0].ended for one in loaders):
        return None
    read = set().union(*(one.indices(0) for one in loaders))
    if loader.subset is None:
        missing = loader.size - len(read)
    else:
        missing = len(expected_samples(loaders) - read)
    dropped = sum(one.batch_size or 0 for one in loaders) if loader.drop_last else 0
    if missing <= dropped + len(runs):
        return None
    known = ("RandomSampler", "SequentialSampler", "DistributedSampler", "range")
    other = "" if loader.sampler in known else " Right if it leaves them out on purpose."
    return (
        f"no rank reads {missing:,} of {loader.size:,} samples in epoch 1 ({loader.sampler} at "
        f"{loader.line}): each of {len(runs)} ranks should read one {ordinal(len(runs))}. Does the "
        f"sampler know another number of ranks?{other} ({DATA}#who-gets-which-image)"
    )


def check_order(runs, loaders, judgment):
    """Compare the order of the samples in two epochs."""
    for loader in loaders:
        for epoch, (one, next_one) in enumerate(itertools.pairwise(loader.epochs)):
            count = min(len(one.indices), len(next_one.indices))
            same = one.indices[:count] == next_one.indices[:count]
            if not loader.shuffle or count < 4 or not same:
                continue
            remedy = "Call sampler.set_epoch(epoch) before each epoch"
            if loader.sampler != "DistributedSampler":
                remedy = "Its generator starts anew in each epoch"
            judgment.found.append(
                f"epochs {epoch + 1} and {epoch + 2} have the same order of samples "
                f"({loader.sampler} at {loader.line}). {remedy} ({WHY_SET_EPOCH})"
            )
            return
    if max(len(loader.epochs) for loader in loaders) < 2 and loaders[0].shuffle:
        judgment.notes.append(
            f"only one epoch of the loader at {loaders[0].line} was seen, so not whether the next "
            "one has another order: --epoch-steps 5"
        )
