"""tools/plan.py and its model: the band, the order of the layers, and what others published."""

import re
import sys

import pytest
import torch
from processes import ROOT

from common.errors import UserError, one_line_errors
from tools import plan
from tools.book import goodput, step_model
from tools.book.layers import Layer, layers_of, torchvision_layers
from tools.records import published, records

# The band


STEP = step_model.Step(ready=(1.0, 2.0, 4.0), buckets=(10, 10, 2), total=4.5)
CLUSTER = step_model.Cluster(4, network=10, inside=1000)


def test_the_band_reaches_from_no_overlap_to_perfect_overlap():
    band = step_model.efficiency_band(STEP, 8, CLUSTER, 0)
    sent = [step_model.cluster_seconds(size, 8, CLUSTER) for size in STEP.buckets]
    assert band[0] == pytest.approx(4.5 / (4.5 + sum(sent)))
    hidden = 1 + sum(sent) + 0.5  # the first bucket is ready at 1, the others wait for their turn
    assert band[1] == pytest.approx(4.5 / hidden)
    assert step_model.distance(0.5, (0.6, 0.8)) == pytest.approx(-0.1)
    assert step_model.distance(0.9, (0.6, 0.8)) == pytest.approx(0.1)
    assert step_model.distance(0.6, (0.6, 0.8)) == 0 == step_model.distance(0.7, (0.6, 0.8))


# The order of the layers


def test_gradients_become_ready_layer_by_layer():
    """Counted by hand: the first bucket is full at 1 MiB, later ones at 25 MiB or at the end."""
    mib = 2**20
    layers = [
        Layer(mib // 2, 10),
        Layer(mib, 0),
        Layer(24 * mib, 20),
        Layer(9 * mib, 30),
        Layer(7, 40),
    ]
    step = step_model.layered_step(3.0, layers)
    assert step.buckets == (1.5 * mib, 33 * mib, 7) and step.total == 3.0
    assert step.ready == pytest.approx((1 + 0.2, 1 + 1.2, 3.0)), "the backward pass takes 2 s"


def test_the_first_gradients_of_vgg16_are_its_last_layers():
    layers = torchvision_layers("vgg16")
    assert [layer.gradients // 4 for layer in layers[:3]] == [
        4096 * 1000 + 1000,
        4096 * 4096 + 4096,
        512 * 7 * 7 * 4096 + 4096,
    ]
    assert layers[-1] == (4 * (3 * 3 * 3 * 64 + 64), 224 * 224 * 64 * 27)
    assert sum(layer.gradients for layer in layers) == 4 * 138_357_544, "as torchvision says"
    step = step_model.layered_step(0.4, layers)
    assert sum(
        size for t, size in zip(step.ready, step.buckets, strict=True) if t < 0.2
    ) > 0.85 * sum(step.buckets)


@pytest.mark.parametrize(
    ("name", "weights"), [("resnet50", 25_557_032), ("regnet_x_400mf", 5_495_976)]
)
def test_every_weight_of_a_model_is_counted(name, weights):
    """Also of a RegNet, which cannot be built on the meta device."""
    assert sum(layer.gradients for layer in torchvision_layers(name)) == 4 * weights


class Pair(torch.nn.Module):
    """A model with two outputs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, device="meta")

    def forward(self, images):
        return self.linear(images), images


def test_a_model_whose_order_is_not_known_is_refused_by_name():
    with pytest.raises(UserError, match=r"^vit_b_16: has weights outside of .* its 346 MB of "):
        torchvision_layers("vit_b_16")
    with pytest.raises(UserError, match=r"^resnet5: no such model"):
        torchvision_layers("resnet5")
    images = torch.empty(1, 3, device="meta")
    with pytest.raises(UserError, match=r"^pair: returns a tuple, expected one tensor"):
        layers_of(Pair(), images, "pair")
    shared = torch.nn.Linear(3, 3, device="meta")
    with pytest.raises(UserError, match=r"^shared: .* uses a layer twice"):
        layers_of(torch.nn.Sequential(shared, shared), images, "shared")


# Published results


OUTSIDE = {  # points by which the model misses what others published: 10 of 21 are in its band
    "DLPerf, ResNet-50, PyTorch": -2.0,
    "DLPerf, ResNet-50, PyTorch with DALI, AMP": -3.4,
    "DLPerf, ResNet-50, TensorFlow with Horovod": -9.6,
    "DLPerf, ResNet-50, MXNet with Horovod": -1.0,
    "DLPerf, ResNet-50, OneFlow": 2.0,
    "DLPerf, BERT-base, PyTorch": -0.3,
    "NVIDIA, ResNet-50, DGX A100, TF32": -0.3,
    "NVIDIA, ResNet-50, DGX A100, AMP": -12.2,
    "NVIDIA, ResNet-50, DGX-1, AMP": -9.7,
    "NVIDIA, ResNet-50, MXNet, DGX-2": -0.9,
    "NVIDIA, ResNet-50, MXNet, DGX-2, AMP": -5.4,
}


def test_the_pages_say_how_far_published_results_are_outside_the_model():
    runs = published()["scaling"]
    assert len(runs) == 21
    for name, run in runs.items():
        outside = 100 * step_model.distance(run["efficiency"], step_model.published_band(run))
        assert outside == pytest.approx(OUTSIDE.get(name, 0), abs=0.06), name


@pytest.mark.parametrize("name", published()["scaling"])
def test_a_published_efficiency_is_the_quotient_of_the_speeds_in_its_source(name):
    run = published()["scaling"][name]
    speeds = re.search(
        r"([\d.]+) \w+ per second on one GPU with batches of (\d+), ([\d.]+) on (\d+)$",
        run["source"],
    )
    if speeds is None:
        assert name.startswith(("Goyal", "Horovod"))
        return
    one, batch, all_together, devices = map(float, speeds.groups())
    assert run["devices"] == devices
    assert run["seconds_per_step"] == pytest.approx(batch / one, abs=1e-4)
    assert run["efficiency"] == pytest.approx(all_together / one / devices, abs=5e-4)


# The tool


NUMBERS = "--gpus 64 --step-ms 180 --network-gbit 100"


def planned(arguments, monkeypatch, capsys):
    """Return what tools/plan.py prints, as {label: text}."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    plan.main(plan.parse_args())
    return dict(re.split(": +", line) for line in capsys.readouterr().out.splitlines())


def refused(arguments, monkeypatch, capsys):
    """Return the line with which tools/plan.py refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    with pytest.raises(SystemExit) as end, one_line_errors():
        plan.main(plan.parse_args())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_plan_on_the_page_is_what_the_tool_prints(monkeypatch, capsys):
    page = (ROOT / "docs/performance.md").read_text()
    (command,) = re.findall(r"<!-- output: python tools/plan.py (.*) -->", page)
    shown = next(r for r in records("output") if r["command"] == f"python tools/plan.py {command}")
    lines = planned(command, monkeypatch, capsys)
    assert lines == dict(re.split(": +", line) for line in shown["output"].splitlines())


def test_a_plan_can_be_checked_by_hand(monkeypatch, capsys):
    """Two nodes of one GPU, and a network that needs 0.1 s for 1 GB each way: a ring of 0.1 s."""
    lines = planned(
        "--gpus 2 --gpus-per-machine 1 --step-ms 100 --gradients-mb 1000 --network-gbit 80 "
        "--jitter-percent 0 --batch-size 10",
        monkeypatch,
        capsys,
    )
    assert lines["GPUs"] == "2, 1 per machine, with 80 Gbit/s"
    assert lines["gradients"] == "1000 MB, ready evenly"
    slow, fast = map(int, re.fullmatch(r"(\d+) to (\d+) ms", lines["training step"]).groups())
    assert slow == 201, "0.1 s of computing, then 0.1 s of sending and 38 starts of 24 us"
    # the first bucket of 38 is ready after a third of the step and a 38th of the rest
    assert fast == pytest.approx(1000 * (0.1 / 3 + 0.2 / 3 / 38 + 0.1009), abs=1)
    assert lines["efficiency"].startswith(f"{10000 / slow:.0f} % to {10000 / fast:.0f} %")
    images = [int(word) for word in lines["images/s"].split(" to ")]
    assert images == pytest.approx([20 / (slow / 1000), 20 / (fast / 1000)], rel=0.01)


def test_jitter_and_slow_links_cost_efficiency(monkeypatch, capsys):
    def efficiency(more):
        line = planned(f"{NUMBERS} --gradients-mb 440 {more}", monkeypatch, capsys)["efficiency"]
        return [int(word) for word in re.findall(r"(\d+) %", line)]

    usual = efficiency("")
    assert all(a < b for a, b in zip(efficiency("--jitter-percent 10"), usual, strict=True))
    assert efficiency("--gpus 8 --inside-gbytes 5")[0] < efficiency("--gpus 8")[0]
    assert efficiency("--gpus 8 --gpus-per-machine 4")[0] < efficiency("--gpus 8")[0]


def test_a_model_brings_its_own_gradients(monkeypatch, capsys):
    even = planned(f"{NUMBERS} --gradients-mb 553.43", monkeypatch, capsys)
    layers = planned(f"{NUMBERS} --model vgg16", monkeypatch, capsys)
    assert layers["gradients"] == "553 MB, ready as in vgg16"
    assert layers["efficiency"] != even["efficiency"] and "images/s" not in layers


def test_how_often_to_save_follows_from_failures_and_costs(monkeypatch, capsys):
    """Without a failure rate, from the worst to the best published one."""
    given = f"{NUMBERS} --gradients-mb 440 --save-seconds 20 --restart-minutes 30"
    one = planned(f"{given} --hours-between-failures 640", monkeypatch, capsys)
    assert one["failure every"] == "10 hours"
    assert one["save every"] == "20 minutes", "sqrt(2 * 20 s * 10 h), and Daly's terms"
    lost = 20 / 1200 + 600 / 36000 + 1800 / 36000  # saved, half an interval, restarted
    assert float(one["goodput"].removesuffix(" %")) == pytest.approx(100 * (1 - lost), abs=0.5)

    slow = planned(
        f"{given} --hours-between-failures 640 --write-seconds 3600", monkeypatch, capsys
    )
    assert slow["save every"] == "60 minutes", "never two at a time"
    assert float(slow["goodput"].split()[0]) < float(one["goodput"].split()[0]) - 10

    worst, best = (
        planned(f"{given} --hours-between-failures {seconds / 3600}", monkeypatch, capsys)
        for seconds in (goodput.gpu_lifetimes()[name] for name in ("RSC-1", "RSC-2"))
    )
    both = planned(given, monkeypatch, capsys)
    for label in ("failure every", "save every", "goodput"):
        assert both[label] == f"{worst[label]} to {best[label]}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(90, "2 minutes"), (7199, "120 minutes"), (7200, "2.0 hours"), (36000, "10 hours")],
)
def test_a_time_is_in_minutes_below_two_hours(seconds, text):
    assert plan.duration(seconds) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (NUMBERS, "one of the arguments --gradients-mb --model is required"),
        (f"{NUMBERS} --gradients-mb 0", "'0' given, expected a number above 0"),
        (
            f"{NUMBERS} --model vit_b_16",
            "its 346 MB of gradients is not known; give --gradients-mb",
        ),
        (f"{NUMBERS} --model resnet5", "--model resnet5: no such model"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, capsys):
    line = refused(arguments, monkeypatch, capsys)
    assert line.startswith("plan.py: error: ") or ".py: error: " in line
    assert message in line
