"""Draw the figure of docs/ that no notebook draws, from the records in results/.

    python tools/book/figures.py

make charts calls it. A test names the records that are newer than their figure.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import charts
import matplotlib.pyplot as plt
from charts import BLUE, ORANGE, PUBLISHED

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


def main():
    charts.write(resnet20(), charts.FIGURES / "resnet20.png", charts.recorded("resnet20"))


if __name__ == "__main__":
    main()
