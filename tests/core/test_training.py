"""How 06 trains and evaluates, and what it tells of that."""

import functools
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import SMALL_06, final, new_folder, parse_06, same, script
from needs import need
from ranks import Ranks

from common.errors import UserError
from common.models import MnistNet
from common.report import Mark
from imagenet import datasets
from imagenet import progress as progress_module
from imagenet.checkpoint_file import decode, read_file
from imagenet.datasets import DummyImages, Images
from imagenet.flags import can_compile
from imagenet.loader import build_normalize
from imagenet.model import build_model, parameter_groups
from imagenet.progress import Progress
from imagenet.sampler import GlobalBatchSampler
from imagenet.weights import load_weights


def without_dropout(rank):
    torch.nn.Dropout.forward = lambda self, x: x


def test_uneven_pieces_of_a_batch_add_up_to_the_same_step(train, one_each, tmp_path):
    """Ranks and micro batches that cut a batch unevenly add up to the same step."""
    options = [one_each, "--batch-size", 10, "--epochs", 2, "--lr", 1, "--warmup-epochs", 0]
    options += ["--eval-every", 0]
    options += ["--clip-grad", 1, "--ema", 0.5, "--label-smoothing", 0.1, "--weight-decay", 0.01]
    worlds = {"one": (1, 1), "cut": (2, 2), "odd": (3, 1)}
    for name, (world_size, accumulate) in worlds.items():
        flags = [*options, "--accumulate", accumulate, "--arch", "mnist_net"]
        # The network is the last flag that counts, so it comes after those of `train`.
        flags = [*SMALL_06, *flags, "--checkpoints-path", tmp_path / name / "c"]
        ranks = Ranks(new_folder(tmp_path, name), world_size, flags, prepare=without_dropout)
        assert ranks.wait() == [0] * world_size, ranks.output()
    one, cut, odd = (
        decode(read_file(max((tmp_path / name / "c").glob("*.pt")))) for name in worlds
    )
    begun = torch.cat([(one["model"][k] - one["ema"][k]).flatten() for k in one["model"]]).norm()
    assert begun > 0.01, "it has learned, so there was something to disagree on"
    for other in (cut, odd):
        for part in ("model", "ema"):
            for name, weight in one[part].items():
                torch.testing.assert_close(other[part][name], weight, rtol=1e-4, atol=1e-5)


def prepare_plain_training(scaled, rank):
    """Ten classes, of which a model with little training is right about some.

    --amp fp16 scales gradients on a GPU. Here they are scaled in float32, to the same result.
    """
    without_dropout(rank)
    datasets.DummyImages = functools.partial(DummyImages, num_classes=10)
    if scaled:
        original = torch.amp.GradScaler
        torch.amp.GradScaler = lambda device, enabled: original(device, enabled=True)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_is_that_of_a_plain_pytorch_loop(scaled, tmp_path):
    """Two ranks, two epochs of three steps; the learning rates and the parameter groups are written
    out here.
    """
    flags = ["--dummy", 36, "--batch-size", 12, "--epochs", 2, "--arch", "mnist_net", "--seed", 5]
    flags += ["--lr", 2]
    flags += ["--warmup-epochs", 1, "--clip-grad", 0.5, "--label-smoothing", 0.2]
    flags += ["--weight-decay", 0.05]
    flags += ["--momentum", 0.7]
    files = ["--log-file", tmp_path / "log.jsonl", "--checkpoints-path", tmp_path / "checkpoints"]
    files += ["--eval-every", 0]
    prepare = functools.partial(prepare_plain_training, scaled)
    ranks = Ranks(tmp_path, 2, [*SMALL_06, *flags, *files], prepare=prepare)
    assert ranks.wait() == [0, 0], ranks.output()

    images = DummyImages(36, 32, num_classes=10)
    torch.manual_seed(5)
    model = build_model(
        SimpleNamespace(arch="mnist_net", channels_last=False, deterministic=False, batch_size=12),
        images,
    ).eval()
    named = dict(model.named_parameters())
    assert [name for name, p in named.items() if p.ndim == 1] == [
        name for name in named if name.endswith("bias")
    ]
    optimizer = torch.optim.SGD(
        [
            {
                "params": [p for name, p in named.items() if name.endswith("weight")],
                "weight_decay": 0.05,
            },
            {
                "params": [p for name, p in named.items() if name.endswith("bias")],
                "weight_decay": 0,
            },
        ],
        momentum=0.7,
        nesterov=True,
    )
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    )
    peak = 2 * 12 / 256
    losses = []
    correct = []
    for step in range(6):
        order = torch.randperm(36, generator=torch.Generator().manual_seed(5 + step // 3))
        batch = order[12 * (step % 3) :][:12] % 64
        for group in optimizer.param_groups:
            group["lr"] = (
                peak * (1 + math.cos(math.pi * step / 6)) / 2 * min(1, 0.1 + 0.9 * step / 3)
            )
        outputs = model((images.images[batch] - mean) / std)
        loss = torch.nn.functional.cross_entropy(
            outputs, images.targets[batch], label_smoothing=0.2
        )
        losses.append(loss.item())
        correct.append((outputs.argmax(1) == images.targets[batch]).sum().item())
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5, (
            "clipping changes something"
        )
        optimizer.step()

    for name, weight in final(tmp_path)["model"].items():
        torch.testing.assert_close(weight, named[name].detach(), rtol=1e-4, atol=1e-6)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [record["train_loss"] for record in records]
    assert logged == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], abs=2e-4)
    accuracies = [100 * sum(correct[:3]) / 36, 100 * sum(correct[3:]) / 36]
    assert [record["train_acc"] for record in records] == pytest.approx(accuracies, abs=1e-3)


def note_seeds(folder, rank):
    def manual_seed(seed, original=torch.manual_seed):
        if seed != 0:  # the flag --seed, before the model is built
            with open(folder / f"seeds{rank}", "a") as file:
                file.write(f"{seed}\n")
        return original(seed)

    torch.manual_seed = manual_seed


def test_dropout_differs_in_every_micro_batch_of_every_rank(train, tmp_path):
    options = ["--dummy", 24, "--batch-size", 12, "--epochs", 2, "--accumulate", 2]
    options += ["--eval-every", 0]
    assert train("run", 2, *options, prepare=functools.partial(note_seeds, tmp_path)).wait() == [
        0,
        0,
    ]
    seeds = [seed for file in tmp_path.glob("seeds*") for seed in file.read_text().split()]
    assert len(seeds) == 2 * 2 * 2 * 2 and len(set(seeds)) == len(seeds)


def tell_of_exchanges(rank):
    from imagenet import clocks

    def hook(self, state, bucket, original=clocks.CommunicationClock._hook):
        print("exchange", flush=True)
        return original(self, state, bucket)

    clocks.CommunicationClock._hook = hook


def test_ranks_exchange_gradients_once_per_step(train):
    """Ranks exchange gradients once per step however many micro batches it has."""
    exchanges = []
    for accumulate in (1, 3):
        options = ["--dummy", 24, "--batch-size", 12, "--epochs", 2, "--accumulate", accumulate]
        options += ["--eval-every", 0]
        ranks = train(f"in{accumulate}", 2, *options, prepare=tell_of_exchanges)
        assert ranks.wait() == [0, 0], ranks.output()
        exchanges.append(ranks.output().count("exchange"))
    assert exchanges[0] == exchanges[1] > 0


def test_the_averaged_weights_are_what_is_evaluated(train, one_each, tmp_path):
    """With an average that hardly moves, the evaluated model is the one after the first step."""
    options = [one_each, "--batch-size", 10, "--epochs", 2, "--lr", 1, "--warmup-epochs", 0]
    options += ["--ema", 0.999999]
    ranks = train("run", 1, *options, "--arch", "mnist_net", prepare=without_dropout)
    assert ranks.wait() == [0], ranks.output()
    accuracies = set(re.findall(r"== test: .* top-1: +([\d.]+)%", ranks.output()))
    weights = decode(read_file(max((tmp_path / "run/checkpoints").glob("step-*.pt"))))
    images, targets, _ = Images(one_each / "val", 32).__getitems__([(0, k) for k in range(40)])
    prepared = build_normalize(False, torch.device("cpu"))(images)
    correct = {}
    for part in ("model", "ema"):
        net = MnistNet(3, (32, 32), 40)
        net.load_state_dict(weights[part])
        with torch.no_grad():
            correct[part] = (net.eval()(prepared).argmax(1) == targets).float().mean().item()
    assert correct["ema"] != correct["model"] and accuracies == {f"{100 * correct['ema']:.3f}"}

    best = tmp_path / "run/checkpoints/best.pt"
    options = [one_each, "--batch-size", 17, "--arch", "mnist_net", "--evaluate"]
    again = train("again", 1, *options, "--weights", best)
    assert again.wait() == [0], again.output()
    assert re.findall(r"evaluated: .* top-1 ([\d.]+)%", again.output()) == [*accuracies]


def test_the_first_step_begins_the_average(train, tmp_path):
    """Not the untrained weights, which would weigh on it for a long time."""
    options = ["--dummy", 12, "--batch-size", 12, "--epochs", 1, "--lr", 1, "--warmup-epochs", 0]
    options += ["--ema", 0.5]
    assert train("run", 1, *options).wait() == [0]
    assert same(final(tmp_path / "run")["ema"], final(tmp_path / "run")["model"])


def test_eval_every_says_after_which_epochs_a_model_is_evaluated():
    def due(every):
        return [
            script.evaluation_due(SimpleNamespace(eval_every=every, epochs=5), epoch)
            for epoch in range(5)
        ]

    assert (
        due(2) == [False, True, False, True, True]
        and due(0) == [False] * 5
        and due(1) == [True] * 5
    )


class Silent:
    """A Progress that neither prints nor measures."""

    def __init__(self, args, d, batches, ddp):
        pass

    def __getattr__(self, name):
        return lambda *args: None

    def timed(self, loader, *args):
        return iter(loader)


def without_progress(rank):
    from imagenet import progress

    progress.Progress = Silent


def test_without_its_progress_06_ends_with_the_same_weights(train, tmp_path):
    """Without the progress object a training ends with the same weights."""
    flags = ["--dummy", 36, "--batch-size", 12, "--epochs", 2, "--accumulate", 2, "--deterministic"]
    assert train("shown", 2, *flags).wait() == [0, 0]
    silent = train("silent", 2, *flags, prepare=without_progress)
    assert silent.wait() == [0, 0] and "==" not in silent.output()
    assert same(final(tmp_path / "shown")["model"], final(tmp_path / "silent")["model"])


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


def test_every_test_image_counts_once_on_any_number_of_ranks(train, one_each, tmp_path):
    assert train("run", 1, one_each, "--epochs", 1, "--batch-size", 20, "--ema", 0.5).wait() == [0]
    best = tmp_path / "run/checkpoints/best.pt"
    net = build_model(
        SimpleNamespace(
            arch="mobilenet_v3_small", batch_size=2, channels_last=False, deterministic=False
        ),
        Images(one_each / "val", 32),
    )
    net.load_state_dict(load_weights(str(best)))
    images, targets, _ = Images(one_each / "val", 32).__getitems__([(0, k) for k in range(40)])
    with torch.no_grad():
        outputs = net.eval()(build_normalize(False, torch.device("cpu"))(images))
    answers = outputs.topk(5).indices == targets[:, None]
    loss = torch.nn.functional.cross_entropy(outputs, targets).item()
    top1 = 100 * answers[:, 0].float().mean()
    top5 = 100 * answers.any(dim=1).float().mean()
    for world_size in (1, 3):
        flags = [one_each, "--evaluate", "--weights", best, "--batch-size", 17]
        ranks = train(f"test{world_size}", world_size, *flags)
        assert ranks.wait() == [0] * world_size
        pattern = r"evaluated: loss ([\d.]+), top-1 ([\d.]+)%, top-5 ([\d.]+)%, 40 images"
        printed = re.search(pattern, ranks.output()).groups()
        assert float(printed[0]) == pytest.approx(loss, abs=6e-4)
        assert printed[1:] == (f"{top1:.3f}", f"{top5:.3f}")


def without_empty_batches(rank):
    def forward(self, images, original=torch.nn.Conv2d.forward):
        assert len(images), "some models cannot take an empty batch"
        return original(self, images)

    torch.nn.Conv2d.forward = forward


def test_a_rank_without_a_test_image_leaves_the_model_alone(train):
    ranks = train(
        "run", 2, "--dummy", 24, "--batch-size", 12, "--epochs", 1, prepare=without_empty_batches
    )
    assert ranks.wait() == [0, 0], ranks.output(1)
    assert "| 1 images |" in ranks.output()


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


@pytest.mark.slow
def test_what_a_run_tells_is_in_lines_json_and_tensorboard(train, one_each, tmp_path):
    """What a run tells stands in its lines in json and in tensorboard."""
    flags = [one_each, "--batch-size", 8, "--epochs", 2, "--sync-bn"]
    flags += ["--log-file", tmp_path / "log.jsonl"]
    ranks = train("run", 2, *flags, "--tensorboard", tmp_path / "events", "--workers", 1)
    assert ranks.wait() == [0, 0], ranks.output()
    line = (
        r"== step: \[ +5/5\] \[2/2\] \| loss: [\d.]+ \| top-1: +[\d.]+% \| \d+ img/s \| lr "
        r"[\d.e-]+ \| "
    )
    shares = re.search(
        line + r"data ([\d.]+)%, compute ([\d.]+)%, communication ([\d.]+)% \| \d+ s left",
        ranks.output(),
    )
    assert abs(sum(map(float, shares.groups())) - 100) < 0.2 and float(shares[3]) > 0
    assert (
        "global batch 8: 4 images per process at a time, 5 steps per epoch | lr 0.1 -> 0.003125"
        in ranks.output()
    )
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in records] == [1, 2]
    wanted = {
        "model": "mobilenet_v3_small",
        "world_size": 2,
        "global_batch": 8,
        "sync_bn": True,
        "backend": "gloo",
    }
    assert wanted.items() <= records[1].items() and records[1]["train_loss"] > 0
    assert (
        0 < records[1]["communication_share"] < 1
        and 0 <= records[1]["test_acc"] <= records[1]["test_top5"] <= 100
    )
    printed = re.findall(
        r"== test: \[\d/2\] .* \| top-1: +([\d.]+)% \| top-5: +([\d.]+)%", ranks.output()
    )
    assert [(float(top1), float(top5)) for top1, top5 in printed] == [
        (r["test_acc"], r["test_top5"]) for r in records
    ]
    assert any(r["test_acc"] < r["test_top5"] for r in records), (
        "there was something to mistake for the other"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert {"train/loss", "train/lr", "speed/images_per_second", "test/top1"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("test/top1")] == [5, 10]
    scalars = {}
    for name in events.Tags()["scalars"]:
        scalars[name] = {event.step: event.value for event in events.Scalars(name)}
    keys = {"test/loss": "test_loss", "test/top1": "test_acc", "test/top5": "test_top5"}
    for name, key in keys.items():
        assert scalars[name] == pytest.approx({5 * r["epoch"]: r[key] for r in records}, abs=1e-3)
    line = r"== step: .* loss: ([\d.]+) \| top-1: +([\d.]+)% \| (\d+) img/s \| "
    line += r"lr ([\d.e-]+) \| data ([\d.]+)%"
    rows = re.findall(line, ranks.output())
    assert len(rows) == 10, "--print-every 1"
    for k, (loss, top1, speed, lr, waiting) in enumerate(rows, start=1):
        assert scalars["train/loss"][k] == pytest.approx(float(loss), abs=6e-4)
        assert scalars["train/top1"][k] == pytest.approx(float(top1), abs=6e-4)
        assert scalars["train/lr"][k] == pytest.approx(float(lr), rel=1e-3)
        assert scalars["speed/images_per_second"][k] == pytest.approx(float(speed), abs=0.51)
        assert scalars["speed/data"][k] == pytest.approx(float(waiting) / 100, abs=6e-4)
        assert float(top1) <= scalars["train/top5"][k] <= 100
        assert 0 <= scalars["speed/communication"][k] <= 1


def test_a_step_line_tells_what_is_computed_by_hand(monkeypatch, capsys):
    """In the second of three epochs of ten steps, resumed after step 4 and now after step 8, 40 s
    later.
    """
    monkeypatch.setattr("imagenet.progress.time.perf_counter", lambda: 140.0)
    d = SimpleNamespace(device=torch.device("cpu"), rank=0, is_main=True, world_size=2)
    d.launcher = "torchrun"
    d.local_world_size = 2
    d.backend = "gloo"
    args = parse_06("--dummy", 100, "--batch-size", 10, "--epochs", 3)
    monkeypatch.setattr(progress_module, "CommunicationClock", lambda *_: None)
    progress = Progress(args, d, GlobalBatchSampler(100, 10, 0, 2), None)
    progress.epoch, progress.first_step = 1, 4
    progress.meter.start = progress.meter.line = Mark(100.0, 50)
    progress.meter.images = 450
    progress.totals = [30.0, 10.0, 20.0, 100.0]
    progress.waiting = SimpleNamespace(read=lambda: 10.0)
    beside_the_bar = []
    progress.console.bar = SimpleNamespace(set_postfix_str=beside_the_bar.append)
    progress.show_step(7, torch.tensor([230.0, 110.0, 320.0, 500.0]), 0.05)
    assert capsys.readouterr().out == (
        "   == step: [   8/10] [2/3] | loss: 0.500 | top-1: 25.000% | 10 img/s | lr 0.05 | data "
        "25.0%, compute 75.0% | "
        "2 min left\n"
    )
    assert beside_the_bar == ["loss 0.500, 10 img/s"]


def test_the_rate_warms_up_to_its_peak_and_falls_to_nothing():
    args = parse_06("--dummy", 2, "--batch-size", 1024, "--lr", 0.2)
    assert script.learning_rate(args, 0) == pytest.approx(0.08), (
        "a tenth of the peak of 0.2 x 1024 / 256"
    )
    at_five = 0.8 * (1 + math.cos(math.pi * 5 / 100)) / 2
    assert script.learning_rate(args, 5) == pytest.approx(at_five)
    assert script.learning_rate(args, 50) == pytest.approx(0.4) and script.learning_rate(
        args, 100
    ) == pytest.approx(0)
    for every, flags in ((30, []), (7, ["--step-epochs", 7])):
        args = parse_06("--dummy", 2, "--schedule", "step", "--warmup-epochs", 0, *flags)
        rates = [
            script.learning_rate(args, epoch)
            for epoch in (0, every - 0.1, every, 2 * every, 3 * every)
        ]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0001])


def test_norms_and_biases_do_not_decay():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2)
    )
    decayed, rest = parameter_groups(net, 5e-5)
    assert [p.shape for p in decayed["params"]] == [(4, 3, 3, 3), (2, 4)] and decayed[
        "weight_decay"
    ] == 5e-5
    assert len(rest["params"]) == 4 and rest["weight_decay"] == 0


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
