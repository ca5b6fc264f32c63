"""The notebooks draw what is recorded, on any machine, and refuse what they cannot draw."""

import base64
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import matplotlib.image
import matplotlib.pyplot as plt
import nbclient
import nbformat
import numpy as np
import pytest
from images import write_images
from PIL import Image
from processes import ROOT
from ranks import Ranks

sys.path.insert(0, str(ROOT / "notebooks"))

import charts

from tools import experiments, records
from tools.book import step_model
from tools.records import RecordError

PICTURES = ("resnet20", "memory", "my_ddp")
NOTEBOOKS = [name for name in experiments.EXPERIMENTS if name not in PICTURES]
FIGURES = (*NOTEBOOKS, "goodput", "planning", "syncbn_published")  # two notebooks draw several


def cells(name, kind="code"):
    return [
        cell
        for cell in json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.fixture
def draw(monkeypatch, tmp_path, capsys):
    """Run the cells of a notebook in this process, which spares the seconds of a kernel, and return
    what it printed.

    A function (name, machine, results) -> text.
    """
    plt.switch_backend("Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(charts, "FIGURES", tmp_path / "figures")

    def draw(name, machine=charts.OURS, results=ROOT / "results"):
        monkeypatch.setattr(charts, "MACHINE", machine)
        monkeypatch.setattr(records, "RESULTS", results)
        space = {}
        capsys.readouterr()
        for k, cell in enumerate(cells(name)):
            exec(compile("".join(cell["source"]), f"{name}, code cell {k}", "exec"), space)
        return capsys.readouterr().out

    yield draw
    plt.close("all")


def fork(command, folder):
    """The records of a command of an experiment, as experiments.execute() returns them.

    Its processes are forked, which spares the seconds of importing torch: test_experiments.py
    starts them as they are.
    """
    variables, program, *words = re.fullmatch(
        r"((?:\w+=\S+ )*)(python|torchrun) (.*)", command
    ).groups()
    words = shlex.split(*words)
    launcher = [words.pop(0) for _ in range(2)] if program == "torchrun" else ["--nproc-per-node=1"]
    assert launcher[-1].startswith("--nproc-per-node="), command
    script, *given = words
    log = folder / f"{len(list(folder.iterdir()))}.jsonl"
    world_size = int(launcher[-1].partition("=")[2])
    env = dict(word.split("=") for word in variables.split())
    ranks = Ranks(folder, world_size, [*given, "--log-file", log], script=script, env=env)
    assert set(ranks.wait()) == {0}, ranks.output()
    return [record | {"command": command, "launch_seconds": 1.0} for record in records.read(log)]


@pytest.fixture(scope="session")
def fresh_results(tmp_path_factory):
    """The results of all experiments, run here and now with a small network and few images."""
    runs, folder = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("fresh")
    write_images(folder, "train", (32, 32))
    write_images(folder, "test", (32, 32))
    given = ["--machine", "tiny", "--repeats", "1", "--data-dir", str(folder)]
    small = ["--arch", "mnist_net"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "RESULTS", folder / "results")
        patch.setattr(experiments, "SYNCBN_BATCHES", (2,))
        patch.setattr(experiments, "slurm_answers", lambda: False)
        patch.setattr(experiments, "execute", lambda command: fork(command, runs))
        for name, more in (
            ("speed", [*small, "--processes", "2", "--limit", "256"]),
            ("syncbn", ["--processes", "2"]),
            ("accuracy", [*small, "--processes", "1", "2", "--epochs", "2"]),
            ("scaling", [*small, "--processes", "1", "2", "3"]),
        ):
            patch.setattr(sys, "argv", ["experiments.py", name, *given, *more])
            experiments.main(experiments.parse_args())
    return folder / "results"


# From what is recorded


@pytest.mark.slow
def test_make_charts_runs_every_notebook_in_a_fresh_kernel(tmp_path):
    env = os.environ | {"FIGURES": str(tmp_path), "VIRTUAL_ENV": sys.prefix}
    end = subprocess.run(["make", "charts"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.png" for name in FIGURES
    )
    if matplotlib.__version_info__ < (3, 11):
        pytest.skip("the figures are drawn with matplotlib 3.11, which needs Python 3.11")
    for name in FIGURES:
        fresh, kept = (
            matplotlib.image.imread(folder / f"{name}.png")
            for folder in (tmp_path, ROOT / "docs/figures")
        )
        assert fresh.shape == kept.shape, f"docs/figures/{name}.png: make charts"
        assert (abs(fresh - kept).max(axis=-1) > 0.2).mean() < 0.002, (
            f"docs/figures/{name}.png: make charts"
        )


@pytest.mark.slow
def test_make_charts_leaves_out_what_a_machine_has_not_recorded():
    end = subprocess.run(
        ["make", "charts", "MACHINE=nobody"], cwd=ROOT, capture_output=True, text=True
    )
    assert end.returncode == 2 and "nothing in results/ for MACHINE=nobody" in end.stderr
    for name in NOTEBOOKS:
        assert f"skipping {name}, which is not recorded: " in end.stdout
        assert f"tools/experiments.py {name} --machine nobody\n" in end.stdout


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_the_docs_is_drawn_from_what_is_recorded_now(name, monkeypatch):
    monkeypatch.setattr(charts, "MACHINE", charts.OURS)
    source = Image.open(ROOT / f"docs/figures/{name}.png").text["Source"]
    assert source == charts.fingerprint(name), f"docs/figures/{name}.png is stale: make charts"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_says_on_what_was_measured_and_how_often(name, draw):
    out = draw(name)
    first = records.read(ROOT / f"results/{name}/{charts.OURS}.jsonl")[0]
    assert f"{first['device_name']}, {first['cores']} cores, torch {first['torch']}" in out
    assert f"results/{name}/{charts.OURS}.jsonl: " in out and " runs, 20" in out


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_holds_the_charts_and_the_numbers_of_now(name, draw):
    """A notebook holds the charts and the numbers of now and tells how to add a machine."""
    outputs = [output for cell in cells(name) for output in cell["outputs"]]
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {
        "stdout"
    }, "no warnings"
    stored = "".join(
        "".join(output["text"]) for output in outputs if output["output_type"] == "stream"
    )
    printed = [re.sub(r"figure: \S+/", "figure: ", text) for text in (stored, draw(name))]
    assert printed[0] == printed[1], f"notebooks/{name}.ipynb is stale: make charts"
    assert (
        sum("image/png" in output.get("data", {}) for output in outputs)
        == stored.count("figure: ")
        >= 1
    )
    text = "".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    assert "## Your own machine" in text and f"python tools/experiments.py {name}" in text
    assert "make charts MACHINE=" in text


def test_the_speed_of_a_run_leaves_out_the_first_epoch():
    """The speed of a run is the mean of its epochs without the first."""
    run = {"started": "now", "command": "x"}
    epochs = [
        run | {"epoch": k, "images_per_second": speed}
        for k, speed in ((1, 10.0), (2, 30.0), (3, 50.0))
    ]
    assert charts.steady(epochs) == [epochs[2] | {"images_per_second": 40.0}]
    assert charts.steady(epochs[:1]) == epochs[:1]


# From fresh runs


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_draws_a_fresh_experiment(name, draw, fresh_results, tmp_path):
    out = draw(name, "tiny", fresh_results)
    assert f"results/{name}/tiny.jsonl: " in out and f"{name}-tiny.png" in out
    pixels = matplotlib.image.imread(tmp_path / f"figures/{name}-tiny.png")
    assert pixels.shape[1] > 1000 and pixels[..., :3].std() > 0.05, "something is drawn"


@pytest.mark.slow
def test_fresh_records_hold_what_was_measured(fresh_results):
    by = {name: records.records(name, fresh_results) for name in NOTEBOOKS}
    assert {r["script"][:2] for r in by["speed"]} == {"01", "02", "03", "04"}
    assert {(r["world_size"], r["batch_size"], r["sync_bn"]) for r in by["syncbn"]} == {
        (1, 4, False),
        (2, 2, False),
        (2, 2, True),
    }
    reduces, steps = (
        records.select(by["scaling"], bench="all_reduce"),
        records.select(by["scaling"], bench="step"),
    )
    assert {r["world_size"] for r in reduces} == {2, 3} and {r["world_size"] for r in steps} == {
        1,
        2,
        3,
    }
    assert len({r["bytes"] for r in reduces}) == 9
    for r in steps:
        assert len(r["ready_seconds"]) == len(r["bucket_bytes"]) and r["ready_seconds"] == sorted(
            r["ready_seconds"]
        )
        assert r["ready_seconds"][0] > 0 and r["ready_seconds"][-1] < r["compute_seconds"]
    weights = sum(steps[0]["bucket_bytes"]) / 4
    assert weights == 9 * 3 * 32 + 32 + 9 * 32 * 64 + 64 + 64 * 14 * 14 * 128 + 128 + 128 * 2 + 2, (
        "all of mnist_net's"
    )


# What cannot be drawn


@pytest.fixture
def spoil(tmp_path):
    """Write an experiment's records here, changed by a function that gets the list of them; returns
    the folder.
    """

    def spoil(name, change):
        path = tmp_path / "results" / name / f"{charts.OURS}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = records.read(ROOT / f"results/{name}/{charts.OURS}.jsonl")
        path.write_text("".join(json.dumps(record) + "\n" for record in change(lines)))
        return tmp_path / "results"

    return spoil


DRAWN = {
    "speed": "images_per_second",
    "syncbn": "test_acc",
    "accuracy": "train_acc",
    "scaling": "seconds",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_missing_or_wrong_column_is_named_with_its_line(name, draw, spoil):
    column = DRAWN[name]

    def without(lines):
        del lines[2][column]
        return lines

    with pytest.raises(RecordError, match=rf"{charts.OURS}\.jsonl, line 3: no column '{column}'"):
        draw(name, results=spoil(name, without))
    with pytest.raises(
        RecordError, match=rf"line 2: {column} is 'fast', expected a value of type float"
    ):
        draw(
            name,
            results=spoil(name, lambda lines: [lines[0], lines[1] | {column: "fast"}, *lines[2:]]),
        )
    with pytest.raises(RecordError, match=rf"line 1: {column} is nan, expected"):
        draw(
            name, results=spoil(name, lambda lines: [lines[0] | {column: float("nan")}, *lines[1:]])
        )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_an_empty_results_folder_says_how_to_fill_it(name, draw, spoil, tmp_path):
    command = f"record some: python tools/experiments.py {name} --machine {charts.OURS}"
    with pytest.raises(RecordError, match=rf"no .*results/{name}/{charts.OURS}\.jsonl; {command}"):
        draw(name, results=tmp_path / "results")
    with pytest.raises(RecordError, match=rf"holds no such records.*; {command}"):
        draw(name, results=spoil(name, lambda lines: []))


@pytest.mark.parametrize("name", ["speed", "syncbn", "accuracy"])
def test_runs_that_cannot_be_compared_are_not_drawn_together(name, draw, spoil):
    with pytest.raises(
        RecordError, match=r"mixes runs with model .*record quick trials under another name"
    ):
        draw(name, results=spoil(name, lambda lines: [*lines, lines[-1] | {"model": "mnist_net"}]))
    column = {"speed": "limit", "syncbn": "epoch", "accuracy": "epoch"}[name]
    with pytest.raises(RecordError, match=rf"mixes runs with {column} "):
        draw(
            name,
            results=spoil(name, lambda lines: [*lines, lines[0] | {column: 2, "started": "2026"}]),
        )


@pytest.mark.parametrize(("device", "cores"), [("cuda", 64), ("cpu", 1)])
def test_the_speed_of_one_device_alone_is_drawn_too(device, cores, draw, spoil):
    def of_one(lines):
        lines = [r for r in lines if r["world_size"] == 1 and r["cpu_threads"] == 1]
        return [r | {"device": device, "cores": cores} for r in lines]

    out = draw("speed", results=spoil("speed", of_one))
    assert re.search(r"^01, one process, 1 thread +\d+ .* 1\.00 \(1\.00 to 1\.00\)", out, re.M)
    assert re.search(r"^03, torchrun, 1 processes +\d+ ", out, re.M)


SERIES = {  # name -> a series of the figure, and which records it is drawn from
    "speed": (
        "DDP, global batch of 128 images",
        lambda r: r["script"].startswith("03") and r["global_batch"] == 128,
    ),
    "syncbn": ("with SyncBN", lambda r: r["sync_bn"]),
    "accuracy": ("with warm-up", lambda r: r["warmup_epochs"]),
}


@pytest.mark.parametrize("name", SERIES)
def test_a_series_without_data_is_not_left_out_in_silence(name, draw, spoil):
    label, belongs = SERIES[name]
    with pytest.raises(RecordError, match=f"nothing to draw for '.*{label}.*'"):
        draw(name, results=spoil(name, lambda lines: [r for r in lines if not belongs(r)]))


def test_scaling_needs_world_sizes_to_fit_and_others_to_predict(draw, spoil):
    with pytest.raises(
        RecordError, match=r"world sizes \[2\] recorded, expected 1 and two more at least"
    ):
        draw(
            "scaling",
            results=spoil("scaling", lambda lines: [r for r in lines if r["world_size"] < 3]),
        )


def test_a_figure_without_data_or_names_is_not_saved(tmp_path, monkeypatch):
    plt.switch_backend("Agg")
    monkeypatch.setattr(charts, "FIGURES", tmp_path)
    fig, ax = plt.subplots()
    ax.set(xlabel="processes", ylabel="speed", title="Nothing")
    with pytest.raises(RecordError, match=r"speed: axes 1 \('Nothing'\) shows no data"):
        charts.save(fig, "speed")
    ax.plot([1, 2], [3, 4])
    for name in ("xlabel", "ylabel"):
        ax.set(xlabel="processes", ylabel="speed")
        ax.set(**{name: ""})
        with pytest.raises(RecordError, match="has an axis without a name"):
            charts.save(fig, "speed")
    assert not list(tmp_path.iterdir())
    plt.close(fig)


# The notebook for two GPUs

KAGGLE = "/kaggle/input"  # where the notebook looks for a data set
NOT_ATTACHED = (".git", ".venv*", "data", "checkpoints", "docs", "results", "site", "__pycache__")


def test_the_notebook_for_two_gpus_is_stored_without_outputs():
    assert not [cell["id"] for cell in cells("kaggle") if cell["outputs"]]


@pytest.mark.slow
def test_the_notebook_for_two_gpus_runs_from_a_data_set(tmp_path):
    """Where there are no two GPUs, it trains on two CPU processes."""
    (tmp_path / "work").mkdir()
    attached = tmp_path / "input/a-data-set/ladder"
    shutil.copytree(ROOT, attached, ignore=shutil.ignore_patterns(*NOT_ATTACHED))
    notebook = nbformat.read(ROOT / "notebooks/kaggle.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(KAGGLE, str(tmp_path / "input"))
    where = {"metadata": {"path": str(tmp_path / "work")}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert text.count("world size 1 |") == 2 and text.count("world size 2 (2 on this machine)") == 2
    assert "DataParallel over" in text and "done: test loss" in text
    for rank in (0, 1):
        assert re.search(rf"^rank {rank} of 2 on \S+: 3.00 x \+ 1.00$", text, re.M)
    drawn = re.findall(r"^(0\d)_\w+\.py +(\d+) img/s +test accuracy", text, re.M)
    assert [number for number, _ in drawn] == ["01", "02", "03", "04"]
    (chart,) = [output for output in outputs if output.output_type == "display_data"]
    pixels = plt.imread(io.BytesIO(base64.b64decode(chart.data["image/png"])))
    assert pixels.shape[1] > 800 and pixels[..., :3].std() > 0.05, "something is drawn"


def test_the_notebook_for_two_gpus_gets_the_repository_by_git(tmp_path, monkeypatch, capsys):
    first = "".join(cells("kaggle")[0]["source"])
    first = first.replace(KAGGLE, str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    exec(first.replace("URL-OF-THIS-REPOSITORY", str(ROOT)), {})
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'ladder'}\n")
    assert (tmp_path / "ladder/01_snsc.py").exists()
    monkeypatch.chdir(tmp_path)
    exec(first, {})  # again, without git
    assert "using the folder ladder" in capsys.readouterr().out


# The model of a step


def test_a_ring_sends_each_part_round_twice():
    """Counted: the rounds of a ring, and the bytes that each device sends in them."""
    for devices, size in ((2, 1000), (5, 1000), (8, 64)):
        rounds = 2 * (devices - 1)
        sent = rounds * size / devices
        assert step_model.ring_seconds(size, devices, 0.5, 10) == pytest.approx(
            rounds * 0.5 + sent / 10
        )
    assert step_model.ring_seconds(1000, 1, 0.5, 10) == 0


@pytest.mark.parametrize("ring", [step_model.ring_seconds, step_model.shared_ring_seconds])
def test_the_fit_finds_the_latency_and_the_bandwidth(ring):
    """The fit finds the latency and the bandwidth that made the times."""
    sizes = [(size, n) for size in (1e3, 1e5, 1e7) for n in (2, 4, 8)]
    assert step_model.fit_ring(
        ring, [(*at, ring(*at, 3e-4, 2e9)) for at in sizes]
    ) == pytest.approx((3e-4, 2e9))
    falling = [
        (size, n, ring(size, n, 1e-4, 1e9) - (1e-4 if size < 1e4 else 0)) for size, n in sizes
    ]
    latency, bandwidth = step_model.fit_ring(ring, falling)
    assert latency >= 0 and bandwidth > 0, "never less than nothing, whatever was measured"


STEP = step_model.Step(ready=(1.0, 2.0, 4.0), buckets=(10, 10, 2), total=4.5)


def test_sending_hides_behind_the_backward_pass():
    """Sending hides behind the backward pass but for the last bucket."""

    def seconds(per_byte, overlap=1.0):
        return step_model.step_seconds(STEP, lambda size: size * per_byte, overlap)

    assert seconds(0) == 4.5
    assert seconds(0.1) == pytest.approx(4.5 + 0.2), (
        "the first two are sent by 2 and by 3, the last from 4 to 4.2"
    )
    assert seconds(0.2) == pytest.approx(1 + 2 + 2 + 0.4 + 0.5), (
        "each waits for the one before: 3, then 5, then 5.4"
    )
    assert seconds(0.2, overlap=0) == pytest.approx(4.5 + 22 * 0.2)
    assert seconds(0.2, overlap=0.5) == pytest.approx((5.9 + 8.9) / 2)


def test_the_overlap_is_found_again_and_never_beyond_all_or_none():
    def all_reduce(size):
        return size / 5

    for overlap in (0.0, 0.3, 1.0):
        seconds = step_model.step_seconds(STEP, all_reduce, overlap)
        assert step_model.fit_overlap([(STEP, all_reduce, seconds)]) == pytest.approx(overlap)
    assert step_model.fit_overlap([(STEP, all_reduce, 100.0)]) == 0
    assert (
        step_model.efficiency(STEP, lambda size: 0) == 1 > step_model.efficiency(STEP, all_reduce)
    )


CLUSTER = step_model.Cluster(4, network=10, inside=1000, hop_inside=0.1, hop_between=0.5, start=2)


def test_an_all_reduce_between_nodes_is_a_ring_or_a_tree():
    """Counted by hand, on 2 nodes of 4 GPUs."""
    ring = 2 + (14 - 2) * 0.1 + 2 * 0.5 + 2 * 7 / 8 * 1000 / 10
    tree = 2 + 2 * (3 * 0.1 + 1 * 0.5) + 2 * 1000 / 9
    assert step_model.cluster_seconds(1000, 8, CLUSTER) == pytest.approx(ring) and ring < tree
    assert step_model.cluster_seconds(1, 8, CLUSTER) == pytest.approx(2 + 2 * 0.8 + 2 / 9), (
        "a tree has fewer hops"
    )
    assert step_model.cluster_seconds(1000, 4, CLUSTER) == pytest.approx(2 + 6 * 0.1 + 1.5), (
        "the links of one node"
    )
    assert step_model.cluster_seconds(1000, 1, CLUSTER) == 0
    few, many = (step_model.cluster_seconds(1, n, CLUSTER) for n in (512, 4096))
    assert many - few == pytest.approx(2 * 3 * 0.5), (
        "eight times the nodes are three more levels of the tree"
    )


def test_all_wait_for_the_slowest():
    assert step_model.slowest(1, 0.5) == pytest.approx(1)
    assert step_model.expected_maximum(2) == pytest.approx(1 / np.pi**0.5, abs=1e-5), (
        "in closed form"
    )
    for devices, expected in ((8, 1.4236), (100, 2.5076)):  # tables of order statistics
        assert step_model.expected_maximum(devices) == pytest.approx(expected, abs=1e-4)
    draws = np.random.default_rng(0).normal(1, 0.02, (2000, 256)).max(axis=1).mean()
    assert draws == pytest.approx(step_model.slowest(256, 0.02), abs=0.001)
    perfect = step_model.Cluster(8, 1e15, 1e15, 0, 0, 0)
    assert step_model.cluster_efficiency(STEP, 256, perfect, 0.02) == pytest.approx(
        1 / step_model.slowest(256, 0.02)
    )
