"""Show the steps of the ladder: the size of each script, and what it changes in its parent.

    python tools/steps.py       one line per script; exits with 1 if a script changes other sections
    python tools/steps.py 03    the diff between 03 and its parent

A step changes only the sections listed below, and leaves the other sections identical to the byte.
"""

import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.rank_watch.colors import colored


class Step(NamedTuple):
    parent: str
    sections: tuple  # the sections that change


STEPS = {  # 01 and 06 have no parent
    "02_snmc_dp.py": Step("01_snsc.py", ("docstring", "1", "5")),
    "03_mnmc_ddp_launch.py": Step(
        "01_snsc.py", ("docstring", "imports", "0", "1", "2", "4", "5", "start")
    ),
    "04_mnmc_ddp_mp.py": Step(
        "03_mnmc_ddp_launch.py", ("docstring", "imports", "main", "0", "start")
    ),
    "05_mnmc_ddp_slurm.py": Step("03_mnmc_ddp_launch.py", ("docstring", "imports", "0")),
    "07_fsdp.py": Step(
        "03_mnmc_ddp_launch.py", ("docstring", "imports", "0", "1", "2", "3", "4", "5", "start")
    ),
    "08_gpt.py": Step(
        "07_fsdp.py", ("docstring", "imports", "0", "1", "2", "3", "4", "5", "start")
    ),
}

SECTIONS = {  # name: pattern of the first line
    "docstring": '"""',
    "imports": "(import|from) ",
    "main": "(@|def main)",
    "0": "    # 0. set up$",
    "1": "    # 1. define model$",
    "2": "    # 2. define dataloader$",
    "3": "    # 3. define loss and optimizer$",
    "4": "    # 4. train and evaluate$",
    "5": "    # 5. tear down$",
    "start": "if __name__",
}


def read(script):
    """Return the lines of a script."""
    return (ROOT / script).read_text().splitlines()


def sections(script, read=read):
    """Return {section: lines} of a script, in the order of SECTIONS.

    Args:
        script: name of the file.
        read: function of the name that returns the lines; the Chinese pages translate comments.

    Raises:
        ValueError: a section is missing or out of order.
    """
    lines_of = {}
    names = list(SECTIONS)
    for line in read(script):
        if names and re.match(SECTIONS[names[0]], line):
            current = lines_of.setdefault(names.pop(0), [])
        current.append(line)
    if names:
        raise ValueError(f"{script} has no section {names[0]!r} after {list(lines_of)[-1]!r}")
    return lines_of


def diff(script, read=read):
    """Return the lines of the unified diff between a script and its parent, without the header."""
    return list(difflib.unified_diff(read(STEPS[script].parent), read(script), lineterm=""))[2:]


def section_diff(script, names, read=read):
    """Return the lines of the diff between some sections of a script and of its parent, with all
    lines in common.
    """
    old, new = (
        [line for name in names for line in sections(s, read)[name]]
        for s in (STEPS[script].parent, script)
    )
    return list(difflib.unified_diff(old, new, n=len(old), lineterm=""))[3:]


def size(script):
    """Return (lines added, lines removed) in a script, compared with its parent."""
    return tuple(sum(line.startswith(sign) for line in diff(script)) for sign in "+-")


def changed(script):
    """Return the names of the sections that differ from the parent's."""
    parent = sections(STEPS[script].parent)
    child = sections(script)
    return tuple(name for name in SECTIONS if parent[name] != child[name])


def describe(script):
    """Return a line about a script: its size, and what it changes in its parent."""
    line = f"{script:24} {len(read(script)):3} lines"
    if step := STEPS.get(script):
        added, removed = size(script)
        line += f" <- {step.parent[:2]}: +{added} -{removed}; changes {', '.join(changed(script))}"
    return line


def main():
    if len(sys.argv) > 1:
        number = sys.argv[1].partition("_")[0].zfill(2)  # of 3, 03 or the name of a file
        scripts = [script for script in STEPS if script.startswith(number)]
        if not scripts:
            numbers = ", ".join(script[:2] for script in STEPS)
            found = f"steps.py: error: {sys.argv[1]}: expected one of {numbers}"
            sys.exit(f"{found}; python tools/steps.py 03")
        print(colored("\n".join(diff(scripts[0]))))
        return
    for path in sorted(ROOT.glob("0?_*.py")):
        print(describe(path.name))
    for script, step in STEPS.items():
        if changed(script) != step.sections:
            sys.exit(f"{script}: changes the sections {changed(script)}, expected {step.sections}")


if __name__ == "__main__":
    main()
