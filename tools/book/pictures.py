"""Draw the pictures of docs/: python tools/book/pictures.py

The numbers in the pictures are computed here, so that a test can compare them with the real
collectives. The picture of a trace is drawn from a record.
"""

import functools
import hashlib
import itertools
import sys
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from charts import BLUE, GREEN, GREY, ORANGE, OURS, PUBLISHED, PURPLE

from tools import records
from tools.book import chinese_figures
from tools.book.step_model import Step, ring_seconds, step_seconds

FIGURES = ROOT / "docs/figures"
SOURCES = [
    ROOT / name
    for name in ("tools/book/pictures.py", "tools/book/step_model.py", "notebooks/charts.py")
]
RANKS = 4
RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
INK, PALE = "#222222", "#F4F4F4"


# The numbers in the pictures


def initial_values(ranks=RANKS):
    """Return the initial numbers: a row of `ranks` numbers per rank, all different."""
    return np.arange(1, ranks * ranks + 1).reshape(ranks, ranks)


def collectives(ranks=RANKS):
    """Return {name: (before, after)}: a row of numbers per rank, 0 where a rank has no number.

    reduce-scatter and all-gather are the two halves of all-reduce.
    """
    values = initial_values(ranks)
    empty = np.zeros((ranks, ranks), int)
    total = values.sum(axis=0)
    first = empty.copy()
    scattered = np.diag(total)
    everywhere = np.tile(total, (ranks, 1))
    first[0] = values[0]
    return {
        "broadcast": (first, np.tile(values[0], (ranks, 1))),
        "all-reduce": (values, everywhere),
        "reduce-scatter": (values, scattered),
        "all-gather": (scattered, everywhere),
    }


def ring_rounds(values):
    """Compute a ring all-reduce, round by round.

    Args:
        values: int (n, n), a row per rank, a number per piece of its tensor.

    Returns:
        List of 2 (n - 1) + 1 pairs; the first pair is the state before the first round. Each pair
        holds the values of all ranks, int (n, n), and which of them were received in this round,
        bool (n, n).
    """
    n = len(values)
    values, rounds = values.copy(), [(values, np.zeros((n, n), bool))]
    ranks = np.arange(n)
    to = (np.arange(n) + 1) % n
    for k in range(2 * (n - 1)):
        piece = (ranks - k) % n if k < n - 1 else (ranks + 1 - (k - (n - 1))) % n
        message = values[ranks, piece]
        values = values.copy()
        received = np.zeros((n, n), bool)
        values[to, piece] = message + (values[to, piece] if k < n - 1 else 0)
        received[to, piece] = True
        rounds.append((values, received))
    return rounds


def sent(step, all_reduce):
    """Compute when each bucket's all-reduce begins and ends: one at a time, each as soon as its
    bucket is ready.

    Args:
        step: step_model.Step.
        all_reduce: function from bytes to seconds.

    Returns:
        List of (begin, end), in seconds.
    """
    spans = []
    end = 0.0
    for ready, size in zip(step.ready, step.buckets, strict=True):
        begin = max(end, ready)
        end = begin + all_reduce(size)
        spans.append((begin, end))
    return spans


def sharded_states(blocks=3):
    """Return what a rank holds under FSDP at each moment of a training step.

    Returns:
        List of (moment, weights, gradients): "forward 1" and so on, and for each block "none",
        "shard" or "whole".
    """
    states = []
    for k in range(blocks):
        weights = ["whole" if block == k else "shard" for block in range(blocks)]
        states.append((f"forward {k + 1}", weights, ["none"] * blocks))
    for k in reversed(range(blocks)):
        weights = ["whole" if block == k else "shard" for block in range(blocks)]
        gradients = ["none"] * k + ["whole"] + ["shard"] * (blocks - k - 1)
        states.append((f"backward {k + 1}", weights, gradients))
    states.append(("optimizer", ["shard"] * blocks, ["shard"] * blocks))
    return states


# Drawing


def canvas(width, height):
    """Return a figure with one empty drawing area, in inches from its upper left corner."""
    fig = plt.figure(figsize=(width, height), layout="none")
    ax = fig.add_axes([0, 0, 1, 1])
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return fig, ax


def tint(color, strength):
    """Mix a colour with white."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(color))


def box(ax, x, y, width, height, color, edge=None, **style):
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", **style
    )
    patch.set(facecolor=color, edgecolor=edge or color)
    ax.add_patch(patch)


def text(ax, x, y, words, size=10, **style):
    ax.text(x, y, words, **{"size": size, "ha": "center", "va": "center", "color": INK} | style)


def arrow(ax, start, end, color=GREY, bend=0.0, style="-|>", **more):
    options = {
        "mutation_scale": 12,
        "linewidth": 1.6,
        "shrinkA": 0,
        "shrinkB": 0,
        "color": color,
    } | more
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, connectionstyle=f"arc3,rad={bend}", **options)
    )


def grid(ax, x, y, values, color_of, received=None, cell=0.32, names=True):
    """Draw a row of cells per rank.

    Cells without a number stay empty; numbers just received get a frame.

    Args:
        color_of: function of (rank, piece).
        received: bool array with the shape of values.
    """
    for (rank, piece), value in np.ndenumerate(values):
        corner, color = (
            (x + piece * cell, y + rank * cell),
            color_of(rank, piece) if value else "white",
        )
        ax.add_patch(
            Rectangle(
                corner, cell, cell, facecolor=color, edgecolor="white" if value else "#DDDDDD"
            )
        )
        if received is not None and received[rank, piece]:
            ax.add_patch(
                Rectangle(
                    corner, cell, cell, facecolor="none", edgecolor=ORANGE, linewidth=2.5, zorder=3
                )
            )
        if value:
            dark = np.dot(to_rgb(color), (0.3, 0.6, 0.1)) < 0.5
            text(
                ax,
                corner[0] + cell / 2,
                corner[1] + cell / 2,
                str(value),
                9.5,
                color="white" if dark else INK,
            )
    for rank in range(len(values) if names else 0):
        text(ax, x - 0.08, y + (rank + 0.5) * cell, f"rank {rank}", 9, ha="right", color=GREY)


def title(ax, x, y, words, more, right):
    text(ax, x, y, words, 12, ha="left", weight="bold")
    text(ax, right, y + 0.01, more, 9.5, ha="right", color=GREY)


# The pictures


def draw_ranks(machines=2, processes=2):
    fig, ax = canvas(7.5, 3.7)
    width = 3.35
    left = 0.3
    top = 0.15
    line = 2.8
    for rank in range(machines * processes):
        node, local_rank = divmod(rank, processes)
        x = left + node * (width + 0.2)
        y = top + 0.5
        color = RANK_COLORS[rank]
        if local_rank == 0:
            box(ax, x, top, width, 2.2, PALE, "#CCCCCC")
            text(ax, x + 0.15, top + 0.26, f"machine {node}", 12, ha="left", weight="bold")
            text(
                ax, x + width - 0.15, top + 0.26, f"node rank {node}", 10.5, ha="right", color=GREY
            )
        x += 0.15 + local_rank * 1.58
        ax.plot([x + 0.735] * 2, [y + 1.55, line], color=GREY, linewidth=1.6, zorder=2)
        box(ax, x, y, 1.47, 1.55, tint(color, 0.2), color, linewidth=1.5)
        text(ax, x + 0.735, y + 0.3, f"rank {rank}", 13, weight="bold")
        text(ax, x + 0.735, y + 0.68, f"local rank {local_rank}", 10.5)
        box(ax, x + 0.235, y + 0.98, 1.0, 0.4, "white", color)
        text(ax, x + 0.735, y + 1.18, f"cuda:{local_rank}", 10.5)
    ax.plot(
        [left + 0.885, x + 0.735], [line, line], color=GREY, linewidth=3, solid_capstyle="round"
    )
    text(ax, 3.75, line - 0.17, "network", 9.5, color=GREY)
    ax.plot([left + 0.885] * 2, [line, line + 0.2], color=BLUE, linewidth=1.6, zorder=2)
    box(ax, left + 0.15, line + 0.2, 3.05, 0.58, "white", BLUE, linewidth=1.5)
    text(ax, left + 1.675, line + 0.37, "store, on the machine of rank 0,", 9.5)
    text(ax, left + 1.675, line + 0.6, "at MASTER_ADDR:MASTER_PORT", 9.5)
    text(ax, 7.05, line + 0.35, f"world size {machines * processes}", 13, ha="right", weight="bold")
    text(
        ax,
        7.05,
        line + 0.62,
        f"local world size {processes} on each machine",
        9.5,
        ha="right",
        color=GREY,
    )
    return fig


def draw_collectives():
    fig, ax = canvas(7.5, 5.3)
    total = initial_values().sum(axis=0)
    captions = {
        "broadcast": "rank 0's numbers, on all",
        "all-reduce": "the sum, on all",
        "reduce-scatter": "the sum, a piece on each",
        "all-gather": "the pieces, on all",
    }

    def color_of(values, rank, piece):
        if values[rank, piece] == total[piece]:
            return GREY
        # the rank that had this number at first
        source = np.argwhere(initial_values() == values[rank, piece])[0, 0]
        return tint(RANK_COLORS[source], 0.45)

    for k, (name, states) in enumerate(collectives().items()):
        x = 0.65 + k % 2 * 3.75
        y = 0.22 + k // 2 * 1.95
        title(ax, x - 0.52, y, name, captions[name], x + 2.96)
        for left, values in zip((x, x + 1.68), states, strict=True):
            grid(ax, left, y + 0.25, values, functools.partial(color_of, values), names=left == x)
        arrow(ax, (x + 1.34, y + 0.89), (x + 1.62, y + 0.89))

    y = 4.12
    left = 0.65
    right = 7.36
    arrivals = np.array([2.1, 3.6, 1.5, 2.8])
    title(ax, left - 0.52, y, "barrier", "no rank continues before the last has arrived", right)
    go = left + arrivals.max()
    for rank, arrival in enumerate(left + arrivals):
        top = y + 0.22 + rank * 0.22
        color = tint(RANK_COLORS[rank], 0.45)
        text(ax, left - 0.08, top + 0.09, f"rank {rank}", 9, ha="right", color=GREY)
        for begin, end, shade in ((left, arrival, color), (arrival, go, PALE), (go, right, color)):
            ax.add_patch(Rectangle((begin, top), end - begin, 0.17, facecolor=shade))
        if arrival < go:
            text(ax, (arrival + go) / 2, top + 0.085, "waits", 8.5, color=GREY)
    ax.plot([go, go], [y + 0.17, y + 1.13], color=INK, linewidth=1.6)
    return fig


def draw_ring():
    fig, ax = canvas(7.5, 4.15)
    counts = ring_rounds(np.ones((RANKS, RANKS), int))  # how many ranks each number is the sum of
    for k, (values, received) in enumerate(ring_rounds(initial_values())):
        row, column = divmod(k if k < RANKS else k + 1, RANKS)
        x = 0.75 + column * 1.78 - (column > 0) * 0.1
        y = 0.75 + row * 2.02
        shades = 0.1 + 0.3 * (counts[k][0] - 1)
        text(ax, x + 0.64, y - 0.14, f"after round {k}" if k else "at first", 9.5, color=GREY)
        grid(
            ax,
            x,
            y,
            values,
            lambda *at, shades=shades: tint(GREY, shades[at]),
            received,
            names=column == row,
        )
    title(
        ax,
        0.15,
        0.22,
        "reduce-scatter",
        "in each round, each rank sends a piece to the next rank, which adds it",
        7.27,
    )
    title(ax, 0.15, 2.32, "all-gather", "each rank forwards a finished piece", 7.27)
    center = np.array([0.95, 3.38])
    angles = 2 * np.pi * np.arange(RANKS) / RANKS - np.pi / 2
    spots = center + 0.5 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for rank, spot in enumerate(spots):
        ax.add_patch(
            plt.Circle(
                spot, 0.19, facecolor=tint(GREY, 0.1), edgecolor=GREY, linewidth=1.5, zorder=2
            )
        )
        text(ax, *spot, str(rank), 11, zorder=3)
        arrow(ax, spot, spots[(rank + 1) % RANKS], ORANGE, shrinkA=15, shrinkB=15, bend=0.3)
    return fig


def draw_fsdp(ranks=2):
    fig, ax = canvas(7.5, 3.05)
    cell = 0.3
    left = 0.95
    column = 0.93
    for k, (moment, *held) in enumerate(sharded_states()):
        x = left + k * column
        text(ax, x + cell, 0.2, moment, 9.5, weight="bold")
        for rank in range(ranks):
            y = 0.42 + rank * 1.12
            for what, (states, color) in enumerate(zip(held, (BLUE, ORANGE), strict=True)):
                for block, state in enumerate(states):
                    at = (x + what * (cell + 0.05), y + block * 0.32)
                    ax.add_patch(Rectangle(at, cell, 0.27, facecolor=PALE))
                    height = {"none": 0, "shard": 0.27 / ranks, "whole": 0.27}[state]
                    top = at[1] + (rank * height if state == "shard" else 0)
                    shade = tint(color, 0.9 if state == "whole" else 0.45)
                    ax.add_patch(Rectangle((at[0], top), cell, height, facecolor=shade))
    for rank in range(ranks):
        y = 0.42 + rank * 1.12
        text(ax, 0.1, y + 0.45, f"rank {rank}", 10, ha="left", weight="bold")
        for block in range(3):
            text(ax, left - 0.08, y + block * 0.32 + 0.135, str(block + 1), 9, ha="right")
    y = 2.78
    for x, color, words in (
        (left, BLUE, "weights of blocks 1 to 3"),
        (left + 2.2, ORANGE, "their gradients"),
    ):
        ax.add_patch(Rectangle((x, y - 0.08), 0.16, 0.16, facecolor=color))
        text(ax, x + 0.25, y, words, 9.5, ha="left")
    text(ax, left + 3.9, y, "dark: whole    pale: a shard", 9.5, ha="left", color=GREY)
    return fig


def draw_overlap():
    """Draw a training step of a model with four layers, one bucket per layer.

    The times are invented, not measured.
    """
    backward, update = np.array([0.8, 1.5, 1.5, 1.3]), 0.9  # of layers 4, 3, 2, 1
    forward = backward / 2
    ready = tuple(forward.sum() + backward.cumsum())
    step = Step(ready, buckets=(0.5, 1.3, 1.3, 1.0), total=ready[-1] + update)
    all_reduce = functools.partial(ring_seconds, devices=RANKS, latency=0.02, bandwidth=1.5)
    # all communication after backward
    after = sent(step._replace(ready=(ready[-1],) * RANKS), all_reduce)
    seconds = [step_seconds(step, all_reduce, overlap) for overlap in (0.0, 1.0)]

    fig, ax = canvas(7.5, 3.55)
    left = 0.95
    right = 7.35
    layers = np.arange(RANKS, 0, -1)
    scale = (right - left) / seconds[0]

    def blocks(y, spans, names, color=None):
        for (begin, end), name in zip(spans, names, strict=True):
            face = tint(color or RANK_COLORS[int(name) - 1], 0.25 if color else 0.45)
            corner, size = (left + begin * scale, y), (end - begin) * scale
            ax.add_patch(
                Rectangle(corner, size, 0.38, facecolor=face, edgecolor="white", linewidth=1.5)
            )
            text(ax, corner[0] + size / 2, y + 0.19, str(name), 10)

    def brace(y, begin, end, words):
        arrow(
            ax, (left + begin * scale, y), (left + end * scale, y), style="<|-|>", mutation_scale=9
        )
        text(ax, left + (begin + end) / 2 * scale, y + 0.15, words, 9.5, color=GREY)

    rows = (
        (0.25, "All-reduce after backward", after, seconds[0]),
        (2.0, "DDP: all-reduce during backward", sent(step, all_reduce), seconds[1]),
    )
    for y, name, spans, end in rows:
        text(ax, 0.15, y, name, 12, ha="left", weight="bold")
        for lane, words in ((y + 0.25, "compute"), (y + 0.68, "network")):
            ax.add_patch(Rectangle((left, lane), right - left, 0.38, facecolor=PALE))
            text(ax, left - 0.08, lane + 0.19, words, 9.5, ha="right", color=GREY)
        edges = np.concatenate([[0], forward[::-1].cumsum(), ready])
        blocks(y + 0.25, itertools.pairwise(edges), [*layers[::-1], *layers])
        blocks(y + 0.25, [(end - update, end)], ["step"], GREY)
        blocks(y + 0.68, spans, layers)
        brace(y + 1.18, 0, edges[RANKS], "forward")
        brace(y + 1.18, edges[RANKS], ready[-1], "backward")
        brace(y + 1.18, ready[-1], spans[-1][1], "exposed")
    brace(y + 1.18, *seconds[::-1], "saved")
    return fig


def ours(name):
    """Return the records of the machine of the figures: those of another one have a table only."""
    return records.read(records.RESULTS / name / f"{OURS}.jsonl")


def draw_trace():
    """Draw a recorded training step of rank 0: tools/bench/trace.py."""
    record = ours("trace")[-1]
    spans = record["spans"]
    fig, ax = canvas(7.5, 1.5)
    left, right = 0.95, 7.35
    scale = (right - left) / spans["optimizer"][0][1]
    caption = f"{records.hardware(record)}, {record['world_size']} processes, one run"
    text(ax, left, 0.15, caption, 9, ha="left", color=GREY)
    for y, lane in ((0.35, "compute"), (0.8, "all-reduce")):
        ax.add_patch(Rectangle((left, y), right - left, 0.38, facecolor=PALE))
        text(ax, left - 0.08, y + 0.19, lane, 9.5, ha="right", color=GREY)
    rows = (
        ("forward", 0.35, BLUE),
        ("backward", 0.35, GREEN),
        ("optimizer", 0.35, GREY),
        ("all_reduce", 0.8, ORANGE),
    )
    for name, y, color in rows:
        for begin, end in spans[name]:
            width = max(0.02, (end - begin) * scale)
            ax.add_patch(
                Rectangle(
                    (left + begin * scale, y),
                    width,
                    0.38,
                    facecolor=tint(color, 0.45),
                    edgecolor="white",
                )
            )
            if width > 0.09 * len(name) and name != "all_reduce":
                text(ax, left + begin * scale + width / 2, y + 0.19, name, 9.5)
    for ms in range(0, int(spans["optimizer"][0][1]), 100):
        text(ax, left + ms * scale, 1.35, f"{ms} ms", 9, color=GREY)
    return fig


def draw_resnet20():
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


def draw_memory():
    """Draw the memory of a rank, measured and computed, by variant: tools/bench/memory.py."""
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
                    bar = tint(color, strength)
                    ax.barh(row + y, size / 1e6, 0.38, left=left, color=bar)
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


def draw_my_ddp():
    """Draw the time of a training step with DDP by hand, beside torch's: tools/bench/my_ddp.py."""
    runs = ours("my_ddp")
    variants = records.group(runs, "variant")
    times = {
        name: [1000 * run["seconds_per_step"] for run in same] for name, same in variants.items()
    }
    alone, *others = [median(measured) for measured in times.values()]
    fig, ax = plt.subplots(figsize=(7.5, 2.7), layout="constrained")
    ax.barh(range(len(times)), alone, 0.65, color=BLUE, label="computation")
    exposed = [0, *(other - alone for other in others)]
    label = "exposed communication"
    ax.barh(range(len(times)), exposed, 0.65, left=alone, color=ORANGE, label=label)
    for y, measured in enumerate(times.values()):
        ax.plot([min(measured), max(measured)], [y, y], color=INK, linewidth=1)
    ax.set_yticks(range(len(times)), times)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="milliseconds per training step: median, lowest and highest")
    fig.legend(loc="outside lower center", ncols=2)
    first = runs[0]
    caption = f"{records.hardware(first)}, {first['world_size']} processes"
    fig.suptitle(caption, size=9, color=GREY)
    return fig


PICTURES = {
    "ranks": draw_ranks,
    "collectives": draw_collectives,
    "ring": draw_ring,
    "overlap": draw_overlap,
    "fsdp": draw_fsdp,
}
PICTURES |= {"trace": draw_trace, "resnet20": draw_resnet20, "memory": draw_memory}
PICTURES |= {"my_ddp": draw_my_ddp}


def fingerprint():
    """Return a hash of the sources of the pictures. A picture with a different hash is stale."""
    names = ("trace", "resnet20", "memory", "my_ddp")
    sources = [*SOURCES, *(records.RESULTS / name / f"{OURS}.jsonl" for name in names)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def main():
    # charts sets it; after savefig() it would hold here too
    plt.rcParams["figure.constrained_layout.use"] = False
    for name, draw in PICTURES.items():
        fig = draw()
        fig.savefig(FIGURES / f"{name}.png", metadata={"Software": None, "Source": fingerprint()})
        chinese_figures.save(fig, name, fingerprint())
        plt.close(fig)
        print(f"picture: docs/figures/{name}.png")


if __name__ == "__main__":
    main()
