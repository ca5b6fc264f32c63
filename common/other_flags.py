"""What people type who come from other trainings, and what to type here, for errors.

other_flags.json has a table of rows for each such training. A row says what is typed `there`, and
what to type `here` or, without a flag for it, what to do `instead`; its `note` says how it differs
there. docs/coming-from.md shows the tables.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


def read_rows(scripts):
    """Return the rows for some scripts: list of dict.

    Args:
        scripts: list of the groups in other_flags.json: "01 to 05", "04" or "06".
    """
    groups = json.loads(FILE.read_text(encoding="utf-8"))
    return [row for script in scripts for rows in groups[script].values() for row in rows]


def hints(words, scripts, known):
    """Return what to type here for words that others take: a list of str.

    Args:
        words: list of str, a command line, with - for _ in the names of flags.
        scripts: see read_rows.
        known: flags that the script has itself.
    """
    rows = read_rows(scripts)
    found = []
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if not value and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value = words[place + 1]
        row = None if name in known else find_row(name, rows, known)
        if row:
            found.append(hint(name, value, row))
    return found


def find_row(name, rows, known):
    """Return the first row with this name of a flag, or None.

    It must lead to flags that the script knows: 01 shares a table with 03, but has no --sync-bn.
    """
    for row in rows:
        theirs, _ = split(row.get("there", ""))
        flags = [word for word in row.get("here", "").split() if word.startswith("-")]
        if name == theirs and all(flag in known for flag in flags):
            return row
    return None


def split(there):
    """Return the name of a flag as argparse gets it, and its value or ""."""
    name, _, value = there.partition(" ")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return name, value


def hint(name, value, row):
    """Return what to type here for one flag, with its value."""
    _, example = split(row["there"])
    ours = row.get("here") or row["instead"]
    note = f" (there {row['note']})" if "note" in row else ""
    if not example:
        value = ""
    elif value and example in row.get("here", "").split():
        ours = " ".join(value if word == example else word for word in ours.split())
    elif value and value != example and "here" in row:
        note = f" for {name} {example}{note}"
    return f"{name}{value and ' ' + value}: here {ours}{note}"
