"""Compare what was measured on GPUs here with published figures: a table and a chart.

    python tools/book/gpu_figures.py     draw docs/figures/gpu.png

Before a GPU is recorded in results/ (make gpu), there is neither.
"""

import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

from tools.records import RESULTS, group, records, spread

RUNS = {
    "dummy": "`06`",
    "bare": "bare training step",
    "example": "plain loop, float32",
    "example-amp": "plain loop",
}
HERE = "here"


def published():
    """Return published figures of GPUs, and their sources."""
    return json.loads((RESULTS / "gpu/published.json").read_text())


def measured_resnet50(results=None):
    """Return the rows (GPU, list of images per second, setting) that were measured here."""
    runs = [r for r in records("train", results) if r["device"] != "cpu"]
    runs = [r for r in runs if r["model"] == "resnet50" and r["run"] in RUNS]
    rows = []
    columns = ("device_name", "run", "amp", "channels_last", "compile", "batch_size", "torch")
    for (gpu, run, amp, channels_last, compiled, batch, torch), same in group(
        runs, *columns
    ).items():
        words = [RUNS[run]]
        words += [amp] * (amp != "none" and run != "example")
        words += ["channels_last"] * (channels_last and not run.startswith("example"))
        words += ["--compile"] * compiled
        words += [f"batch {batch}", f"torch {torch}", f"runs: {len(same)}"]
        rows.append((gpu, [r["images_per_second"] for r in same], ", ".join(words)))
    return rows


def measured_cifar10(results=None):
    """Return the rows (GPU, seconds, accuracy in %, setting) of 06 on CIFAR-10."""
    rows = []
    lines = [r for r in records("imagenet", results) if r["device"] != "cpu"]
    lines = [r for r in lines if r["dataset"].endswith("cifar10")]
    for epochs in group(lines, "started").values():
        last = epochs[-1]
        size = f"{last['image_size']}x{last['image_size']}"
        setting = f"`06`, {last['model']}, {size}, epochs: {last['epoch']}, torch {last['torch']}"
        seconds = sum(r["seconds"] for r in epochs)
        rows.append((last["device_name"], seconds, last["test_acc"], setting))
    return rows


def blocks(results=None):
    """Return the heads and rows of the tables, or nothing before a GPU is recorded."""
    known = published()
    ours = measured_resnet50(results)
    if not ours:
        return []
    rows = [(gpu, spread(speeds, ",.0f"), setting, HERE) for gpu, speeds, setting in ours]
    rows += [
        (run["gpu"], f"{run['images_per_second']:,}", run["setting"], run["source"])
        for run in known["resnet50"]
    ]
    result = [(("ResNet-50, training on", "images/s", "setting", "source"), rows)]
    ours = [
        (gpu, f"{seconds:.0f}", f"{accuracy:.1f}", setting, HERE)
        for gpu, seconds, accuracy, setting in measured_cifar10(results)
    ]
    theirs = [
        (run["gpu"], f"{run['seconds']:g}", f"{run['accuracy']:.1f}", run["setting"], run["source"])
        for run in known["cifar10"]
    ]
    head = ("CIFAR-10, training on", "seconds", "test accuracy (%)", "setting", "source")
    return [*result, (head, ours + theirs)]


def draw(results=None):
    """Draw the images per second of ResNet-50 on one GPU: measured in blue, published in grey."""
    import matplotlib.pyplot as plt
    from charts import BLUE, GREY

    bars = [
        (f"{gpu}: {setting.replace('`', '')}", median(speeds), BLUE)
        for gpu, speeds, setting in measured_resnet50(results)
    ]
    bars += [
        (f"{run['gpu']}: {run['setting']} ({run['source']})", run["images_per_second"], GREY)
        for run in published()["resnet50"]
    ]
    bars.sort(key=lambda bar: bar[1])
    names, speeds, colors = zip(*bars, strict=True)
    fig, ax = plt.subplots(figsize=(9, 0.3 * len(bars) + 0.8))
    ax.barh(range(len(bars)), speeds, 0.7, color=colors)
    for y, speed in enumerate(speeds):
        ax.text(speed, y, f" {speed:,.0f}", va="center", size=8)
    ax.set_yticks(range(len(bars)), names)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="images per second")
    fig.suptitle("training ResNet-50 on one GPU; blue: measured here, grey: published", size=9)
    return fig


def main():
    import charts

    if not measured_resnet50():
        sys.exit("nothing to draw: no GPU in results/train/; make gpu records one")
    charts.write(draw(), ROOT / "docs/figures/gpu.png", charts.recorded("gpu"))


if __name__ == "__main__":
    main()
