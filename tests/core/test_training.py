"""How 06 trains and evaluates, and what it tells of that. Its numbers: test_numbers.py."""

import functools
import re
import sys

import pytest
import torch
from imagenet_runs import SMALL_06, final, parse_06
from needs import need
from ranks import Ranks, training_log

from common.errors import UserError
from imagenet.checkpoint_file import decode, read_file
from imagenet.datasets import DummyImages
from imagenet.flags import can_compile
from imagenet.model import build_model
from imagenet.progress import Progress

SEED = 5


def observe(folder, rank):
    """Note the seeds of dropout and the exchanges of gradients; refuse an empty batch."""
    from imagenet import clocks

    def manual_seed(seed, original=torch.manual_seed):
        if seed != SEED:  # of the weights
            with open(folder / "seeds", "a") as file:
                file.write(f"{seed}\n")
        return original(seed)

    def hook(self, state, bucket, original=clocks.CommunicationClock._hook):
        print("the last bucket" if bucket.is_last() else "a bucket", flush=True)
        return original(self, state, bucket)

    def forward(self, images, original=torch.nn.Conv2d.forward):
        assert len(images), "some models cannot take an empty batch"
        return original(self, images)

    torch.manual_seed = manual_seed
    clocks.CommunicationClock._hook = hook
    torch.nn.Conv2d.forward = forward


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A training of two ranks for two epochs of two steps of two micro-batches: (Ranks, seeds)."""
    folder = tmp_path_factory.mktemp("observed")
    flags = ["--dummy", 24, "--batch-size", 12, "--epochs", 2, "--accumulate", 2, "--seed", SEED]
    flags += ["--checkpoints-path", folder / "checkpoints"]
    prepare = functools.partial(observe, folder)
    ranks = Ranks(folder, 2, [*SMALL_06, *flags], prepare=prepare)
    assert ranks.wait() == [0, 0], ranks.output() + ranks.output(1)
    return ranks, [int(seed) for seed in (folder / "seeds").read_text().split()]


def test_dropout_differs_in_every_micro_batch_of_every_rank(observed):
    _, seeds = observed
    assert len(seeds) == len(set(seeds)) == 2 * 2 * 2 * 2, "epochs, steps, micro-batches, ranks"


def test_ranks_exchange_gradients_once_per_step(observed):
    """However many micro-batches it has."""
    ranks, _ = observed
    assert ranks.output().count("the last bucket") == 4


def test_a_rank_without_a_test_image_leaves_the_model_alone(observed):
    ranks, _ = observed
    assert ranks.output().count("| 1 images\n") == 2


def rising_and_falling_accuracy(rank):
    """Of 10 images, 2, 5, 3 and 5 are right after the four epochs."""
    from imagenet import progress

    evaluations = [
        progress.Evaluation(loss=1.0, top1=10 * correct, top5=100.0, images=10)
        for correct in (2, 5, 3, 5)
    ]
    progress.Evaluation = lambda *args: evaluations.pop(0)


def test_best_is_the_first_epoch_of_the_best_accuracy(train, tmp_path):
    flags = ["--dummy", 20, "--batch-size", 10, "--epochs", 4]
    ranks = train("run", 1, *flags, prepare=rising_and_falling_accuracy)
    assert ranks.wait() == [0], ranks.output()
    best = decode(read_file(tmp_path / "run/checkpoints/best.pt"))
    assert (best["step"], best["best"]) == (4, 50) and final(tmp_path / "run")["best"] == 50
    assert "done: top-1 50.000%, best 50.000% after 4 epochs" in ranks.output()


def test_a_model_of_timm_is_built_for_the_classes_of_a_dataset(monkeypatch):
    args = parse_06("--dummy", 2, "--arch", "timm:resnet10t", "--channels-last")
    model = build_model(args, DummyImages(2, 32, num_classes=7))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert model.conv1[0].weight.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(UserError, match="--arch timm:nothing: no such model in timm"):
        build_model(parse_06("--dummy", 2, "--arch", "timm:nothing"), DummyImages(2, 32))
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(
        UserError, match="--arch timm:resnet10t: timm is not installed; pip install timm"
    ):
        build_model(args, DummyImages(2, 32))


def count_graphs(rank):
    def close(self, line, original=Progress.close):
        original(self, line)
        print(
            f"rank {rank} has compiled",
            torch._dynamo.utils.counters["stats"]["unique_graphs"],
            flush=True,
        )

    Progress.close = close


@pytest.mark.slow
def test_no_rank_compiles_again_for_a_piece_of_another_size(train, tmp_path):
    """Rank 0 gets pieces of 31 and 32 images, rank 1 of 32.

    A rank that compiled alone would let the other wait.
    """
    need(None if can_compile() else "no C++ compiler (apt-get install g++ python3-dev)")
    flags = ["--dummy", 253, "--batch-size", 64, "--image-size", 32, "--arch", "small_net"]
    flags += ["--epochs", 1]
    flags += ["--compile", "--channels-last", "--amp", "bf16"]
    ranks = train("run", 2, *flags, prepare=count_graphs)
    assert ranks.wait() == [0, 0], ranks.output()
    assert "31 to 32 images per process" in ranks.output()
    outputs = [(tmp_path / "run" / f"run0-rank{rank}.out").read_text() for rank in range(2)]
    counts = [int(re.search(r"has compiled (\d+)", output)[1]) for output in outputs]
    assert counts == [2, 2], "the model in training and in evaluation, on each rank"


@pytest.mark.slow
def test_a_compiled_model_with_synchronized_batch_norm_learns_the_same(train, tmp_path, one_each):
    need(None if can_compile() else "no C++ compiler (apt-get install g++ python3-dev)")
    flags = [one_each, "--batch-size", 20, "--epochs", 2, "--arch", "small_net", "--sync-bn"]
    losses = []
    for name, more in (("eager", []), ("compiled", ["--compile"])):
        ranks = train(name, 2, *flags, *more)
        assert ranks.wait() == [0, 0], ranks.output()
        log = training_log(tmp_path / name)
        losses.append([log[step]["loss"] for step in sorted(log)])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
