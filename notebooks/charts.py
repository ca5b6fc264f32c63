"""What the notebooks share: load and check records, draw charts in one style, save figures.

The colours are from Okabe and Ito, for readers with colour blindness. Every series also has its own
marker.
"""

import os
import sys
from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the notebooks import tools too

from tools import records  # noqa: E402
from tools.book import chinese_figures  # noqa: E402
from tools.records import RecordError, group, published, select  # noqa: E402, F401

OURS = "amd-epyc-2-cores"  # the machine of the figures in docs/, as in the Makefile
MACHINE = os.environ.get("MACHINE", OURS)
FIGURES = Path(os.environ.get("FIGURES", ROOT / "docs/figures"))

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
RED = "#D55E00"
GREY = "#666666"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
PUBLISHED = {
    "color": GREY,
    "marker": "D",
    "markerfacecolor": "white",
    "markersize": 8,
    "linestyle": ":",
    "zorder": 1,
}

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


def load(name, alike=(), only=None):
    """Return the records of an experiment on MACHINE, and print the hardware they were measured on.

    Args:
        name: name of the experiment.
        alike: columns that must have the same value in all records, so that the chart compares like
            with like.
        only: settings of the records to select, if an experiment has more than one kind.

    Raises:
        RecordError: there are no such records, or the values of a column differ.
    """
    lines = records.load(name, MACHINE, only or {})
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
    """Return the data of a series.

    Without this check, a figure without the series would look correct.

    Raises:
        RecordError: there is no data.
    """
    if not data:
        raise RecordError(
            f"nothing to draw for {label!r} on {MACHINE}: expected a record in results/"
        )
    return data


def line(ax, points, label, **style):
    """Draw the mean for each x as a line, and each value as a faint dot.

    Args:
        points: {x: list of values}.
    """
    points = dict(sorted(need(points, label).items()))
    ax.plot(points.keys(), [mean(values) for values in points.values()], label=label, **style)
    for x, values in points.items():
        if len(values) > 1:
            ax.plot([x] * len(values), values, ".", color=style["color"], alpha=0.5, markersize=4)


def bars(ax, values, color):
    """Draw the median of each list of values as a bar, and minimum to maximum as a whisker.

    Args:
        values: {label: list of values}, drawn from top to bottom.
    """
    for y, (label, measured) in enumerate(values.items()):
        middle = median(measured)
        ax.barh(y, middle, color=color if isinstance(color, str) else color[label], height=0.65)
        ax.plot([min(measured), max(measured)], [y, y], color="black", linewidth=1)
        ax.text(max(measured), y, f"  {middle:.2f}", va="center", fontsize=8)
    ax.set_yticks(range(len(values)), values)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.18 * max(max(measured) for measured in values.values()))


def processes_axis(ax, counts, label="processes"):
    """Make the x axis logarithmic, with a tick for each number of processes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(counts), [str(n) for n in sorted(counts)])
    ax.minorticks_off()
    ax.set_xlabel(label)


def save(fig, name):
    """Write a figure to docs/figures/NAME.png, for another MACHINE to NAME-MACHINE.png.

    Raises:
        RecordError: one of its axes has no data.
    """
    for k, ax in enumerate(fig.axes, start=1):
        if not ax.has_data():
            raise RecordError(f"{name}: axes {k} ({ax.get_title()!r}) shows no data")
    path = FIGURES / (f"{name}.png" if MACHINE == OURS else f"{name}-{MACHINE}.png")
    write(fig, path, recorded(name))


def recorded(name):
    """Return when the newest record of a figure was made."""
    experiment = {"planning": "scaling", "syncbn_published": "syncbn"}
    path = records.RESULTS / experiment.get(name, name) / f"{MACHINE}.jsonl"
    return max(record["started"] for record in records.read(path))


def write(fig, path, recorded):
    """Write a figure of records until `recorded`; one of docs/figures/ in Chinese too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Software": None, "Recorded": recorded}
    fig.savefig(path, metadata=metadata)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"figure: {shown}, of records until {recorded[:10]}")
    if path.parent == ROOT / "docs/figures" and MACHINE == OURS:
        chinese_figures.save(fig, path.name, metadata)
