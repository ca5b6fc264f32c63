"""Translate the comments and docstrings of the code that the Chinese pages show.

docs/zh/comments.json holds the translations: {English: Chinese}, where \\n begins a new line. The
English is a comment or a run of docstring lines with the same indentation, on one line. What is not
in the file stays English: commands, and comments without a lesson.
"""

import ast
import functools
import io
import json
import re
import tokenize
from typing import NamedTuple

from tools.records import ROOT

FILE = ROOT / "docs/zh/comments.json"


class Comment(NamedTuple):
    """first, last: its lines, from 0; before, after: the rest of these lines; text: on one line."""

    first: int
    last: int
    before: str
    text: str
    after: str = ""

    @property
    def is_alone(self):
        return self.before.strip() in ("", "#")


@functools.cache
def load():
    return json.loads(FILE.read_text())


def translate(language, code):
    """Return code with the comments that docs/zh/comments.json translates in Chinese.

    Args:
        language: "python" or "sh"; other code has no comments.
        code: the text of a block or of a file.
    """
    chinese = load()
    lines = code.splitlines()
    for comment in reversed(find(language, code)):
        if comment.text in chinese:
            new = [comment.before + line for line in chinese[comment.text].split("\n")]
            lines[comment.first : comment.last + 1] = [*new[:-1], new[-1] + comment.after]
    return "\n".join(lines) + "\n" * code.endswith("\n")


def read(file):
    """Return the lines of a Python file of this repository, with its comments in Chinese."""
    return translate("python", (ROOT / file).read_text()).splitlines()


def find(language, code):
    """Return the comments of code in the order of its lines. See Comment."""
    if language == "python":
        lines = [*comments_of_python(code), *docstring_lines(code)]
    elif language == "sh":
        lines = comments_of_lines(code.splitlines())
    else:
        lines = []
    return merged(sorted(lines))


def comments_of_python(code):
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            yield comment_at(token.start[0] - 1, token.line.rstrip("\n"), text)


def comments_of_lines(lines, first=0):
    for number, line in enumerate(lines, start=first):
        if match := re.match(r"(?:.*?\s)??# (\S.*)", line):
            yield comment_at(number, line, match[1])


def docstring_lines(code):
    """Yield each line of the docstrings; of an example in a docstring, its comments."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if not isinstance(node, kinds) or ast.get_docstring(node) is None:
            continue
        string = node.body[0]
        for number in range(string.lineno - 1, string.end_lineno):
            line = lines[number]
            text = line.strip().removeprefix('"""').removesuffix('"""')
            if "  # " in text:
                yield from comments_of_lines([line], number)
            elif text:
                yield comment_at(number, line, text)


def comment_at(number, line, text):
    before, _, after = line.rpartition(text)
    return Comment(number, number, before, " ".join(text.split()), after)


def merged(lines):
    """Return the lines with those joined that are one comment or one paragraph."""
    found = []
    for line in lines:
        above = found[-1] if found else None
        if above and above.is_alone and above[1:3] == (line.first - 1, line.before):
            found[-1] = above._replace(last=line.last, text=f"{above.text} {line.text}")
        else:
            found.append(line)
    return found
