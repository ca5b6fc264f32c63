"""tools/plan.py and its model: the band, and the order of the layers."""

import re
import sys

import pytest
from processes import ROOT

from common.errors import one_line_errors
from tools import plan
from tools.planning import step_model
from tools.planning.layers import Layer, torchvision_layers
from tools.records import records

# The model


CLUSTER = step_model.Cluster(4, network=10, inside=1000, hop_inside=0.1, hop_between=0.5, start=2)


def test_an_all_reduce_between_nodes_is_a_ring_or_a_tree():
    """Counted by hand, on 2 nodes of 4 GPUs."""
    ring = 2 + (14 - 2) * 0.1 + 2 * 0.5 + 2 * 7 / 8 * 1000 / 10
    assert step_model.cluster_seconds(1000, 8, CLUSTER) == pytest.approx(ring)
    tree = 2 + 2 * (3 * 0.1 + 1 * 0.5) + 2 / 9
    assert step_model.cluster_seconds(1, 8, CLUSTER) == pytest.approx(tree), "with fewer hops"
    inside = 2 + 6 * 0.1 + 1.5
    assert step_model.cluster_seconds(1000, 4, CLUSTER) == pytest.approx(inside), "of one node"
    assert step_model.cluster_seconds(1000, 1, CLUSTER) == 0


STEP = step_model.Step(ready=(1.0, 2.0, 4.0), buckets=(10, 10, 2), total=4.5)


def test_the_band_reaches_from_no_overlap_to_perfect_overlap():
    band = step_model.efficiency_band(STEP, 8, CLUSTER, 0)
    sent = [step_model.cluster_seconds(size, 8, CLUSTER) for size in STEP.buckets]
    assert band[0] == pytest.approx(4.5 / (4.5 + sum(sent)))
    hidden = 1 + sum(sent) + 0.5  # the first bucket is ready at 1, the others wait for their turn
    assert band[1] == pytest.approx(4.5 / hidden)
    # all wait for the slowest of 8, in tables of order statistics 1.4236 deviations above the mean
    slow = step_model.efficiency_band(STEP, 8, CLUSTER, 0.1)
    assert slow[1] == pytest.approx(band[1] / 1.14236, rel=1e-4)


def test_gradients_become_ready_layer_by_layer():
    """Counted by hand: the first bucket is full at 1 MiB, later ones at 25 MiB or at the end."""
    mib = 2**20
    sizes = [(mib // 2, 10), (mib, 0), (24 * mib, 20), (9 * mib, 30), (7, 40)]
    step = step_model.layered_step(3.0, [Layer(*pair) for pair in sizes])
    assert step.buckets == (1.5 * mib, 33 * mib, 7) and step.total == 3.0
    assert step.ready == pytest.approx((1 + 0.2, 1 + 1.2, 3.0)), "the backward pass takes 2 s"


def test_the_first_gradients_of_vgg16_are_its_last_layers():
    layers = torchvision_layers("vgg16")
    assert layers[0].gradients == 4 * (4096 * 1000 + 1000)
    assert layers[-1] == (4 * (3 * 3 * 3 * 64 + 64), 224 * 224 * 64 * 27)
    assert sum(layer.gradients for layer in layers) == 4 * 138_357_544, "as torchvision says"


# The tool


NUMBERS = "--gpus 64 --step-ms 180 --network-gbit 100"


@pytest.fixture
def planned(monkeypatch, capsys):
    """A function that runs tools/plan.py with these arguments; returns {label: text}."""

    def planned(arguments):
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
        plan.main(plan.parse_args())
        return dict(re.split(": +", line) for line in capsys.readouterr().out.splitlines())

    return planned


def test_the_plan_on_the_page_is_what_the_tool_prints(planned):
    page = (ROOT / "docs/performance.md").read_text()
    (command,) = re.findall(r"<!-- output: python tools/plan.py (.*) -->", page)
    shown = next(r for r in records("output") if r["command"] == f"python tools/plan.py {command}")
    lines = dict(re.split(": +", line) for line in shown["output"].splitlines())
    assert planned(command) == lines


def test_a_plan_can_be_checked_by_hand(planned):
    """Two nodes of one GPU, and a network that needs 0.1 s for 1 GB each way: a ring of 0.1 s."""
    lines = planned(
        "--gpus 2 --gpus-per-machine 1 --step-ms 100 --gradients-mb 1000 --network-gbit 80 "
        "--jitter-percent 0 --batch-size 10"
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
    assert planned(f"{NUMBERS} --model vgg16")["gradients"] == "553 MB, ready as in vgg16"


def test_a_mistake_is_one_line(planned, capsys):
    unknown = "its 346 MB of gradients is not known; give --gradients-mb"
    for arguments, message in (
        (NUMBERS, "one of the arguments --gradients-mb --model is required"),
        (f"{NUMBERS} --gradients-mb 0", "'0' given, expected a number above 0"),
        (f"{NUMBERS} --model vit_b_16", unknown),
        (f"{NUMBERS} --model resnet5", "--model resnet5: no such model"),
    ):
        with pytest.raises(SystemExit) as end, one_line_errors():
            planned(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and ".py: error: " in line and message in line
