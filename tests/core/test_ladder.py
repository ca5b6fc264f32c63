"""The proof of the ladder: however many processes share a global batch, and whoever starts them,
they learn the same.

The ranks are forked, which spares the seconds of each import of torch. test_accelerator.py starts
them as users do.
"""

import functools
import json
import re
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from images import write_images
from rungs import SCRIPTS, flags, fork_rung

from common import models
from common.data import build_datasets
from common.memory import MemoryImages
from common.models import SmallNet

STEPS = {"mnist_net": 20, "resnet18": 8}
GLOBAL_BATCH = 64

RUNGS = {
    "python": "01_snsc.py",
    "torchrun": "03_mnmc_ddp_launch.py",
    "mp.spawn": "04_mnmc_ddp_mp.py",
    "srun": "05_mnmc_ddp_slurm.py",
    "sharded": "07_fsdp.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An ImageFolder tree of 8x8 images: 20 global batches to train on, a few to test on."""
    root = tmp_path_factory.mktemp("ladder")
    classes = [str(k) for k in range(5)]
    write_images(root, "train", (8, 8), classes, max(STEPS.values()) * GLOBAL_BATCH // 5)
    # 65: one rank has a batch more to test than the others
    return write_images(root, "test", (8, 8), classes, 13)


def convolve(self, images, weight, bias, original=torch.nn.Conv2d._conv_forward):
    """Convolve float64 images with one matrix product: on a CPU, ten times faster than PyTorch's
    convolution.
    """
    if images.dtype != torch.float64:
        return original(self, images, weight, bias)
    assert bias is None and self.groups == 1 and self.dilation == (1, 1)
    shape = images.shape[2:], self.padding, self.kernel_size, self.stride
    height, width = ((n + 2 * p - k) // s + 1 for n, p, k, s in zip(*shape, strict=True))
    options = {"padding": self.padding, "stride": self.stride}
    columns = torch.nn.functional.unfold(images, self.kernel_size, **options).transpose(0, 1)
    outputs = weight.flatten(1) @ columns.reshape(columns.shape[0], -1)
    return outputs.view(-1, len(images), height, width).transpose(0, 1)


def look_in(out, dtype, rank):
    """Log what a rank trains on: the indices of every batch and every loss.

    Without dropout: each rank draws its own random numbers. The model computes in `dtype`.
    """
    file = out / f"rank{rank}.jsonl"

    def tell(**what):
        with file.open("a") as log:
            log.write(json.dumps({"rank": rank} | what) + "\n")

    def fetch(self, indices, original=MemoryImages.__getitems__):
        tell(images=len(self), indices=[int(i) for i in indices])
        return original(self, indices)

    def loss(self, outputs, targets, original=torch.nn.CrossEntropyLoss.forward):
        value = original(self, outputs, targets)
        tell(loss=value.item())
        return value

    def build(args, dataset, original=models.build_model):
        model = original(args, dataset)
        model.register_forward_pre_hook(lambda _, images: images[0].to(dtype))
        return model.to(dtype)

    models.build_model = build
    MemoryImages.__getitems__ = fetch
    torch.nn.Conv2d._conv_forward = convolve
    torch.nn.CrossEntropyLoss.forward = loss
    torch.nn.Dropout.forward = lambda self, x: x


@pytest.fixture(scope="module")
def train(folder, tmp_path_factory):
    """A function (launcher, world_size, arch, *flags) -> what the run trained on, its losses and
    weights; cached.
    """
    runs = {}

    def train(launcher, world_size, arch, *flags):
        key = launcher, world_size, arch, flags
        if key not in runs:
            out = tmp_path_factory.mktemp("run")
            given = ["--arch", arch, "--limit", STEPS[arch] * GLOBAL_BATCH, *flags]
            given += ["--dataset", "folder", "--data-dir", folder, "--epochs", 1, "--no-augment"]
            given += ["--lr", 0.02, "--warmup-epochs", 0.5, "--seed", 4, "--print-every", 8]
            given += ["--batch-size", GLOBAL_BATCH, "--save", out / "net.pt"]
            given += ["--log-file", out / "log"]
            dtype = torch.float64 if arch == "resnet18" else torch.float32
            prepare = functools.partial(look_in, out, dtype)
            ranks = fork_rung(out, RUNGS[launcher], world_size, given, prepare)
            assert set(ranks.wait()) == {0}, ranks.output()
            runs[key] = read(out, world_size, STEPS[arch])
        return runs[key]

    return train


def read(out, world_size, steps):
    """What the ranks of a run have printed, recorded and told."""
    printed = (out / "run0-rank0.out").read_text()
    lines = (line for file in out.glob("*.jsonl") for line in file.read_text().splitlines())
    told = [json.loads(line) for line in lines]
    assert {line["rank"] for line in told} == set(range(world_size))

    def by_step(what):
        of_ranks = []
        for rank in range(world_size):
            of_rank = [line[what] for line in told if line["rank"] == rank and what in line]
            of_ranks.append(of_rank[:steps])
        return list(zip(*of_ranks, strict=True))

    losses = [sum(step) / world_size for step in by_step("loss")]
    return SimpleNamespace(
        out=printed,
        batches=[sorted(chain(*step)) for step in by_step("indices")],
        tested=sorted(chain(*(line["indices"] for line in told if line.get("images") == 65))),
        printed=[float(n) for n in re.findall(r"(?:loss|acc): +([\d.]+)", printed)],
        record=json.loads((out / "log").read_text()),
        losses=torch.tensor(losses, dtype=torch.float64),
        weights=torch.load(out / "net.pt", weights_only=True),
    )


def distance(a, b):
    """How far two models are apart: the norm of the difference of all weights, relative to that of
    the weights.
    """
    a, b = (torch.cat([w.flatten().double() for w in net.weights.values()]) for net in (a, b))
    return ((a - b).norm() / b.norm()).item()


WORLDS = [("torchrun", 2), ("mp.spawn", 2), ("srun", 2), ("sharded", 2)]
WORLDS += [pytest.param(name, 4, marks=pytest.mark.slow) for name in ("torchrun", "sharded")]


@pytest.mark.parametrize(("launcher", "world_size"), WORLDS)
def test_without_batch_norm_any_world_learns_the_same(train, launcher, world_size):
    one = train("python", 1, "mnist_net")
    many = train(launcher, world_size, "mnist_net")
    assert many.batches == one.batches and len(one.batches) == 20
    assert sorted(chain(*one.batches)) == list(range(20 * GLOBAL_BATCH))
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-5, atol=1e-6)
    assert one.losses[0] - one.losses[-1] > 0.03, (
        "it has learned, so there was something to disagree on"
    )
    assert distance(many, one) < 1e-5
    *trained, test_loss, test_accuracy = one.printed
    assert len(trained) == 3 * 2, "loss and accuracy of all ranks after steps 8, 16 and 20"
    assert many.printed[:-2] == pytest.approx(trained, abs=0.1)
    for name in ("train_loss", "test_loss"):
        assert many.record[name] == pytest.approx(one.record[name], abs=2e-4)
    assert many.printed[-2:] == pytest.approx([test_loss, test_accuracy], abs=1.6), (
        "of 65 images, one at most is on the edge"
    )
    name = launcher.replace("sharded", "torchrun")  # which starts 07
    assert f"started by {name} | world size {world_size} " in many.out
    assert (
        f"global batch = {GLOBAL_BATCH // world_size} x {world_size} = "
        f"{GLOBAL_BATCH} | lr 0.02 -> 0.005"
    ) in many.out
    # A rank of 07 may repeat a batch, which it does not count.
    assert many.tested == list(range(65)) or launcher == "sharded"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "sharded"])
def test_resnet18_with_sync_bn_learns_the_same_on_two_processes(train, launcher):
    """In float64.

    In float32 no two ways to add up the same numbers stay together: one process that takes the
    images of each batch in reverse order is as far off after 20 steps, 4 %, because a rounding
    error that carries one value across the kink of a ReLU changes its gradient at once."""
    one = train("python", 1, "resnet18")
    many = train(launcher, 2, "resnet18", "--sync-bn")
    assert many.batches == one.batches
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-9, atol=0)
    assert distance(many, one) < 1e-9
    assert many.record["test_acc"] == one.record["test_acc"]
    own = train(launcher, 2, "resnet18")
    assert own.batches == one.batches
    assert (own.losses - one.losses).abs().max() > 1e-2, "each process normalizes by its own images"


# Batch norm, and test images that the ranks do not divide


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """An ImageFolder tree of 16x16 images: 24 to train on, 97 to test on.

    Of 97, rank 0 has a batch of twelve more than rank 1.
    """
    root = tmp_path_factory.mktemp("uneven")
    write_images(root, "train", (16, 16), ["a", "b", "c"], 8)
    write_images(root, "test", (16, 16), ["a", "b", "c"], 33)
    (root / "test/c/031.png").unlink()
    (root / "test/c/032.png").unlink()
    return root


def step_with_batch_norm(images, targets, shares, lr):
    """A model after one training step, in which each share of the images is normalized by itself.

    Its batch norm statistics are those of the first share.
    """
    torch.manual_seed(0)
    model = SmallNet(3, 3)
    options = {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr, **options)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for share in reversed(shares):
        model.load_state_dict(buffers, strict=False)
        loss = torch.nn.functional.cross_entropy(model(images[share]), targets[share])
        (loss / len(shares)).backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("script", [*SCRIPTS[2:], "07_fsdp.py"])
def test_97_test_images_count_once_in_the_batch_norm_of_rank_0(uneven, tmp_path, script):
    """After one training step, in which batch norm sees the images of a rank, or with --sync-bn
    those of all ranks.
    """
    given = ["--dataset", "folder", "--data-dir", uneven, "--arch", "small_net", "--no-augment"]
    given += ["--epochs", 1, "--lr", 0.5, "--lr-scaling", "none", "--batch-size", 24]
    started = {}
    for name, more in (("plain", []), ("synced", ["--sync-bn"])):
        out = tmp_path / name
        out.mkdir()
        files = ["--save", out / "net.pt", "--log-file", out / "log"]
        started[name] = fork_rung(out, script, 2, [*given, *files, *more])
    train_set, test_set = build_datasets(flags(*given))
    mean, std = (s.float()[:, None, None] for s in train_set.channel_stats())
    images, test_images = ((s.images - mean) / std for s in (train_set, test_set))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    of_ranks = [order[0::2], order[1::2]]
    for name, shares in (("plain", of_ranks), ("synced", [order])):
        ranks = started[name]
        assert ranks.wait() == [0, 0], ranks.output()
        assert ("synchronized batch norm" in ranks.output()) == (name == "synced")
        expected = step_with_batch_norm(images, train_set.targets, shares, lr=0.5)
        saved = torch.load(tmp_path / name / "net.pt", weights_only=True)
        torch.testing.assert_close(saved, dict(expected.state_dict()), rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            outputs = expected(test_images)
        loss = torch.nn.functional.cross_entropy(outputs, test_set.targets).item()
        correct = (outputs.argmax(1) == test_set.targets).sum().item()
        assert len(test_set) == 97 and 0 < correct < 97
        record = json.loads((tmp_path / name / "log").read_text())
        assert record["test_acc"] == round(100 * correct / 97, 3)
        assert record["test_loss"] == pytest.approx(loss, abs=6e-5)
