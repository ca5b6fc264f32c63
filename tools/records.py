"""Read results/: the records of an experiment, checked before anything is computed or drawn from them."""

import json
import math
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"

# What every figure names, whatever it shows.
ENVIRONMENT = {"device": str, "device_name": str, "cores": int, "torch": str, "torchvision": str, "started": str}
ENVIRONMENT |= {"command": str}


class RecordError(ValueError):
    """Records that are missing or not what a chart needs; the message says what was found and what to do."""


def records(name, results=None):
    """All lines of results/NAME/*.jsonl, in the order of file names and then of time; none, if there are none."""
    return [record for path in files(name, results) for record in read(path)]


def files(name, results=None):
    """The files of an experiment, one for each machine."""
    return sorted(Path(results or RESULTS, name).glob("*.jsonl"))


def read(path):
    """The records of a file.

    Raises:
        RecordError: a line is no JSON object.
    """
    found = []
    for k, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise RecordError(f"{path}, line {k}: {line[:40]!r} given, expected a record as JSON: remove it") from None
    return found


def load(name, machine, columns, only=None, results=None):
    """The records of an experiment on one machine, with the columns that a chart draws.

    Args:
        name: of the experiment, a folder of results/.
        machine: of the file in it, without .jsonl.
        columns: {name: type}; the type is int, float (which an int is too), str, bool or list.
        only: {name: value} of the records to take, where an experiment has more than one kind.

    Returns:
        list of dict, in the order in which they were recorded.

    Raises:
        RecordError: there are no such records, or a column is missing or of another type.
    """
    path = Path(results or RESULTS, name, f"{machine}.jsonl")
    record_some = f"record some: python tools/experiments.py {name} --machine {machine}"
    if not path.exists():
        others = [p.stem for p in files(name, results)]
        choice = f", expected one of {', '.join(others)} (make charts MACHINE={others[0]})" if others else ""
        raise RecordError(f"no {path}{choice}; {record_some}")
    found = {k: record for k, record in enumerate(read(path), start=1) if where(record, **only or {})}
    if not found:
        raise RecordError(f"{path} holds no such records{f' ({only})' if only else ''}; {record_some}")
    for k, record in found.items():
        for column, kind in (ENVIRONMENT | columns).items():
            if column not in record:
                raise RecordError(f"{path}, line {k}: no column {column!r}, but {', '.join(record)}; {record_some}")
            if not fits(value := record[column], kind):
                raise RecordError(f"{path}, line {k}: {column} is {value!r}, expected a value of type {kind.__name__}")
    return list(found.values())


def fits(value, kind):
    """Whether a value may stand in a column of a type; what is no finite number may not stand in one of numbers."""
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (kind is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


def published():
    """Figures of others, with their sources: results/published.json."""
    return json.loads((ROOT / "results/published.json").read_text())


def where(record, **settings):
    """Whether a record has these settings; one of several, where a tuple is given."""
    return all(record.get(k) in v if isinstance(v, tuple) else record.get(k) == v for k, v in settings.items())


def select(lines, **settings):
    """The records with these settings."""
    return [record for record in lines if where(record, **settings)]


def group(lines, *columns):
    """{values of these columns: records}, in the order of their first appearance; one column gives plain values."""
    groups = {}
    for record in lines:
        key = tuple(record[column] for column in columns)
        groups.setdefault(key if len(columns) > 1 else key[0], []).append(record)
    return groups


def hardware(record):
    """What a record was measured on, in words."""
    cores = f", {record['cores']} cores" if record["device"] == "cpu" else ""
    return f"{record['device_name']}{cores}, torch {record['torch']}, torchvision {record['torchvision']}"


def spread(values, form):
    """Median (least to greatest), as text."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def checkpoint_cost(without, saving, r):
    """The share of time that a checkpoint every 100 steps takes: what one adds, over the time of 100 steps.

    Args:
        without, saving: images per second of runs without checkpoints, and with one every r["every"] steps.
    """
    return (without / saving - 1) * r["every"] / 100
