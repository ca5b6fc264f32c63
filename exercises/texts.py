"""What each exercise is about, read from the files of its folder."""

import json
import re
from pathlib import Path
from typing import NamedTuple

# number: folder
FOLDERS = {
    int(folder.name[:2]): folder
    for folder in sorted(Path(__file__).resolve().parent.glob("[0-9][0-9]_*"))
}

# Groups of exercises: {"en": title, "zh": title, "exercises": {number: (minutes, scene)}}
COURSE = json.loads(Path(__file__).with_name("course.json").read_text(encoding="utf-8"))
COURSE = [group for group in COURSE if {*map(int, group["exercises"])} & {*FOLDERS}]
PLACES = {int(n): place for group in COURSE for n, place in group["exercises"].items()}


class Text(NamedTuple):
    """The texts of an exercise."""

    title: str
    task: str  # what the program should do, and what one sees instead; its docstring
    hints: list  # from the cause to the place
    page: tuple  # where to read: file in docs/, title of the section
    why: str  # what was wrong, for --solution
    minutes: int  # that it takes, as we think
    scene: str  # of docs/see/ that shows why, with its variant; or ""

    @property
    def level(self):
        """Return how difficult the exercise is: 1, 2 or 3."""
        return 1 + (self.minutes > 5) + (self.minutes > 15)


def read_text(folder, language):
    """Return the Text of an exercise in "en" or "zh". The English task is in the program."""
    file = folder / ("text.zh.md" if language == "zh" else "text.md")
    title, *sections = re.split("^#+ ", file.read_text(encoding="utf-8"), flags=re.M)[1:]
    task, _ = split_docstring((folder / "program.py").read_text())
    parts = {"task": task}
    for section in sections:
        heading, _, body = section.partition("\n")
        parts[heading.lower()] = body.strip()
    page = tuple(parts.pop("page").split(": ", 1))
    hints = [hint.strip() for hint in re.split(r"^\d\. ", parts.pop("hint"), flags=re.M) if hint]
    minutes, scene = PLACES[int(folder.name[:2])]
    return Text(title.strip(), hints=hints, page=page, minutes=minutes, scene=scene, **parts)


def split_docstring(source):
    """Return the docstring of a program, and the code after it."""
    _, docstring, code = source.split('"""', 2)
    return docstring.strip(), code
