"""Draw the figures of docs/ that no notebook draws, from the records in results/.

    python tools/book/figures.py

make charts calls it. A test names the records that are newer than their figure.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import charts
import matplotlib.pyplot as plt
from charts import BLUE, GREEN, GREY, ORANGE, PUBLISHED, PURPLE
from matplotlib.patches import Rectangle

from tools import records


def ours(name):
    """Return the records of the machine of the figures: those of another have a table only."""
    return records.read(records.RESULTS / name / f"{charts.OURS}.jsonl")


def resnet20():
    """Draw the accuracy of ResNet-20 in its first ten epochs, beside the published log."""
    runs = ours("resnet20")
    known = records.published()["cifar_resnet20"]
    names = {"train_acc": "accuracy in training (%)", "test_acc": "accuracy on the test set (%)"}
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained", sharey=True)
    for ax, (key, name) in zip(axes, names.items(), strict=True):
        epochs = range(1, len(known[key]) + 1)
        ax.plot(epochs, known[key], label="GluonCV, published", **PUBLISHED)
        for processes, color, marker in ((1, BLUE, "o"), (2, ORANGE, "s")):
            points = [(r["epoch"], r[key]) for r in runs if r["world_size"] == processes]
            label = "01, one process" if processes == 1 else "03, two processes"
            ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=label)
        ax.set(xlabel="epoch", ylabel=name, xticks=epochs)
    axes[0].legend(loc="lower right")
    return fig


def memory():
    """Draw the memory of a rank, measured and computed, by variant."""
    runs = ours("memory")
    models = records.group(runs, "model", "image_size", "batch_size")
    first = min(run["repeat"] for run in runs)
    fig, axes = plt.subplots(
        1, len(models), figsize=(7.5, 4.2), layout="constrained", squeeze=False
    )
    colors = {
        "weights": BLUE,
        "gradients, and DDP's buckets": ORANGE,
        "optimizer state": GREEN,
        "activations, gathered weights": PURPLE,
    }
    for k, ((model, _, batch_size), same) in enumerate(models.items()):
        ax = axes[0][k]
        same = sorted(records.select(same, repeat=first), key=lambda run: run["row"])
        for row, run in enumerate(same):
            for y, strength, sizes in ((-0.2, 1, measured(run)), (0.2, 0.5, computed(run))):
                left = 0
                for size, color in zip(sizes, colors.values(), strict=True):
                    bar = {"color": color, "alpha": strength}
                    ax.barh(row + y, size / 1e6, 0.38, left=left, **bar)
                    left += size / 1e6
        names = [run["variant"] if k == 0 else "" for run in same]
        ax.set_yticks(range(len(same)), names)
        ax.invert_yaxis()
        ax.set(xlabel="MB per rank", title=f"{model}, {batch_size} images per process")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    fig.legend(handles, colors, loc="outside lower center", ncols=2)
    fig.suptitle("upper bars: measured; lower bars: computed by tools/fit.py", size=9, color=GREY)
    return fig


def measured(run):
    """Return the bytes of weights, gradients, optimizer state, and the rest of the peak."""
    held = run["held_bytes"]
    parts = [held["weights"], held["gradients"] + held["other"], held["optimizer"]]
    return [*parts, run["peak_bytes"] - sum(parts)]


def computed(run):
    """Return the same bytes as computed by tools/fit.py."""
    parts = [run["computed_held_bytes"][name] for name in ("weights", "gradients", "optimizer")]
    return [*parts, run["computed_peak_bytes"] - sum(parts)]


DRAWN = {"resnet20": resnet20, "memory": memory}


def main():
    for name, draw in DRAWN.items():
        charts.write(draw(), charts.FIGURES / f"{name}.png", charts.recorded(name))


if __name__ == "__main__":
    main()
