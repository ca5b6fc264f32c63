"""Sharded models that the ranks begin with different weights."""

import functools
import sys

from rank_watch.compare import different_places
from rank_watch.hooks import after_import, replace
from rank_watch.places import own_line

if torch := sys.modules.get("torch"):
    from rank_watch.hashes import fingerprints, parameters_of
    from torch.optim.optimizer import register_optimizer_step_pre_hook


def install(recorder):
    def shard(real, module, *args, **kwargs):
        parameters = [] if isinstance(module, list) else module.parameters()
        whole = [parameter for parameter in parameters if parameter.device.type != "meta"]
        recorder.add("shard", line=own_line(), weights=fingerprints(whole))
        return real(module, *args, **kwargs)

    def replicate(real, *args, **kwargs):
        recorder.add("replicate")
        return real(*args, **kwargs)

    def load(real, *args, **kwargs):
        recorder.add("loads shards")
        return real(*args, **kwargs)

    def before_step(optimizer, args, kwargs):
        if weights := replicated_shards(optimizer):
            recorder.add("shards", line=own_line(), weights=weights)

    checkpoints = "torch.distributed.checkpoint"
    for name, function, module in (
        ("fully_shard", shard, "torch.distributed.fsdp"),
        ("replicate", replicate, "torch.distributed._composable.replicate"),
        ("load", load, checkpoints),
        ("set_model_state_dict", load, f"{checkpoints}.state_dict"),
        ("set_state_dict", load, f"{checkpoints}.state_dict"),
    ):
        after_import(module, functools.partial(replace, name=name, function=function))
    register_optimizer_step_pre_hook(before_step)


def replicated_shards(optimizer):
    """Return [(parameter and which shard of it, hash)] of the shards that other ranks hold too."""
    keys, tensors = [], []
    for number, parameter in enumerate(parameters_of(optimizer)):
        placements = getattr(parameter, "placements", ())
        if not any(placement.is_replicate() for placement in placements):
            continue
        places = zip(parameter.device_mesh.get_coordinate(), placements, strict=True)
        shard = [place for place, placement in places if not placement.is_replicate()]
        keys.append(f"{number} {shard}")
        tensors.append(parameter.to_local())
    return list(zip(keys, fingerprints(tensors), strict=True))


def judge(runs, judgment):
    loads = any(run.noted["loads shards"] or run.noted["load"] for run in runs)
    events = zip(*(run.noted["shard"] for run in runs), strict=False)
    for of_ranks in events if not loads else ():
        if different_places([event["weights"] for event in of_ranks]):
            first = of_ranks[0]
            judgment.found.append(
                f"the ranks give fully_shard() at {first['line']} models with different weights, "
                "and unlike DistributedDataParallel it does not send those of rank 0: the shards "
                "are of different models. Build it from one seed, or load the weights "
                "on all ranks before it (docs/07_fsdp.md#from-07-to-your-own-model)"
            )
            return
    for of_ranks in zip(*(run.noted["shards"] for run in runs), strict=False):
        copies = {}  # (place of a parameter, which shard): hashes on the ranks that hold it
        for event in of_ranks:
            for key, number in event["weights"]:
                copies.setdefault(key, set()).add(number)
        if any(len(numbers) > 1 for numbers in copies.values()):
            judgment.found.append(
                "ranks that hold copies of one shard have different weights before training step "
                f"{of_ranks[0]['step'] + 1} ({of_ranks[0]['line']}): the copies of a mesh must "
                "begin alike. Build the model from one seed, or load it on all ranks "
                "(docs/07_fsdp.md)"
            )
            return
