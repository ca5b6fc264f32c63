"""Make the mistakes with fully_shard of docs/troubleshooting.md, one after another, on two ranks.

    torchrun --nproc-per-node=2 tests/helpers/provoke_sharded.py FOLDER

The lines `== NUMBER: NAME` are those of provoke.py. What a mistake does in silence, and what a
remedy does that no script of the project uses, is checked here. FOLDER is for files.
"""

import copy
import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from provoke import mistake, mistake_of_ranks, short_lived_group
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from gpt.model import GPT

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def of_ranks(value):
    """Return a number of each rank: a pair."""
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def differ(value):
    """Return whether a tensor of one element clearly differs between the ranks."""
    first, second = of_ranks(value.item())
    return abs(first - second) > 0.01


def build():
    """Return a model with the same weights on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def shard(model, **options):
    for block in model.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def images():
    """Return a batch that differs per rank."""
    return torch.arange(8.0).reshape(2, 4) / 8 + dist.get_rank()


def whole(model):
    """Return copies of a model's weights, gathered from all ranks."""
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for name, weight in model.named_parameters()
    }


def largest_difference(weights, others):
    return max((weights[name] - others[name]).abs().max() for name in weights)


def train(model, optimizer, steps=3, inputs=None):
    """Train, and return the losses."""
    inputs = images() if inputs is None else inputs
    losses = []
    for _ in range(steps):
        loss = model(inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_too_early():
    with mistake_of_ranks("silent: the optimizer before fully_shard"):
        model = build()
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        shard(model)
        before = whole(model)
        losses = train(model, optimizer)
        assert len(set(losses)) == 1 and largest_difference(whole(model), before) == 0

    with mistake_of_ranks("59: the optimizer before fully_shard"):
        get_state_dict(model, optimizer)


def rank_0_alone(folder):
    """The mistakes that end in a timeout each break the connections of a group of their own.

    torch remembers the mesh of an operation by the shapes of its tensors, and takes the first one
    for all that are equal. So the model that is gathered has shapes that no other model has.
    """
    rank = dist.get_rank()

    def own_mesh():
        return DeviceMesh.from_group(short_lived_group(), "cpu")

    with mistake_of_ranks("remedy: what rank 0 may do alone"):
        model = shard(build())
        model(images()).sum().backward()
        if rank == 0:
            assert "placements=(Shard(dim=0),)" in str(model[0].weight)
            assert len(model.state_dict()["0.weight"].to_local()) == 4
            SGD(model.parameters(), 0.1).step()

    model = shard(build(), mesh=own_mesh())
    with mistake_of_ranks("60: a forward pass on rank 0 alone"):
        if rank == 0:
            model(images())

    model = shard(build(), mesh=own_mesh())
    with mistake_of_ranks("60: one forward pass more on rank 0"), torch.no_grad():
        for _ in range(3 - rank):
            model(images())

    model, group = shard(build()), short_lived_group()
    with mistake_of_ranks("60: dcp.save on rank 0 alone"):
        if rank == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)

    model = shard(nn.Sequential(nn.Linear(3, 6)), mesh=own_mesh())
    with mistake_of_ranks("60: get_model_state_dict on rank 0 alone"):
        if rank == 0:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def encode(self, x):
        return self.features(x)

    def forward(self, x):
        return self.head(self.encode(x))


def other_methods():
    with mistake_of_ranks("61: model.encode"):
        fully_shard(Encoder()).encode(images())

    with mistake_of_ranks("61: a sharded block before its model"):
        model = Encoder()
        fully_shard(model.features)
        fully_shard(model)
        model.encode(images())
        model(images())

    with mistake_of_ranks("remedy: register_fsdp_forward_method"):
        model = Encoder()
        fully_shard(model.features)
        fully_shard(model)
        register_fsdp_forward_method(model, "encode")
        outputs = model.encode(images())
        assert torch.equal(outputs, Encoder().encode(images()))
        outputs.sum().backward()
        model(images()).sum().backward()


class Block(nn.Linear):
    """A layer that finds all weights of its model whole in its forward pass."""

    def forward(self, x):
        weights = [p for block in self.model[0] for p in block.parameters()]
        assert sum(p.numel() for p in weights if not isinstance(p, DTensor)) == 4 * 8 * 8
        return super().forward(x)


def wrong_modules():
    with mistake_of_ranks("silent: no fully_shard of the model"):
        model = build()
        fully_shard(model[0])
        optimizer = SGD(model.parameters(), 0.1)
        train(model, optimizer)
        assert differ(model[2].weight.sum())

    with mistake_of_ranks("62: no fully_shard of the model"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for option in ("foreach", "fused"):
        with mistake_of_ranks(f"61: no fully_shard of the model, and {option}"):
            SGD(model.parameters(), 0.1, **{option: True}).step()

    with mistake_of_ranks("silent: fully_shard of the model alone"):
        model = nn.Sequential(*[Block(8, 8, bias=False) for _ in range(4)])
        for block in model:
            block.model = [model]  # in a list, or it would be a child
        fully_shard(model)
        model(torch.ones(1, 8))
        assert str(model).count("FSDP") == 1


def start_reader(file):
    """Start a process that imports nothing but torch, and loads a file."""
    code = f"import torch; torch.load({str(file)!r})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def files(folder):
    rank = dist.get_rank()
    model = shard(build())
    with mistake_of_ranks("63: a file of shards in an unsharded model"):
        build().load_state_dict(torch.load(folder / "rank0.pt"))

    with mistake_of_ranks("silent: the shards of rank 0 on each rank"):
        model.load_state_dict(torch.load(folder / "rank0.pt"))
        weight = whole(model)["0.weight"]
        assert (weight != build()[0].weight).any(dim=1).sum() == 4, "the rows of rank 1"

    weights = {name: weight + 1 for name, weight in build().state_dict().items()}
    with mistake_of_ranks("silent: weights on rank 0 alone"):
        model = build()
        if rank == 0:
            model.load_state_dict(weights)
        shard(model)
        weight = whole(model)["0.weight"]
        assert (weight != weights["0.weight"]).any(dim=1).sum() == 4

    with mistake_of_ranks("63: whole weights in a sharded model"):
        model.load_state_dict(weights)

    plain = build()
    optimizer = SGD(plain.parameters(), 0.1, momentum=0.9)
    train(plain, optimizer, steps=1)
    with mistake_of_ranks("61: an unsharded state of the optimizer"):
        model = shard(build())
        sharded_optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        sharded_optimizer.load_state_dict(optimizer.state_dict())
        train(model, sharded_optimizer, steps=1)

    with mistake_of_ranks("remedy: set_optimizer_state_dict"):
        model = shard(build())
        sharded_optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        _, state = get_state_dict(plain, optimizer)
        given = state if rank == 0 else {}
        set_optimizer_state_dict(model, sharded_optimizer, given, options=FROM_RANK_0)
        train(model, sharded_optimizer, steps=1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))


def tied_weights():
    words = torch.arange(6)
    with mistake_of_ranks("silent: tied weights in two groups"):
        model = Tied()
        for module in (model.embedding, model.middle, model.head, model):
            fully_shard(module)
        assert len(list(model.parameters())) == 4

    with mistake_of_ranks("64: tied weights in two groups"):
        model(words)

    plain = Tied()
    train(plain, SGD(plain.parameters(), 0.01), inputs=words)
    for name in ("the group of the model", "one group"):
        with mistake_of_ranks(f"remedy: tied weights in {name}"):
            model = Tied()
            fully_shard(model.middle)
            if name == "one group":
                fully_shard([model.embedding, model.head])
            fully_shard(model)
            assert len(list(model.parameters())) == 3
            train(model, SGD(model.parameters(), 0.01), inputs=words)
            assert largest_difference(whole(model), whole(plain)) < 1e-5


def numbers_of_one_rank():
    with mistake_of_ranks("silent: the norm of a gradient"):
        model = shard(build())
        model(images()).pow(2).mean().backward()
        of_each = of_ranks(sum(p.grad.norm().item() ** 2 for p in model.parameters()))
        gradients = [p.grad for p in model.parameters()]
        norm = nn.utils.get_total_norm(gradients).full_tensor().item()
        assert abs(sum(of_each) - norm**2) < 1e-5 * norm**2, "each has a part of the whole"

    with mistake_of_ranks("silent: batch norm"):
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        train(model, SGD(model.parameters(), 0.1))
        assert differ(model[1].running_mean[0])
        model.eval()
        assert differ(model(torch.ones(1, 4))[0, 0])


def averages():
    with mistake_of_ranks("66: deepcopy"):
        copy.deepcopy(shard(build()))

    with mistake_of_ranks("66: AveragedModel"):
        AveragedModel(shard(build()))

    with mistake_of_ranks("61: an unsharded average"), torch.no_grad():
        model, average = shard(build()), build()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)

    with mistake_of_ranks("remedy: a sharded average"), torch.no_grad():
        model = build()
        average = copy.deepcopy(model)
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(average[0].weight)
        shard(model)
        shard(average)
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
        torch.testing.assert_close(whole(average)["0.weight"].mean(), torch.tensor(0.1))


def on_meta():
    with torch.device("meta"):
        return shard(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))


def no_memory_yet():
    with mistake_of_ranks("67: on meta"):
        on_meta()(images())

    with mistake_of_ranks("67: to() on meta"):
        on_meta().to("cpu")

    with mistake_of_ranks("remedy: on meta"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        nn.init.ones_(plain[1].running_mean)
        weights = plain.state_dict() if dist.get_rank() == 0 else {}
        model = on_meta()
        model.to_empty(device="cpu")
        set_model_state_dict(model, weights, options=FROM_RANK_0)
        assert largest_difference(whole(model), whole(plain)) == 0
        assert model[1].running_mean[0] == 1
        model(images()).sum().backward()


def norms_in_bfloat16():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    float32_outputs = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)

    with mistake_of_ranks("68: batch norm in bfloat16"):
        shard(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), mp_policy=policy)(images())

    with mistake_of_ranks("remedy: batch norm in float32"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        fully_shard(model[1])
        fully_shard(model, mp_policy=policy)
        assert model(images()).dtype == torch.bfloat16

    with mistake_of_ranks("68: float32 between blocks"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        fully_shard(model[0], mp_policy=float32_outputs)
        fully_shard(model, mp_policy=float32_outputs)
        model(images())


def two_dimensions():
    def cut(heads):
        """Return a GPT whose blocks are cut along tensor, but not its norms and its embeddings."""
        return parallelize_module(GPT(1, heads, 12, 8), mesh["tensor"], plan)

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = {"blocks.*.query_key_value": ColwiseParallel(), "blocks.*.output": RowwiseParallel()}
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with mistake_of_ranks("88: plain weights beside DTensors"):
        model = cut(heads=2)
        model(tokens).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with mistake_of_ranks("88: weights on two meshes"):
        model = shard(cut(heads=2), mesh=mesh["data"])
        model(tokens).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with mistake_of_ranks("89: three heads on two ranks"):
        cut(heads=3)(tokens)

    with mistake_of_ranks("89: a mesh of six ranks"):
        init_device_mesh("cpu", (2, 3))


def main(folder):
    folder = Path(folder)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.save(shard(build()).state_dict(), folder / f"rank{rank}.pt")
    reader = start_reader(folder / "rank0.pt") if rank == 0 else None
    optimizer_too_early()
    other_methods()
    wrong_modules()
    files(folder)
    tied_weights()
    numbers_of_one_rank()
    averages()
    no_memory_yet()
    norms_in_bfloat16()
    two_dimensions()
    rank_0_alone(folder / "rank_0_alone")  # last, because its groups lose their connections
    if reader:
        with mistake("63: a file of shards in one process"):
            sys.stderr.write(reader.communicate(timeout=60)[1])
    os._exit(0)  # destroying those groups would fail


if __name__ == "__main__":
    main(sys.argv[1])
