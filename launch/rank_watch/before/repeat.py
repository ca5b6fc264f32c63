"""Repeat in one process what the ranks have recorded."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from rank_watch.before.record import Record, named_tensors, plain
from rank_watch.hooks import replace
from rank_watch.watched.loaders import base_of
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torch_loader
from torch.utils.weak import WeakIdKeyDictionary


class Repetition(Record):
    """Repeats in one process what the ranks have recorded."""

    def __init__(self, recorder, options):
        super().__init__(recorder, options)
        self.plan = json.loads((Path(options["folder"]) / "plan.json").read_text())
        self.unused = [Path(path) for path in self.plan["weights"]]  # files of first weights
        self.passes = Counter()  # key: passes over its loaders
        self.iterators = WeakIdKeyDictionary()  # of a loader: the batches that it gives
        self.beginning = None  # the batches of the iterator that is made now
        self.own = []  # settings of each group, in a step that is made with those of the ranks

    def install(self):
        path = Path(self.options["folder"]) / "events.jsonl"
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.recorder.connection = SimpleNamespace(sendall=file.write)
        self.recorder.rank, self.recorder.world_size = 0, 1
        super().install()
        replace(DataLoader, "__init__", self.make_loader)
        replace(DataLoader, "__iter__", self.begin_loader)
        replace(torch_loader._BaseDataLoaderIter, "_next_index", self.next_index)
        replace(torch_loader._BaseDataLoaderIter, "__next__", self.next_batch)

    def begin_with(self, model):
        """Load the first weights of the ranks, by name or by order; return whether they fit."""
        mine = {plain(name): local(tensor) for name, tensor in named_tensors(model)}
        for path in self.unused:
            saved = torch.load(path, map_location="cpu")
            if saved.keys() != mine.keys():
                if [one.shape for one in saved.values()] != [one.shape for one in mine.values()]:
                    continue
                mine = dict(zip(saved, mine.values(), strict=True))
                self.names.update(zip(model.parameters(), saved, strict=False))
            if all(saved[name].shape == tensor.shape for name, tensor in mine.items()):
                self.unused.remove(path)
                with torch.no_grad():
                    for name, tensor in mine.items():
                        tensor.copy_(saved[name])
                return True
        return False

    def before_step(self, optimizer, args, kwargs):
        super().before_step(optimizer, args, kwargs)
        planned = self.plan["settings"][self.recorder.all_steps : self.recorder.all_steps + 1]
        groups = optimizer.param_groups
        if self.stepping == 1 and planned and len(planned[0]) == len(groups):
            for group, settings in zip(groups, planned[0], strict=True):
                known = {name: settings[name] for name in settings if name in group}
                self.own.append({name: group[name] for name in known})
                if isinstance(group["lr"], float):
                    group.update(known)

    def after_step(self, optimizer, args, kwargs):
        super().after_step(optimizer, args, kwargs)
        for group, settings in zip(optimizer.param_groups, self.own, strict=False):
            group.update(settings)  # from which its scheduler goes on
        self.own = []

    def make_loader(self, real, loader, dataset, *args, **kwargs):
        """Let a stream give as many samples at once as the ranks read together."""
        if self.options["same"] and isinstance(dataset, IterableDataset):
            if args and args[0]:
                args = (args[0] * self.plan["world_size"], *args[1:])
            elif not args and kwargs.get("batch_size", 1):
                kwargs["batch_size"] = kwargs.get("batch_size", 1) * self.plan["world_size"]
        return real(loader, dataset, *args, **kwargs)

    def begin_loader(self, real, loader):
        key = self.recorder.loaders.keys.get(loader)
        planned = self.plan["loaders"].get(key)
        if planned is None:
            return real(loader)
        number = self.passes[key]
        self.passes[key] += 1
        if number >= len(planned["epochs"]):
            self.end("begins another epoch")
        batches, ended = planned["epochs"][number]
        _, subset = base_of(loader.dataset)
        place = {sample: k for k, sample in enumerate(subset or ())}
        batches = [[place.get(one, one) for one in map(as_index, batch)] for batch in batches]
        self.beginning = Batches(batches, ended)
        try:
            iterator = real(loader)
            self.iterators[iterator] = self.beginning
            return iterator
        finally:
            self.beginning = None

    def length(self, real, loader):
        length = super().length(real, loader)
        planned = self.plan["loaders"].get(self.recorder.loaders.keys.get(loader))
        return planned["length"] if planned else length

    def next_index(self, real, iterator):
        batches = self.beginning or self.iterators.get(iterator)
        if batches is None:
            return real(iterator)
        return next(batches.left)

    def next_batch(self, real, iterator):
        if iterator not in self.iterators:
            return real(iterator)
        cut = self.recorder.epoch_steps
        self.recorder.epoch_steps = 0  # the record has as many batches as the ranks have read
        try:
            return real(iterator)
        except StopIteration:
            if not self.iterators[iterator].ended:
                self.end("reads on")
            raise
        finally:
            self.recorder.epoch_steps = cut

    def end(self, why):
        """End this process: the ranks have read no more."""
        from rank_watch.recorder import exit_process, flush_files  # which imports this file

        self.recorder.finish(why)
        flush_files()
        exit_process(0)


class Batches:
    """The batches of one pass over a loader, as lists of indices."""

    def __init__(self, batches, ended):
        self.left = iter(batches)
        self.ended = ended  # the ranks have read the whole pass


def local(tensor):
    """Return what this process has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_index(numbers):
    """Return the index of a sample, which is recorded as a list of numbers."""
    return numbers[0] if len(numbers) == 1 else tuple(numbers)
