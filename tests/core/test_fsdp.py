"""07: shards, what each rank holds, and checkpoints that any number of ranks can load.

That it learns as 01 does, tests/core/test_ladder.py shows.
"""

import functools
import itertools
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchvision
from images import write_images
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from common import models
from common.errors import UserError
from common.models import CifarResNet20, MnistNet, SmallNet
from fsdp import sharded

IMAGES = 128
STEPS = 4  # per epoch
WHOLE = sum(p.numel() for p in MnistNet(3, (8, 8), 2).parameters()) * 4 / 1e6  # MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An ImageFolder tree of 8x8 images; of two ranks, one has a batch more to evaluate."""
    root = tmp_path_factory.mktemp("fsdp")
    write_images(root, "train", (8, 8), per_class=IMAGES // 2)
    write_images(root, "test", (8, 8), per_class=17)
    (root / "test/dog/016.png").unlink()
    return root


@pytest.fixture(scope="module")
def train(folder, tmp_path_factory):
    """A function (world size, *flags) -> what 07 printed, and the weights it saved; cached."""

    @functools.cache
    def train(world_size, *flags, prepare=without_dropout):
        out = tmp_path_factory.mktemp("run")
        ranks = start(out, folder, world_size, "--save", out / "model.pt", *flags, prepare=prepare)
        assert ranks.wait() == [0] * world_size, ranks.output()
        return SimpleNamespace(
            out=ranks.output(),
            losses=re.findall(r"== step: .*loss: ([\d.]+)", ranks.output()),
            weights=torch.load(out / "model.pt", weights_only=True),
        )

    return train


def start(out, folder, world_size, *flags, **options):
    """Start 07 on images of 8x8 pixels, without augmentation, for one epoch unless flags differ."""
    given = ["--dataset", "folder", "--data-dir", folder, "--arch", "mnist_net", "--no-augment"]
    given += ["--batch-size", IMAGES // STEPS, "--epochs", 1, "--print-every", 1]
    given += ["--lr-scaling", "none"]
    return Ranks(out, world_size, [*given, *flags], script="07_fsdp.py", **options)


def without_dropout(rank):
    """Each rank draws its own random numbers, so results would depend on the world size."""
    nn.Dropout.forward = lambda self, images: images


def far(a, b):
    """Return the largest difference between the weights of two runs."""
    assert a.weights.keys() == b.weights.keys()
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


# What each rank holds


def held(run):
    """Return [(MB on rank 0, MB of all ranks), ...] of weights, gradients, optimizer state."""
    line = re.search(r"MB on rank 0: (.*)", run.out)[1]
    names = re.findall(r"([a-z][a-z ]*) [\d.]+ of", line)
    assert names == ["weights", "gradients", "optimizer state"]
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) of ([\d.]+)", line)]


def test_a_rank_holds_a_part_of_everything_and_learns_the_same(train):
    alone = train(1)
    assert held(alone) == [(pytest.approx(WHOLE, abs=0.006),) * 2] * 3
    for run in (train(2), train(4, "--shard-size", 2)):
        for own, whole in held(run):
            assert whole == pytest.approx(WHOLE, abs=0.006)
            assert own == pytest.approx(WHOLE / 2, abs=0.006)
        assert far(run, alone) < 1e-6
        assert evaluated(run) == pytest.approx(evaluated(alone), abs=0.0011), "33 images, once each"


def evaluated(run):
    """Return the loss and the accuracy of the evaluation, as printed."""
    return [
        float(n) for n in re.search(r"== test: .*loss: ([\d.]+) .*acc: +([\d.]+)", run.out).groups()
    ]


def test_gradients_are_clipped_by_the_norm_of_all_shards(train):
    plain, alone = train(1), train(1, "--clip-grad", 0.1)
    clipped = train(2, "--clip-grad", 0.1)
    assert far(clipped, alone) < 1e-7
    assert far(clipped, plain) > 1e-4


def spy(rank):
    """Print, at each loss in training, the type of computation, whether the weights are whole, and
    how often a linear layer has computed.
    """
    without_dropout(rank)
    seen = SimpleNamespace(model=None, calls=0, dtype=None)

    def blocks(model, original=sharded.blocks):
        seen.model = model
        return original(model)

    def linear(self, images, original=nn.Linear.forward):
        seen.calls += torch.is_grad_enabled()
        seen.dtype = self.weight.dtype
        return original(self, images)

    def loss(self, outputs, targets, original=nn.CrossEntropyLoss.forward):
        if torch.is_grad_enabled():
            whole = [not isinstance(p, DTensor) for p in seen.model.parameters()]
            print(f"spy: {seen.dtype} -> {outputs.dtype}, {any(whole)}, {seen.calls} calls")
        return original(self, outputs, targets)

    sharded.blocks = blocks
    nn.Linear.forward = linear
    nn.CrossEntropyLoss.forward = loss


def spied(run):
    """Return [(types, whether a weight is whole, calls so far), ...] for each training step."""
    return re.findall(r"spy: (.*), (\w+), (\d+) calls", run.out)


FLOAT = "torch.float32 -> torch.float32"


def test_weights_are_gathered_block_by_block_and_freed(train):
    run = train(2, prepare=spy)
    assert spied(run) == [(FLOAT, "False", str(2 * step)) for step in (1, 2, 3, 4)]


def test_without_resharding_weights_stay_for_the_backward_pass(train):
    run = train(2, "--no-reshard-after-forward", prepare=spy)
    assert {whole for _, whole, _ in spied(run)} == {"True"}
    assert far(run, train(2)) == 0
    assert held(run) == held(train(2)), "after the evaluation they are shards again"


def test_bf16_computes_in_bfloat16_and_keeps_float32(train):
    run = train(2, "--amp", "bf16", prepare=spy)
    assert {types for types, _, _ in spied(run)} == {"torch.bfloat16 -> torch.float32"}
    assert held(run) == held(train(2)) and run.weights["classifier.1.weight"].dtype == torch.float32
    assert 1e-6 < far(run, train(2)) < 1e-2


def test_checkpointed_blocks_compute_twice_and_learn_the_same(train):
    run = train(2, "--checkpoint-activations", prepare=spy)
    assert [int(calls) for _, _, calls in spied(run)] == [2, 6, 10, 14], "twice, once backward"
    assert far(run, train(2)) == 0


def test_the_blocks_of_a_model_are_its_layers():
    """Where nn.Sequential's are stages of blocks, too, and inside of blocks."""
    with torch.device("meta"):  # without memory and random numbers for the weights
        vit = torchvision.models.vit_b_16(image_size=32)
        swin = torchvision.models.swin_t()
        cases = (torchvision.models.resnet18(), 8, "BasicBlock"), (vit, 13, "EncoderBlock")
        cases += (swin, 17, "SwinTransformerBlock"), (CifarResNet20(), 12, "BasicBlock")
        cases += (SmallNet(), 11, "Conv2d"), (nn.Linear(2, 2), 0, None)
    for model, count, kind in cases:
        found = sharded.blocks(model)
        assert len(found) == count
        kinds = [type(block).__name__ for block in found]
        assert kind == max(kinds, key=kinds.count, default=None)
        assert not any(child in found for block in found for child in block.children()), (
            "none inside"
        )
        assert all(list(block.parameters()) for block in found)


# Checkpoints


SMALL_NET = ["--arch", "small_net", "--augment", "--epochs", 3]  # with batch norm, and at random


def kill_in_the_second_save(rank):
    """Rank 1 dies before it writes its shards of the second epoch; rank 0 writes its own."""
    saves = itertools.count(1)

    def write(self, *given, original=dcp.FileSystemWriter.write_data):
        if rank == 1 and next(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *given)

    dcp.FileSystemWriter.write_data = write


@pytest.fixture(scope="module")
def killed(folder, tmp_path_factory):
    """The folder of checkpoints of two ranks that were killed while they saved the second epoch."""
    out = tmp_path_factory.mktemp("killed")
    path = out / "checkpoints"
    ranks = start(
        *(out, folder, 2, *SMALL_NET, "--checkpoints-path", path), prepare=kill_in_the_second_save
    )
    codes = ranks.wait()
    assert codes[1] == -signal.SIGKILL and codes[0] == 1, ranks.output()
    return path


def test_a_training_killed_in_a_save_continues_bit_for_bit(train, killed, tmp_path):
    assert os.listdir(killed / "epoch-2") == ["__0_0.distcp"], "half of a checkpoint"
    shutil.copytree(killed, tmp_path / "checkpoints")
    without_end = train(2, *SMALL_NET, prepare=None)
    resumed = train(2, *SMALL_NET, "--checkpoints-path", tmp_path / "checkpoints", prepare=None)
    assert without_end.losses[STEPS:] == resumed.losses and len(resumed.losses) == 2 * STEPS
    assert far(without_end, resumed) == 0
    assert os.listdir(tmp_path / "checkpoints") == ["epoch-3"], "the one before is deleted"


def note_what_was_loaded(rank):
    """Save the whole state after loading, and exit."""

    def load(args, model, optimizer, scheduler, original=sharded.load_newest):
        epoch = original(args, model, optimizer, scheduler)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = get_state_dict(model, optimizer, options=whole)
        if rank == 0:
            state = {"epoch": epoch, "weights": weights, "state": state["state"]}
            state["steps"] = scheduler.last_epoch
            state["lr"] = optimizer.param_groups[0]["lr"]
            torch.save(state, args.save)
        dist.destroy_process_group()
        raise SystemExit

    sharded.load_newest = load


def loaded(killed, folder, tmp_path, world_size, *flags):
    out = tmp_path / f"{world_size}{len(flags)}"
    out.mkdir()
    given = [*SMALL_NET, "--checkpoints-path", killed, "--save", out / "state.pt", *flags]
    ranks = start(out, folder, world_size, *given, prepare=note_what_was_loaded)
    assert ranks.wait() == [0] * world_size, ranks.output()
    return torch.load(out / "state.pt", weights_only=True)


def test_other_numbers_of_ranks_load_the_same_values(killed, folder, tmp_path):
    two = loaded(killed, folder, tmp_path, 2)
    three = loaded(killed, folder, tmp_path, 3, "--lr", 0.5, "--batch-size", 30)
    assert two["epoch"] == three["epoch"] == 1 and two["steps"] == three["steps"] == STEPS
    assert (two["lr"], three["lr"]) == (0.01, 0.5), "of the flags"
    assert all(torch.equal(three["weights"][k], two["weights"][k]) for k in two["weights"])
    assert len(two["state"]) == len(list(SmallNet(3, 2).parameters()))
    for name, state in two["state"].items():
        momentum = three["state"][name]["momentum_buffer"]
        assert torch.equal(momentum, state["momentum_buffer"]) and momentum.abs().max() > 0


def test_only_a_complete_epoch_counts(tmp_path):
    for epoch in (2, 9, 10, 11):
        (tmp_path / f"epoch-{epoch}").mkdir()
    assert sharded.newest_epoch(tmp_path) == 0
    for epoch in (2, 9, 10):
        (tmp_path / f"epoch-{epoch}/.metadata").touch()
    assert sharded.newest_epoch(tmp_path) == 10


def test_a_complete_training_still_saves_its_weights(run, killed, folder, tmp_path):
    """It may have been killed before it did."""
    given = ["--dataset", "folder", "--data-dir", folder, "--checkpoints-path", killed]
    end = run("07_fsdp.py", *given, *SMALL_NET, "--epochs", 1, "--save", tmp_path / "weights.pt")
    assert end.code == 0 and "done: nothing left to train after 1 epochs" in end.out, end.err
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights.keys() == SmallNet(3, 2).state_dict().keys()


def see_no_checkpoint_on_rank_1(rank):
    if rank == 1:
        sharded.newest_epoch = lambda folder, unit: 0


def test_ranks_that_see_different_checkpoints_do_not_train(killed, folder, tmp_path):
    given = [*SMALL_NET, "--checkpoints-path", killed]
    ranks = start(tmp_path, folder, 2, *given, prepare=see_no_checkpoint_on_rank_1)
    assert ranks.wait() == [2, 2], ranks.output()
    message = "the newest epoch of each rank is [1, 0]: expected the same; name a folder that all"
    assert message in ranks.output()


# Mistakes

# What the error says, and the flags.
MISTAKES = {
    "epoch-1: all 1 epochs are done; give --epochs 2 or more, another": ["--epochs", 1],
    "does not fit --arch mnist_net (Missing key in checkpoint ": ["--arch", "mnist_net"],
    "--shard-size 2 of 1 ranks: expected a number that divides the number": ["--shard-size", 2],
    # torch 2.14 fails in the first training step: expected scalar type BFloat16
    "--amp bf16: 1 is a batch norm, whose weights must be float32; leave": ["--amp", "bf16"],
}


def test_a_mistake_is_one_line(run, killed, folder):
    given = ["--dataset", "folder", "--data-dir", folder, "--checkpoints-path", killed]
    for message, flags in MISTAKES.items():
        end = run("07_fsdp.py", *given, *SMALL_NET, *flags)
        (line,) = end.err.splitlines()
        assert end.code == 2 and line.startswith("07_fsdp.py: error: ") and message in line


def test_every_rank_needs_a_test_image():
    """Without one it would skip a forward pass, for which the others would wait."""
    args = SimpleNamespace(batch_size=8)
    assert [sharded.count_test_steps(range(n), args, 2) for n in (2, 8, 9, 17)] == [1, 1, 2, 3]
    message = "1 test images for 2 ranks: expected one per rank or more; start 1 processes or fewer"
    with pytest.raises(UserError, match=message):
        sharded.count_test_steps(range(1), args, 2)


def test_a_vision_transformer_computes_in_bfloat16(run, small_folder, monkeypatch):
    """Its last layer norm is outside of the blocks: what they return must have its type."""

    def build(args, dataset):
        return torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=2)

    monkeypatch.setattr(models, "build_model", build)
    given = ["--dataset", "folder", "--data-dir", small_folder, "--epochs", 1, "--batch-size", 24]
    end = run("07_fsdp.py", *given, "--amp", "bf16", "--checkpoint-activations")
    assert end.code == 0 and "done: test accuracy" in end.out, end.err


def test_restarts_need_checkpoints(run, monkeypatch, small_folder):
    """torchrun's restarts begin anew without them."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    text = "--max-restarts=3: each restart begins at epoch 1; --checkpoints-path DIR continues"
    given = ["--dataset", "folder", "--data-dir", small_folder, "--arch", "small_net"]
    given += ["--epochs", 1, "--batch-size", 24]
    assert text in run("07_fsdp.py", *given).err
    end = run("07_fsdp.py", *given, "--checkpoints-path", small_folder / "saved")
    assert end.code == 0 and end.err == "" and (small_folder / "saved/epoch-1/.metadata").exists()
