"""Translate the words of generated tables and figures, which no page holds, from a JSON file of the
Chinese edition.
"""

import json
import re

from tools.records import ROOT


class PhraseError(ValueError):
    """A table or a figure has words without a translation."""


class Phrases:
    """The words of one JSON file.

    Args:
        path: a file with "words", {English: Chinese}, and "patterns", {regular expression: Chinese,
            \\1 for a group}.
    """

    def __init__(self, path):
        self.path = path
        read = json.loads(path.read_text())
        self.words = read["words"]
        self.patterns = [
            (re.compile(pattern), chinese) for pattern, chinese in read["patterns"].items()
        ]

    def translate(self, text):
        """Return the Chinese of a cell or a label.

        Code, links, numbers and names of two capitals stay as they are.

        Raises:
            PhraseError: the file lacks these words.
        """
        key = " ".join(text.split())
        if key in self.words:
            return self.words[key]
        for pattern, chinese in self.patterns:
            if match := pattern.fullmatch(key):
                return match.expand(chinese)
        if not re.search(r"[a-z]{2}", re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", key)):
            return text
        raise PhraseError(f"no Chinese for {key!r}: add it to {self.path.relative_to(ROOT)}")
