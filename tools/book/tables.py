"""Make the tables of the book from the records in results/. tools/book/book.py inserts them into
the pages.
"""

import json

from tools.planning.step_model import distance, published_band
from tools.records import RESULTS, group, published, records, spread


def table(head, rows):
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def speeds(runs):
    """Return the images per second of each run."""
    return [run["images_per_second"] for run in runs]


RUNS = {
    "dummy": "`06`",
    "bare": "bare training step",
    "example": "plain loop, float32",
    "example-amp": "plain loop",
}
HERE = "here"


def published_on_gpus():
    """Return published figures of GPUs, and their sources."""
    return json.loads((RESULTS / "gpu/published.json").read_text())


def measured_resnet50(results=None):
    """Return the rows (GPU, list of images per second, setting) that were measured here."""
    runs = records("train", results)
    for record in records("imagenet", results):
        if record["dataset"].startswith("dummy"):
            runs.append(record | {"run": "dummy", "batch_size": record["global_batch"]})
    runs = [r for r in runs if r["device"] != "cpu" and r["model"] == "resnet50"]
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
    known = published_on_gpus()
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


def gpu(results=None):
    """Make the tables of measured and published speeds on GPUs; none before a GPU is recorded."""
    tables = [table(head, rows) for head, rows in blocks(results)]
    if not tables:
        return ""
    sources = [f"- {name}: {text}" for name, text in published_on_gpus()["sources"].items()]
    return "\n\n".join([*tables, "\n".join(sources)])


def predicted():
    """Make the table of published efficiencies beside those of the model of tools/plan.py."""
    rows = []
    for name, run in published()["scaling"].items():
        low, high = (100 * share for share in published_band(run))
        efficiency = 100 * run["efficiency"]
        points = round(distance(efficiency, (low, high)), 1) or 0
        rows.append((name, f"{efficiency:.1f}", f"{low:.1f} to {high:.1f}", points))
    return table(("published result", "efficiency (%)", "model (%)", "points outside"), rows)


def mistakes():
    """Make the table of mistakes that check_ranks was tried on, by kind."""
    rows = []
    tried = [record for record in records("checker") if "mistake" in record]
    for kind, of_kind in group(tried, "kind").items():
        by_way = {way: [r for r in of_kind if r["seen"] == way] for way in ("ranks", "before", "")}
        missed = "; ".join(record["mistake"] for record in by_way[""])
        counts = [len(by_way["ranks"]), len(by_way["before"])]
        rows.append((kind, len(of_kind), *counts, missed))
    sums = [sum(column) for column in zip(*(row[1:4] for row in rows), strict=True)]
    rows.append(("all", *sums, ""))
    return table(("mistake in", "tried", "found", "with `--before`", "not found"), rows)


TABLES = (gpu, predicted, mistakes)
TABLES = {function.__name__: function for function in TABLES}
