"""Colors for what a person reads in a terminal."""

import os
import re
import sys

COLORS = {  # beginning of a line: its color, as a terminal numbers them
    r"^(\+.*|ok\b|passed\b|通过)": 32,  # green
    r"^(-.*|found:|FAIL\b|not yet\b|(还没有|尚未|未)通过)": 31,  # red
    r"^warn\b": 33,  # yellow
}


def colored(text):
    """Return a text with its diffs and verdicts in color, if a terminal shows it.

    NO_COLOR turns colors off (https://no-color.org).
    """
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    for beginning, color in COLORS.items():
        text = re.sub(beginning, rf"\033[{color}m\g<0>\033[0m", text, flags=re.MULTILINE)
    return text
