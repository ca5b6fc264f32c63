"""What people type who come from other trainings, and what to type here, for errors.

The rows stand in the tables of docs/coming-from.md. What the first cell of a row has between
backquotes is typed there; the other words say how it differs. The second cell holds flags between
backquotes, or says in words why there is none, or what to do.
"""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/coming-from.md"
# The heads of the second cells, in the tables for these scripts
OF_01_TO_05 = ["`01_snsc.py` to `05_mnmc_ddp_slurm.py`"]
OF_04 = [*OF_01_TO_05, "`04_mnmc_ddp_mp.py`"]
OF_06 = ["`06_imagenet.py`"]


def read_rows(heads):
    """Return the rows (theirs, ours) of the tables with these heads, or none without the page."""
    rows = []
    if not PAGE.exists():  # in a copy of the code alone
        return rows
    in_table = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) != 2:
            in_table = False
        elif cells[1] in heads:
            in_table = True
        elif in_table and cells[0] != "---":
            rows.append(tuple(cells))
    return rows


def is_prose(ours):
    """Return whether there is no flag for it here, and a row says why or what to do."""
    return not ours.startswith("`")


def dashed(word):
    """Return a word of a command line with - for _ in the name of its flag: --batch_size=8."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def typed(theirs):
    """Return what a row says is typed there: a list of lists of words."""
    return [[dashed(word) for word in text.split()] for text in re.findall("`(.+?)`", theirs)]


def hints(words, heads, known):
    """Return what to type here for words that others take: a list of str.

    Args:
        words: list of str, a command line.
        heads: of the tables for the script, see OF_06.
        known: flags that the script has itself.
    """
    rows = read_rows(heads)
    found = []
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if not value and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value = words[place + 1]
        row = None if name in known else find_row(name, rows, known)
        if row:
            found.append(hint(name, value, *row))
    return found


def find_row(name, rows, known):
    """Return the first row with this name of a flag, or None.

    It must lead to flags that the script knows: 01 shares a table with 03, but has no --sync-bn.
    Words may name the flags of other scripts.
    """
    for theirs, ours in rows:
        flags = [word for word in ours.strip("`").split() if word.startswith("-")]
        fits = is_prose(ours) or all(flag in known for flag in flags)
        if fits and name in [words[0] for words in typed(theirs)]:
            return theirs, ours
    return None


def hint(name, value, theirs, ours):
    """Return what to type here for one flag, with its value."""
    example = next(words for words in typed(theirs) if words[0] == name)
    note = re.sub("`.+?`", "", theirs, count=1).strip(" :,")
    note = f" (there {note})" if note else ""
    prose = is_prose(ours)
    ours = ours.strip("`")
    if len(example) == 1:
        value = ""
    elif value and example[1] in ours.split() and not prose:
        ours = " ".join(value if word == example[1] else word for word in ours.split())
    elif value and value != example[1] and not prose:
        note = f" for {' '.join(example)}{note}"
    return f"{name}{value and ' ' + value}: here {ours}{note}"
