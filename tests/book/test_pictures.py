"""The pictures of docs/: that they are drawn from what the code says now, and show what really
happens.
"""

import json
import re

import pytest
from PIL import Image
from processes import ROOT
from ranks import Ranks

from tools.bench import trace
from tools.book import pictures
from tools.book.step_model import Step, ring_seconds, step_seconds

GLOO = """\
import json
import sys
import time

import torch
import torch.distributed as dist

from common.distributed import cleaned_up


@cleaned_up()
def main():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    held = {name: torch.tensor(rows[rank]) for name, rows in json.loads(sys.argv[1]).items()}
    dist.broadcast(held["broadcast"], src=0)
    dist.all_reduce(held["all-reduce"])
    piece = torch.zeros(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(piece, held["reduce-scatter"])
    zeros = torch.zeros(n, dtype=torch.int64)
    held["reduce-scatter"] = zeros.index_copy(0, torch.tensor([rank]), piece)
    dist.all_gather_into_tensor(held["all-gather"], held["all-gather"][rank : rank + 1].clone())
    time.sleep(0.2 * rank)
    came = time.monotonic()
    dist.barrier()
    rows = {name: row.tolist() for name, row in held.items()}
    print(json.dumps(rows | {"barrier": [came, time.monotonic()]}))


main()
"""


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_by_the_code_as_it_is_now(name):
    """A picture is drawn by the code as it is now and shown on a page."""
    source = Image.open(ROOT / f"docs/figures/{name}.png").text["Source"]
    assert source == pictures.fingerprint(), (
        f"docs/figures/{name}.png is stale: python tools/book/pictures.py"
    )
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\(figures/{name}\.png\)", pages), (
        f"no page shows {name}.png with a description"
    )


def test_the_collectives_in_the_picture_are_what_gloo_does(tmp_path):
    (tmp_path / "collectives.py").write_text(GLOO)
    states = pictures.collectives()
    given = json.dumps({name: before.tolist() for name, (before, _) in states.items()})
    ranks = Ranks(tmp_path, pictures.RANKS, [given], script=tmp_path / "collectives.py")
    assert ranks.wait() == [0] * pictures.RANKS, ranks.output()
    told = [json.loads(ranks.output(rank).splitlines()[-1]) for rank in range(pictures.RANKS)]
    for name, (_, after) in states.items():
        assert [rank[name] for rank in told] == after.tolist(), name
    came, went = zip(*(rank["barrier"] for rank in told), strict=True)
    assert min(went) >= max(came)


SHARDED = """\
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Linear):
    def forward(self, inputs):
        note(f"forward {names[self]}")
        return Backward.apply(super().forward(inputs), self)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, block):
        ctx.block = block
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        note(f"backward {names[ctx.block]}")
        return gradient, None


def note(moment):
    weights = ["shard" if isinstance(block.weight, DTensor) else "whole" for block in names]
    gradients = ["shard" if isinstance(block.weight.grad, DTensor) else "none" for block in names]
    seen.append((moment, weights, gradients))


dist.init_process_group("gloo")
seen = []
model = nn.Sequential(*(Block(4, 4) for _ in range(3)))
for module in [*model, model]:
    fully_shard(module)
names = {block: k + 1 for k, block in enumerate(model)}
model(torch.ones(2, 4)).sum().backward()
note("optimizer")
print(json.dumps(seen))
dist.destroy_process_group()
"""


def test_fully_shard_gathers_one_block_after_the_other_as_in_the_picture(tmp_path):
    """Before a block's own backward pass has run, its gradient is not there yet."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    ranks = Ranks(tmp_path, 2, [], script=tmp_path / "sharded.py")
    assert ranks.wait() == [0, 0], ranks.output()
    seen = json.loads(ranks.output().splitlines()[-1])
    drawn = [
        [moment, weights, [state.replace("whole", "none") for state in gradients]]
        for moment, weights, gradients in pictures.sharded_states()
    ]
    assert seen == drawn


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_ring_of_the_picture_adds_up(ranks):
    """The ring of the picture adds up and sends as much as the model says."""
    values = pictures.initial_values(ranks)
    rounds = pictures.ring_rounds(values)
    total = values.sum(axis=0)
    assert (rounds[-1][0] == total).all()
    # halfway each rank has one finished piece
    assert (rounds[ranks - 1][0] == total).sum() == ranks
    # each rank gets one piece a round
    assert all((came.sum(axis=1) == 1).all() for _, came in rounds[1:])
    pieces = sum(came.sum() for _, came in rounds) / ranks
    assert pieces / ranks == pytest.approx(ring_seconds(1, ranks, latency=0, bandwidth=1))


def test_the_overlap_in_the_picture_is_that_of_the_model():
    step = Step(ready=(2.0, 3.0, 5.0), buckets=(0.5, 3.0, 1.0), total=6.0)
    begins, ends = zip(*pictures.sent(step, lambda size: size), strict=True)
    assert begins == (2.0, 3.0, 6.0) and ends == (2.5, 6.0, 7.0)
    assert ends[-1] + step.total - step.ready[-1] == step_seconds(step, lambda size: size)


@pytest.mark.slow
def test_a_trace_shows_the_parts_of_a_step(
    tmp_path,
):
    """A trace shows the parts of a step and the share of the all reduces that is hidden."""
    given = ["--trace", tmp_path / "trace.json", "--batch-size", 2]
    given += ["--log-file", tmp_path / "log.jsonl"]
    ranks = Ranks(tmp_path, 2, given, script="tools/bench/trace.py")
    assert ranks.wait() == [0, 0], ranks.output()
    spans = json.loads((tmp_path / "log.jsonl").read_text())["spans"]
    (forward,), (backward,), (optimizer,) = (
        spans[name] for name in ("forward", "backward", "optimizer")
    )
    assert 0 == forward[0] < forward[1] <= backward[0] < backward[1] <= optimizer[0] < optimizer[1]
    assert spans["all_reduce"] and all(begin >= backward[0] for begin, _ in spans["all_reduce"])
    assert re.search(
        r"^\d+% of the all-reduces' time is hidden behind the backward pass", ranks.output(), re.M
    )
    names = {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"forward", "backward", "optimizer", "gloo:all_reduce"} <= names


def test_the_hidden_share_is_within_the_backward_pass_alone():
    """The hidden share counts the time within the backward pass alone."""
    found = {"backward": [[10, 20]], "all_reduce": [[12, 16], [18, 24]]}
    assert trace.hidden_share(found) == 0.6
