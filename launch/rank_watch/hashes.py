"""Hashes of tensors, samples and the states of random number generators."""

import random
import sys
import zlib

import torch
from torch.utils._pytree import tree_leaves

# of a DTensor, of a FlatParameter of FSDP, and of the original parameters in it
SHARD_MARKS = ("placements", "_local_shard", "_fsdp_flattened")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def hashes_of_inputs(args):
    """Return a hash for each sample of a batch of inputs, or None: unknown; and what each tensor
    holds: [type and shape, hash, number of different samples].
    """
    try:
        with torch.no_grad():
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim()]
            tensors = [x.cpu() for x in tensors if len(x) == len(tensors[0])]
            columns = [[hash_of(sample) for sample in tensor] for tensor in tensors]
    except (RuntimeError, TypeError):
        return None, []
    samples = [hash_of(sample) for sample in zip(*columns, strict=True)]
    of_tensors = [
        [
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}",
            hash_of(hashes),
            len(set(hashes)),
        ]
        for x, hashes in zip(tensors, columns, strict=True)
    ]
    return samples or None, of_tensors


def random_states(*data_sets):
    """Return a hash of the state of each generator of random numbers: {source: hash}."""
    states = {"torch": zlib.crc32(torch.get_rng_state().numpy().tobytes())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["GPU"] = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    states["random"] = hash(random.getstate()[1])
    own = [state for data_set in data_sets for state in own_states(data_set)]
    if own:
        states["own"] = zlib.crc32(repr(own).encode())
    return states


def own_states(owner, depth=2):
    """Yield the states of the generators that a data set, or a transform in it, holds itself."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        for one in value if isinstance(value, list | tuple) and len(value) < 20 else [value]:
            kind = type(one)
            if isinstance(one, torch.Generator):
                yield zlib.crc32(one.get_state().numpy().tobytes())
            elif isinstance(one, random.Random):
                yield one.getstate()
            elif kind.__module__.startswith("numpy.random") and hasattr(one, "bit_generator"):
                yield one.bit_generator.state
            elif kind.__module__.startswith("numpy.random") and hasattr(one, "get_state"):
                yield one.get_state(legacy=False)
            elif depth and callable(one) and not isinstance(one, type):
                yield from own_states(one, depth - 1)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
