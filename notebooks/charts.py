"""What the notebooks call: load and check records, show tables, draw charts in one style.

The colours are from Okabe and Ito, for readers with colour blindness. Every series also has its own
marker. As a program, draw the figure that no notebook draws: make charts does.
"""

import os
import sys
from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt
from IPython.display import Markdown, display

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the notebooks import tools too

from tools import records  # noqa: E402
from tools.book import chinese_figures  # noqa: E402
from tools.records import RecordError, group, published, select  # noqa: E402

OURS = "amd-epyc-2-cores"  # the machine of the figures in docs/, as in the Makefile
MACHINE = os.environ.get("MACHINE", OURS)
FIGURES = Path(os.environ.get("FIGURES", ROOT / "docs/figures"))

GREY = "#666666"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = "os^vD"
PUBLISHED = {
    "color": GREY,
    "marker": "D",
    "markerfacecolor": "white",
    "markersize": 8,
    "linestyle": ":",
    "zorder": 1,
}

WIDTH = 8  # inches: 576 points. The pages show them in 824 pixels, 8 points in 11.
plt.rcParams |= {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 5,
}


def load(name, alike=()):
    """Return the records of an experiment on MACHINE, and print the hardware they were measured on.

    Args:
        name: name of the experiment.
        alike: columns that must have the same value in all records, so that the chart compares like
            with like.

    Raises:
        RecordError: there are no such records, or the values of a column differ.
    """
    lines = records.load(name, MACHINE)
    comparable(name, lines, *alike)
    runs = group(lines, "started", "command")
    times = sorted(started[:10] for started, _ in runs)
    print(f"{' and '.join(sorted({records.hardware(line) for line in lines}))}")
    print(
        f"results/{name}/{MACHINE}.jsonl: "
        f"{len(lines)} records of {len(runs)} runs, {times[0]} to {times[-1]}"
    )
    return lines


def comparable(name, lines, *columns):
    """Check that all records have the same value in each of these columns.

    Raises:
        RecordError: they do not. The message names the column.
    """
    for column in columns:
        values = sorted({str(line.get(column)) for line in lines})
        if len(values) > 1:
            raise RecordError(
                f"results/{name}/{MACHINE}.jsonl mixes runs with {column} {' and '.join(values)}: "
                f"record quick trials under another name, with --machine"
            )


def last_epochs(name, lines):
    """Return the record of each run's last epoch. All runs must have the same number of epochs."""
    last = [run[-1] for run in group(lines, "started", "command").values()]
    comparable(name, last, "epoch")
    return last


def steady(lines):
    """Return the last record of each run, with the mean speed of all epochs but the first."""
    last = []
    for epochs in group(lines, "started", "command").values():
        speed = mean(r["images_per_second"] for r in epochs[1:] or epochs)
        last.append(epochs[-1] | {"images_per_second": speed})
    return last


def need(data, label):
    """Return the data of a series, or raise RecordError: a chart without it would look correct."""
    if not data:
        raise RecordError(
            f"nothing to draw for {label!r} on {MACHINE}: expected a record in results/"
        )
    return data


def values(lines, by, column):
    """Return {value of one column: list of the values of another}."""
    return {x: [r[column] for r in some] for x, some in group(lines, by).items()}


def table(header, rows):
    """Show a table as Markdown, with all columns but the first aligned to the right."""
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)))


def line(ax, points, label, look, **style):
    """Draw the mean for each x as a line, and each value as a faint dot.

    Args:
        points: {x: list of values}.
        look: the number of a colour and a marker; `style` may replace them.
    """
    style = {"color": COLORS[look], "marker": MARKERS[look]} | style
    points = dict(sorted(need(points, label).items()))
    ax.plot(points.keys(), [mean(some) for some in points.values()], label=label, **style)
    for x, some in points.items():
        if len(some) > 1:
            ax.plot([x] * len(some), some, ".", color=style["color"], alpha=0.5, markersize=4)


def processes_axis(ax, counts, label="processes"):
    """Make the x axis logarithmic, with a tick for each number of processes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(counts), [str(n) for n in sorted(counts)])
    ax.minorticks_off()
    ax.set_xlabel(label)


def save(fig, name):
    """Write a figure to docs/figures/ in both languages, for another MACHINE with its name."""
    path = FIGURES / (f"{name}.png" if MACHINE == OURS else f"{name}-{MACHINE}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Software": None, "Recorded": recorded(name)}
    fig.savefig(path, metadata=metadata)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"figure: {shown}, of records until {metadata['Recorded'][:10]}")
    if path.parent == ROOT / "docs/figures" and MACHINE == OURS:
        chinese_figures.save(fig, path.name, metadata)


def recorded(name):
    """Return when the newest record of a figure was made."""
    path = records.RESULTS / name.removesuffix("_published") / f"{MACHINE}.jsonl"
    return max(record["started"] for record in records.read(path))


# The charts


def accuracy(runs, settings):
    """Draw accuracy by epoch, and after the last epoch by number of processes.

    Args:
        settings: values of the column "setting": one process, as published, others.
    """
    theirs = published()["cifar10"]
    places = [["by epoch", "."], ["train", "test"]]
    fig, axes = plt.subplot_mosaic(places, figsize=(WIDTH, 5.8))
    by_epoch = axes["by epoch"]
    train = axes["train"]
    test = axes["test"]
    epochs = range(1, len(theirs["dataparallel"]["train_acc"]) + 1)
    for look, run in enumerate(theirs["runs"]):
        n = run["world_size"]
        if some := select(runs, world_size=n, setting=tuple(settings[:2])):
            name = f"{n} process{'es' * (n > 1)}"
            color = GREY if n == 1 else COLORS[0]  # that of the same setting below
            line(by_epoch, values(some, "epoch", "train_acc"), name, look, color=color)
        by_epoch.plot(epochs, run["train_acc"], label="published" * (n == 1), **PUBLISHED)
    crosses = PUBLISHED | {"marker": "x", "label": "published, DataParallel"}
    by_epoch.plot(epochs, theirs["dataparallel"]["train_acc"], **crosses)
    by_epoch.set(title="The published runs, repeated", xlabel="epoch", xticks=epochs)

    test.sharey(train)
    last = last_epochs("accuracy", runs)
    for ax, key in ((train, "train_acc"), (test, "test_acc")):
        for look, setting in enumerate(settings[1:]):
            some = need(select(last, setting=setting), setting) + select(last, setting=settings[0])
            line(ax, values(some, "world_size", key), setting, look)
        processes_axis(ax, {run["world_size"] for run in [*last, *theirs["runs"]]})
    ends = {run["world_size"]: run["train_acc"][-1] for run in theirs["runs"]}
    train.plot(ends.keys(), ends.values(), label="published", **PUBLISHED)
    train.set(title="Train accuracy after the last epoch")
    test.set(title="Test accuracy after the last epoch", ylabel="test accuracy (%)")
    for ax, top in ((by_epoch, 0.95), (train, 0.72)):
        ax.set_ylabel("running train accuracy (%)")
        names = ax.get_legend_handles_labels()
        fig.legend(*names, loc="upper left", bbox_to_anchor=(0.53, top))
    save(fig, "accuracy")


def speed(runs, device):
    """Draw the median for each way to use the devices as a bar, and each round as a dot.

    Args:
        runs: records with the columns "way" and "against_one", in the order of the bars.
        device: "core" or "GPU".
    """
    names = {"against_one": f"speed against one {device}"}
    if all("launch_seconds" in r for r in runs):
        names["launch_seconds"] = "seconds until training starts"
    ways = list(group(runs, "way"))
    size = (WIDTH, 0.6 + 0.35 * len(ways))
    fig, (axes,) = plt.subplots(1, len(names), figsize=size, squeeze=False)
    for ax, (column, name) in zip(axes, names.items(), strict=True):
        for y, measured in enumerate(values(runs, "way", column).values()):
            middle = median(measured)
            ax.barh(y, middle, color=COLORS[0], alpha=0.5, height=0.65)
            ax.plot(measured, [y] * len(measured), "o", color="black", markersize=3)
            ax.text(max(measured), y, f"  {middle:.2f}", va="center", fontsize=8)
        ax.set(xlabel=name, xlim=(0, 1.2 * max(r[column] for r in runs)))
        ax.set_yticks(range(len(ways)), ways)
        ax.tick_params(labelleft=ax is axes[0])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    save(fig, "speed")


def syncbn(series, costs):
    """Draw accuracy by images per process, and how many times as long an epoch takes with SyncBN.

    Args:
        series: {processes: {label: {images per process: records}}}.
        costs: {processes: {images per process: list of values}}.
    """
    places = [list(series), ["cost"] * len(series)]
    fig, axes = plt.subplot_mosaic(places, figsize=(WIDTH, 6), height_ratios=(3, 2))
    cost, first = axes["cost"], axes[next(iter(series))]
    images = "images per process and training step"
    for color, (n, lines) in enumerate(series.items(), start=3):
        axes[n].sharey(first)
        for look, (label, groups) in enumerate(lines.items()):
            points = {size: [r["test_acc"] for r in some] for size, some in groups.items()}
            line(axes[n], points, label, look)
        processes_axis(axes[n], points, images)
        axes[n].set(title=f"{n} processes", ylabel="test accuracy (%)")
        line(cost, costs[n], f"{n} processes", color)
    processes_axis(cost, points, images)
    cost.axhline(1, color="black", linewidth=0.8)
    cost.set_ylim(bottom=0)
    cost.set(ylabel="time, with / without", title="What SyncBN costs: time of an epoch")
    cost.legend()
    fig.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(fig, "syncbn")


def syncbn_published(curves):
    """Draw published accuracies: {label: one per epoch}."""
    fig, ax = plt.subplots(figsize=(WIDTH, 3))
    looks = zip(COLORS[2::-1], (":", "--", "-"), strict=True)
    for (label, curve), (color, dashes) in zip(curves.items(), looks, strict=True):
        ax.plot(range(1, len(curve) + 1), curve, dashes, color=color, label=label)
    ax.set(xlabel="epoch", ylabel="accuracy (%)")
    ax.legend()
    save(fig, "syncbn_published")


def resnet20():
    """Draw the accuracy of ResNet-20 in its first ten epochs, beside the published log."""
    runs = records.load("resnet20", MACHINE)
    theirs = published()["cifar_resnet20"]
    names = {"train_acc": "accuracy in training (%)", "test_acc": "accuracy on the test set (%)"}
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), sharey=True)
    for ax, (key, name) in zip(axes, names.items(), strict=True):
        epochs = range(1, len(theirs[key]) + 1)
        ax.plot(epochs, theirs[key], label="GluonCV, published", **PUBLISHED)
        for look, label in enumerate(("01, one process", "03, two processes")):
            some = select(runs, world_size=look + 1)
            line(ax, values(some, "epoch", key), label, look)
        ax.set(xlabel="epoch", ylabel=name, xticks=epochs)
    axes[0].legend(loc="lower right")
    save(fig, "resnet20")


if __name__ == "__main__":
    resnet20()
