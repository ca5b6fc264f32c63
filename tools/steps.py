"""The steps of the ladder: what each script changes in its parent.

    python tools/steps.py       one line a step: its size and the sections it changes; exit code 1 if it breaks a rule
    python tools/steps.py 03    the diff of 03 to its parent

A step is small, changes only the sections named for it below, and leaves the others identical to the byte.
"""

import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    parent: str
    changes: tuple  # sections
    added: int = 35  # lines, at most
    removed: int = 12
    hunks: int = 10


STEPS = {
    "02_snmc_dp.py": Step("01_snsc.py", ("docstring", "1", "5"), 10, 4, 4),
    "03_mnmc_ddp_launch.py": Step(
        "01_snsc.py", ("docstring", "imports", "parse_args", "main", "0", "1", "2", "4")
    ),
    "04_mnmc_ddp_mp.py": Step(
        "03_mnmc_ddp_launch.py", ("docstring", "imports", "parse_args", "main", "0", "start")
    ),
    "05_mnmc_ddp_slurm.py": Step("03_mnmc_ddp_launch.py", ("docstring", "imports", "parse_args", "0")),
    # Not a step but a flight of stairs: the sections are what it shares with the rest.
    "06_imagenet.py": Step(
        "03_mnmc_ddp_launch.py",
        ("docstring", "imports", "parse_args", "main", "0", "1", "2", "3", "4", "5"), 450, 90, 60
    ),
}  # fmt: skip

SECTIONS = {  # name -> how its first line begins
    "docstring": '"""',
    "imports": "(import|from) ",
    "parse_args": "def parse_args",
    "main": "(@|def main)",
    "0": "    # 0. set up$",
    "1": "    # 1. define network$",
    "2": "    # 2. define dataloader$",
    "3": "    # 3. define loss and optimizer$",
    "4": "    # 4. train and evaluate$",
    "5": "    # 5. tear down$",
    "start": "if __name__",
}


def sections(script):
    """The lines of a script by section, in the order of SECTIONS.

    Raises:
        ValueError: a section is missing or out of order.
    """
    found, names = {}, list(SECTIONS)
    for line in (ROOT / script).read_text().splitlines():
        if names and re.match(SECTIONS[names[0]], line):
            current = found.setdefault(names.pop(0), [])
        current.append(line)
    if names:
        raise ValueError(f"{script} has no section {names[0]!r} after {list(found)[-1]!r}")
    return found


def diff(script):
    """The unified diff of a script to its parent, as lines, without the header."""
    parent, child = ((ROOT / name).read_text().splitlines() for name in (STEPS[script].parent, script))
    return list(difflib.unified_diff(parent, child, lineterm=""))[2:]


def size(script):
    """(lines added, lines removed, hunks) of the diff of a script to its parent."""
    return tuple(sum(line.startswith(sign) for line in diff(script)) for sign in ("+", "-", "@@"))


def changed(script):
    """The names of the sections that differ from the parent's."""
    parent, child = sections(STEPS[script].parent), sections(script)
    return tuple(name for name in SECTIONS if parent[name] != child[name])


def problems(script):
    """What is wrong with a step, one line each."""
    step, measured = STEPS[script], dict(zip(("added", "removed", "hunks"), size(script), strict=True))
    found = [
        f"{script}: {n} {what}, expected {getattr(step, what)} at most"
        for what, n in measured.items()
        if n > getattr(step, what)
    ]
    if changed(script) != step.changes:
        found.append(f"{script}: changes the sections {changed(script)}, expected {step.changes}")
    return found


def main():
    if len(sys.argv) > 1:
        names = [script for script in STEPS if script.startswith(sys.argv[1][:2])]
        if not names:
            sys.exit(f"steps.py: error: {sys.argv[1]}: expected one of {', '.join(s[:2] for s in STEPS)}")
        print("\n".join(diff(names[0])))
        return
    for script, step in STEPS.items():
        added, removed, hunks = size(script)
        where = ", ".join(changed(script))
        print(f"{script:24} <- {step.parent[:2]}: +{added} -{removed} in {hunks} hunks; changes {where}")
    if found := [line for script in STEPS for line in problems(script)]:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
