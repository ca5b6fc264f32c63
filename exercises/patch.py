"""Apply a unified diff: a reader may have neither patch nor git."""

import re


def apply(diff, text):
    """Return the text with a unified diff applied. The diff must match it exactly."""
    lines = text.splitlines(keepends=True)
    result = []
    position = 0  # in lines: of the first one that is not yet in the result
    for line in diff.splitlines(keepends=True)[2:]:  # after the names of the two files
        if hunk := re.match(r"@@ -(\d+)", line):
            first = int(hunk[1]) - 1
            result += lines[position:first]
            position = first
            continue
        mark, content = line[0], line[1:]
        if mark in " -":
            if lines[position] != content:
                raise ValueError(f"line {position + 1} of the text differs from the diff: {line}")
            position += 1
        if mark in " +":
            result.append(content)
    return "".join(result + lines[position:])
