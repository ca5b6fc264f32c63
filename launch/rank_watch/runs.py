"""What one rank did, in the order of the training: read from the events of its recorder."""

from collections import Counter, defaultdict
from typing import Any, NamedTuple


class Forward(NamedTuple):
    """A forward pass of a model that trains, or of one that is evaluated."""

    step: int  # training steps before it
    training: bool  # and with gradients: a script may evaluate without .eval()
    mode: bool  # the model is in training mode, also inside of its DistributedDataParallel
    model: str
    ddp: int | None  # the number of the DistributedDataParallel that was called
    inside: int | None  # of the one whose model was called, past it
    sync: bool  # its gradients are averaged
    inputs: Any  # a hash for each sample, or None
    tensors: Any  # [type and shape, hash, number of different samples] of each input
    statistics: Any  # of batch norm, when an evaluation begins, or None: DDP broadcasts them
    weights: Any  # of the model, when an evaluation begins
    line: str


class Loader:
    """A DataLoader that the script iterated over."""

    def __init__(self, values):
        self.line = values["line"]
        self.older = values["older"]  # loaders that were in use before it was made
        self.key = values["key"]  # its name in each process, or None: its samples have no numbers
        self.length = values.get("length")  # batches of a pass
        self.iterable = values["iterable"]
        self.known = False  # each sample has a number, an index of the data set
        self.size = values.get("size")  # of its data set
        self.base = values.get("base")  # the data set inside of Subsets: [type, length]
        self.subset = values.get("subset")  # indices of the base, in order, or None
        self.share = values.get("share")  # samples per epoch on this rank, or None: unknown
        self.batches = values.get("batches")  # per epoch, if the script makes them itself
        self.sampler = values.get("sampler", "")
        self.replacement = values.get("replacement", False)
        self.shuffle = values.get("shuffle")
        self.seed = values.get("seed")
        self.replicas = values.get("replicas")  # ranks that its sampler knows, or None
        self.drop_last = values.get("drop_last", False)
        self.batch_size = values.get("batch_size")
        self.samples = None  # hashes of three samples of the base
        self.worker_states = None
        self.epochs = []

    def place(self):
        """Return what loaders that the script makes anew for each pass have in common."""
        return self.line, self.size

    def trains(self):
        return any(epoch.trains() for epoch in self.epochs)

    def evaluates(self):
        return not self.trains() and any(epoch.evaluates() for epoch in self.epochs)

    def settle(self):
        """Keep the epochs for which the loader is used, and make one whole number of each index.

        A sampler may give (epoch, index) for each sample: the number that differs most within an
        epoch counts.
        """
        if self.trains():
            self.epochs = [epoch for epoch in self.epochs if epoch.trains()]
        elif self.evaluates():
            self.epochs = [epoch for epoch in self.epochs if epoch.evaluates()]
        batches = [batch for epoch in self.epochs for batch in epoch.batches]
        self.known = not self.iterable and all(batch is not None for batch in batches)
        if not self.known:
            return
        different = Counter()  # place in an index: numbers that differ within an epoch
        for epoch in self.epochs:
            samples = [sample for batch in epoch.batches for sample in batch]
            for place, column in enumerate(zip(*samples, strict=False)):
                if self.size is None or max(column) < self.size:
                    different[place] += len(set(column))
        place = max(different, key=lambda place: (different[place], place), default=0)
        for epoch in self.epochs:
            epoch.indices = [sample[place] for batch in epoch.batches for sample in batch]

    def indices(self, epoch):
        """Return the indices of the base data set that were read in an epoch, in order."""
        read = self.epochs[epoch].indices
        if self.subset is None:
            return read
        return [self.subset[k] for k in read]


class Epoch:
    """One pass over a loader."""

    def __init__(self, begins, subset):
        self.begins = begins  # training steps before it
        self.subset = subset  # of its loader
        self.batches = []  # lists of indices, as the sampler gave them, or None: unknown
        self.indices = []  # a whole number for each sample
        self.ended = False  # it was not cut, and the run did not end in it
        self.cut = False  # by --epoch-steps
        self.uses = []  # a set for each batch: of each forward pass after it, whether it trains

    def trains(self):
        """Return whether its batches train.

        One alone may be an example to look at, or the last of an evaluation, before a batch that
        was read ahead.
        """
        trained = sum(True in use for use in self.uses)
        is_whole = self.ended and len(self.uses) == len(self.batches)
        return trained > self.uses.count({False}) and (trained > 1 or is_whole)

    def evaluates(self):
        return {False} in self.uses and not self.trains()


class Run:
    """What a rank did."""

    def __init__(self, rank, events):
        self.rank = rank
        self.host = None
        self.models = []  # what DistributedDataParallel holds
        self.optimizers = {}  # the newest description of each
        self.steps = []
        self.forwards = []
        self.micro_steps = []  # (step, forward passes, loaded batches) of each backward pass
        self.loaders = []
        self.passes_over = defaultdict(list)  # the key of a loader: its epochs
        self.draws = {}  # (step, span, source): state
        self.follows = []
        self.scales = []
        self.writes = []
        self.calls = []
        self.joins = False  # DistributedDataParallel.join(): ranks may make fewer steps than others
        self.tensor_parallel = False
        self.is_cut = False  # --epoch-steps has ended an epoch
        self.messages = []  # what the script called that sends messages: (name, line, group)
        # ("evaluates", line, places of loaders), ("trains" or "ends", ...), ("collective", ...)
        self.story = []
        self.noted = defaultdict(list)  # events of watched.KINDS
        self.end = None  # the event "done", or None: the process ended without a word
        self.recent = {}  # loaders that gave the batches for the next forward passes: their uses
        self.claimed = False  # a forward pass has used these batches
        self.passes = []  # forward passes since the last backward pass
        self.batches = 0  # since the last backward pass
        for event in events:
            self.read(event)
        self.loaders = merged(self.loaders)
        for loader in self.loaders:
            loader.settle()

    def read(self, event):
        match event["kind"]:
            case "hello":
                self.host = event["host"]
            case "model":
                self.models.append(event | {"times": None})
            case "optimizer":
                self.optimizers[event["optimizer"]] = event
            case "step":
                parameters = self.optimizers[event["optimizer"]]
                self.steps.append(event | {"parameters": parameters, "k": len(self.steps)})
            case "forward":
                self.read_forward(event)
            case "tensor parallel":
                self.tensor_parallel = True
            case "inputs":
                number = event["forward"]
                self.forwards[number] = self.forwards[number]._replace(
                    inputs=event["hashes"], tensors=event["tensors"]
                )
            case "backward":
                if not event["in_step"]:  # LBFGS computes gradients several times in a step
                    self.micro_steps.append((len(self.steps), self.passes, self.batches))
                self.passes = []
                self.batches = 0
            case "loader":
                self.loaders.append(Loader(event))
            case "epoch":
                loader = self.loaders[event["loader"]]
                loader.epochs.append(Epoch(len(self.steps), loader.subset))
                self.passes_over[loader.key].append(loader.epochs[-1])
            case "indices":
                self.loaders[event["loader"]].epochs[-1].batches.append(event["indices"])
            case "epoch ends":
                self.loaders[event["loader"]].epochs[-1].ended = True
            case "epoch is cut":
                self.is_cut = True
                if event["loader"] is not None:
                    self.loaders[event["loader"]].epochs[-1].cut = True
            case "batch":
                self.read_batch(event["loader"])
            case "samples":
                self.loaders[event["loader"]].samples = event["hashes"]
            case "worker":
                self.loaders[event["loader"]].worker_states = event["states"]
            case "draw":
                self.draws[len(self.steps), event["span"], event["source"]] = event["state"]
            case "collective":
                self.messages.append((event["name"], event["line"], event["group"]))
                self.story.append(("collective", event["name"], event["size"]))
            case "follow":
                self.follows.append(event)
            case "scale":
                self.scales.append(event["value"])
            case "write":
                self.writes.append(event)
                self.story.append(("writes", event["path"], None))
            case "used":
                self.models[event["model"]]["times"] = event["times"]
            case "calls":
                self.calls = event["calls"]
            case "done":
                self.end = event
                if event["why"] == "end":
                    self.story.append(("ends", None, None))
            case kind:
                place = {"step": len(self.steps), "micro_step": len(self.micro_steps)}
                self.noted[kind].append(event | place)

    def read_forward(self, event):
        kept = {name: event.get(name) for name in Forward._fields if name != "step"}
        kept["training"] = event["training"] and event["grad"]
        forward = Forward(step=len(self.steps), **kept)
        self.forwards.append(forward)
        self.joins = self.joins or event["joins"]
        if event["ddp"] is not None and event["grad"]:
            self.messages.append(("a forward pass of DistributedDataParallel", event["line"], ""))
        if event["grad"]:
            self.passes.append(forward)
        if forward.training:
            self.story.append(("trains", None, None))
        elif self.recent:
            read = [self.loaders[number].place() for number in self.recent]
            self.story.append(("evaluates", forward.line, read))
        for use in self.recent.values():
            use.add(forward.training)
        if forward.training:
            self.recent = {}
        self.claimed = True

    def read_batch(self, loader):
        self.batches += 1
        if loader is None:
            return
        if self.claimed:
            self.recent = {}
            self.claimed = False
        self.recent[loader] = set()
        self.loaders[loader].epochs[-1].uses.append(self.recent[loader])


def merged(loaders):
    """Return the loaders, as one where the script makes a loader of the same kind in each epoch."""
    kept = {}  # the loader: (its kind, the number of the newest one that is merged into it)
    for number, loader in enumerate(loaders):
        kind = (loader.line, loader.size, loader.subset, loader.trains(), loader.evaluates())
        for first, (kind_of_first, newest) in kept.items():
            if kind == kind_of_first and newest < loader.older:  # else both exist side by side
                first.epochs += loader.epochs
                first.samples = first.samples or loader.samples
                kept[first] = kind, number
                break
        else:
            kept[loader] = kind, number
    return list(kept)
