"""What the pages claim holds in results/: no change of the code breaks these, but a new recording
may.
"""

import statistics
import sys

from processes import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import charts

from tools.records import group, published, ratios, read, records, select


def test_the_published_accuracies_are_reproduced():
    for epoch, theirs in ((1, 39.2), (5, 65.1)):
        same = select(records("accuracy"), world_size=1, epoch=epoch)
        accuracies = [record["train_acc"] for record in same]
        assert len(accuracies) >= 3 and abs(statistics.mean(accuracies) - theirs) < 1.5
    last = charts.last_epochs("accuracy", read(ROOT / f"results/accuracy/{charts.OURS}.jsonl"))
    for run in published()["cifar10"]["runs"]:
        settings = {name: run[name] for name in ("world_size", "batch_size", "lr")}
        ours = [r["train_acc"] for r in select(last, **settings, warmup_epochs=0)]
        assert ours and abs(charts.mean(ours) - run["train_acc"][-1]) < 2, settings


def test_the_first_runs_reach_the_accuracy_of_the_page():
    runs = records("first_runs")
    mnist = select(runs, dataset="mnist", model="mnist_net", epoch=2)
    shapes = select(runs, dataset="shapes", limit=None, epoch=5)
    assert mnist and all(r["test_acc"] > 98 for r in mnist)
    assert shapes and all(r["test_acc"] > 90 for r in shapes)
    imagenet = records("imagenet")
    cifar10 = select(imagenet, dataset="data/cifar10")
    assert max(r["test_acc"] for r in cifar10 if "test_acc" in r) > 60  # with --eval-every, not all
    losses = [r["train_loss"] for r in select(imagenet, dataset="data/imagenet-mini")]
    assert losses[-1] < losses[0] - 0.5


def test_06_and_its_loader_are_as_fast_as_the_pages_say():
    for (device, _, size), runs in group(
        records("train"), "device", "command", "image_size"
    ).items():
        kinds = group(runs, "run")
        if "bare" in kinds:  # not beside --compile
            assert round(statistics.median(ratios(kinds["dummy"], kinds["bare"])), 2) >= 0.97
        # smaller ones cost their decoding, which is the same for both
        if device == "cpu" and size == 224:
            assert statistics.median(ratios(kinds["our loader"], kinds["classic loader"])) >= 1.4
    cpu = select(records("input"), device="cpu")
    for data_dir, ours, other, least in (
        ("data/cifar10", "01", "limit", 0.95),
        ("data/cifar10", "01", "classic, memory", 1.05),
        ("data/cifar10", "01", "classic, files", 1.25),
        ("data/imagenet-mini", "our loader", "classic loader", 1.4),
    ):
        loops = group(select(cpu, data_dir=data_dir), "loop")
        assert statistics.median(ratios(loops[ours], loops[other])) >= least, (ours, other)


def test_no_recorded_drill_failed_or_lost_more_than_it_may():
    runs = {r["drill"]: r for r in records("drill")}
    for name, r in runs.items():
        most = (2 if name == "damage" else 1) * r["checkpoint_every"]
        assert not r["failed"] and r["steps_lost"] <= most, name
    assert runs["kills"]["kills"] >= 20 and runs["join"]["steps_lost"] == 0
