"""Read the records in results/."""

import json
import shlex
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


class RecordError(ValueError):
    """Records are missing or damaged.

    The message says what was found and what to do.
    """


def to_run(command):
    """Return the arguments that run a command, with this Python's programs, and its variables."""
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        variables[name] = value
    programs = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    return [part for word in words for part in programs.get(word, [word])], variables


def records(name, results=None):
    """Return all records in results/NAME/*.jsonl, ordered by file name and then by time."""
    return [record for path in files(name, results) for record in read(path)]


def files(name, results=None):
    """Return the files of an experiment, one per machine."""
    return sorted(Path(results or RESULTS, name).glob("*.jsonl"))


def read(path):
    """Return the records in a file.

    Raises:
        RecordError: a line is not a JSON object.
    """
    records = []
    for k, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise RecordError(
                f"{path}, line {k}: {line[:40]!r} given, expected a record as JSON: remove it"
            ) from None
    return records


def load(name, machine):
    """Return the records of an experiment on one machine, in the order of recording.

    Args:
        name: name of the experiment, a folder in results/.
        machine: name of the file in this folder, without .jsonl.

    Raises:
        RecordError: there are no such records.
    """
    path = Path(RESULTS, name, f"{machine}.jsonl")
    if not path.exists():
        choice = ""
        if others := [other.stem for other in files(name)]:
            choice = f", expected one of {', '.join(others)} (make charts MACHINE={others[0]})"
        raise RecordError(f"no {path}{choice}; record some: see results/README.md")
    return read(path)


def published():
    """Return published figures that we compare with, and sources: results/published.json."""
    return json.loads((ROOT / "results/published.json").read_text())


def where(record, **settings):
    """Return whether a record has these settings. A tuple matches any of its values."""
    return all(
        record.get(k) in v if isinstance(v, tuple) else record.get(k) == v
        for k, v in settings.items()
    )


def select(lines, **settings):
    """Return the records with these settings."""
    return [record for record in lines if where(record, **settings)]


def group(lines, *columns):
    """Return {values of these columns: records}, in order of first appearance.

    One column: plain values as keys.
    """
    groups = {}
    for record in lines:
        key = tuple(record[column] for column in columns)
        groups.setdefault(key if len(columns) > 1 else key[0], []).append(record)
    return groups


def hardware(record):
    """Return a description of the hardware and the versions that a record was measured with."""
    cores = f", {record['cores']} cores" if record["device"] == "cpu" else ""
    return (
        f"{record['device_name']}{cores}, torch {record['torch']}, torchvision "
        f"{record['torchvision']}"
    )


def spread(values, form):
    """Return the text "median (minimum to maximum)"."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(runs, others, speed="images_per_second"):
    """Return the speed of each run divided by the speed of the other run in the same repeat."""
    return [one[speed] / other[speed] for one, other in zip(runs, others, strict=True)]
