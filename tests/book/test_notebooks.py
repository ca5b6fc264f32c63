"""The notebooks draw what is recorded, on any machine."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys

import matplotlib.pyplot as plt
import nbclient
import nbformat
import pytest
from PIL import Image
from processes import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))

import charts

from tools import records

NOTEBOOKS = ("speed", "syncbn", "accuracy")
FIGURES = (*NOTEBOOKS, "syncbn_published")  # one notebook draws two


def code_cells(name):
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def draw(monkeypatch, tmp_path, capsys):
    """Run the cells of a notebook in this process, which spares the seconds of a kernel, and return
    what it printed, with its tables.

    A function (name, machine, results) -> text.
    """
    plt.switch_backend("Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(charts, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(charts, "display", lambda table: print(table.data, end=""))

    def draw(name, machine=charts.OURS, results=ROOT / "results"):
        monkeypatch.setattr(charts, "MACHINE", machine)
        monkeypatch.setattr(records, "RESULTS", results)
        space = {}
        capsys.readouterr()
        for k, cell in enumerate(code_cells(name)):
            exec(compile("".join(cell["source"]), f"{name}, code cell {k}", "exec"), space)
        plt.close("all")
        return capsys.readouterr().out

    return draw


def test_the_notebooks_hold_the_numbers_of_what_is_recorded_now(draw):
    found = []
    for name in NOTEBOOKS:
        outputs = [output for cell in code_cells(name) for output in cell["outputs"]]
        shown = "".join(
            "".join(output.get("text", output.get("data", {}).get("text/markdown", [])))
            for output in outputs
        )
        printed = [re.sub(r"figure: \S+/", "figure: ", text) for text in (shown, draw(name))]
        if printed[0] != printed[1] or {output.get("name", "stdout") for output in outputs} != {
            "stdout"
        }:
            found.append(f"notebooks/{name}.ipynb is stale, or has warnings: make charts")
    assert not found, "\n".join(found)
    assert not [cell["id"] for cell in code_cells("kaggle") if cell["outputs"]]


def test_figures_show_the_newest_records():
    """Each figure notes when the newest of its records was made."""
    older = []
    for path in sorted((ROOT / "docs/figures").rglob("*.png")):
        notes = Image.open(path).text
        drawn = notes.get("Recorded")
        if path.stem in ("trace", "goodput", "memory") or "Shows" in notes:  # drawn once
            continue
        if drawn != charts.recorded(path.stem):
            older.append(f"{path.relative_to(ROOT)} shows records until {drawn}")
    assert not older, "run: make charts"


@pytest.mark.slow
def test_make_charts_draws_all_figures_in_fresh_kernels(tmp_path):
    env = os.environ | {"FIGURES": str(tmp_path), "VIRTUAL_ENV": sys.prefix}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True}
    end = subprocess.run(["make", "charts", "MACHINE=nobody"], **options)
    assert end.returncode == 2 and "nothing in results/ for MACHINE=nobody" in end.stderr
    end = subprocess.run(["make", "charts"], **options)
    assert end.returncode == 0, end.stderr
    for name in FIGURES:
        fresh, kept = (plt.imread(path / f"{name}.png") for path in (tmp_path, charts.FIGURES))
        same = fresh.shape == kept.shape and (abs(fresh - kept).max(axis=-1) > 0.2).mean() < 0.002
        assert same, f"docs/figures/{name}.png: make charts"


def test_the_speed_of_a_run_is_the_mean_of_its_epochs_without_the_first():
    run = {"started": "now", "command": "x"}
    speeds = enumerate([10.0, 30.0, 50.0], start=1)
    epochs = [run | {"epoch": k, "images_per_second": speed} for k, speed in speeds]
    assert charts.steady(epochs) == [epochs[2] | {"images_per_second": 40.0}]
    assert charts.steady(epochs[:1]) == epochs[:1]


# The notebook for two GPUs

KAGGLE = "/kaggle/input"  # where the notebook looks for a data set
NOT_ATTACHED = (".git", ".venv*", "data", "checkpoints", "docs", "results", "site", "__pycache__")


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
    assert text.count("world size 1 |") == 2 and text.count("world size 2 (2 on this machine)") == 3
    assert "DataParallel over" in text and "done: test loss" in text
    for rank in (0, 1):
        assert re.search(rf"^rank {rank} of 2 on \S+: 3.00 x \+ 1.00$", text, re.M)
    drawn = re.findall(r"^(0\d)_\w+\.py +(\d+) img/s +test accuracy", text, re.M)
    assert [number for number, _ in drawn] == ["01", "02", "03", "04"]
    (chart,) = [output for output in outputs if output.output_type == "display_data"]
    pixels = plt.imread(io.BytesIO(base64.b64decode(chart.data["image/png"])))
    assert pixels.shape[1] > 800 and pixels[..., :3].std() > 0.05, "something is drawn"


def test_the_notebook_for_two_gpus_gets_the_repository_by_git(tmp_path, monkeypatch, capsys):
    first = "".join(code_cells("kaggle")[0]["source"])
    first = first.replace(KAGGLE, str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    exec(first.replace("URL-OF-THIS-REPOSITORY", str(ROOT)), {})
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'ladder'}\n")
    assert (tmp_path / "ladder/01_snsc.py").exists()
    monkeypatch.chdir(tmp_path)
    exec(first, {})  # again, without git
    assert "using the folder ladder" in capsys.readouterr().out
