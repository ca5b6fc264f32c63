"""Find words with two meanings in the prose of the book: python tools/book/words.py

Prints each line with such a word and the word to use, and exits with 1. Code, quotes and generated
text are left out.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.book.pages import BLOCK, pages
from tools.records import ROOT

UNITS = "process|rank|GPU|device|core|worker|machine|host|node|step|epoch|second|class"
KINDS = "train|trains|trained|wraps?|whole|small|large|neural|same|convolutional|residual"
RULES = [  # pattern, what to write instead
    (
        (
            r"\b(images?|samples?|examples?|batch|GPUs?|processes|threads?|cores?|times?) an? "
            rf"({UNITS})\b"
        ),
        "per",
    ),
    (r"\brates?\b", "learning rate"),
    (rf"\b({KINDS}) networks?\b", "model"),
    (
        (
            r"\bnetworks? (learns?|trains?|has \d|is "
            r"(trained|evaluated|compiled|wrapped))|\bnetwork's\b"
        ),
        "model",
    ),
    (
        (
            r"\b(weights|parameters|layers|gradients|copies|copy|size) of (the|a|each|every) "
            r"networks?\b"
        ),
        "model",
    ),
    (r"\b(goes|go|went|going) on\b", "continue, resume"),
    (r"\b(is|are|was) tested on \d|\btests? the model\b", "evaluate"),
]


def prose(text):
    """Return the text with generated blocks, code, comments, links and headings blanked out; line
    numbers stay.
    """
    patterns = (
        BLOCK,
        re.compile(r"^```.*?^```", re.M | re.S),
        re.compile(r"<!--.*?-->", re.S),
        re.compile(r"`[^`]*`"),
    )
    patterns += (
        re.compile(r"\]\([^)]*\)"),
        re.compile(r"^#.*", re.M),
        re.compile(r"learning\s+rates?", re.I),
    )
    for pattern in patterns:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text


def find(text):
    """Return (line number, word, what to write instead) for each word with two meanings."""
    text = prose(text)
    found = [
        (text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead)
        for pattern, instead in RULES
        for match in re.finditer(pattern, text.replace("\n", " "), re.I)
    ]
    return sorted(found)


def main():
    found = [
        (page.relative_to(ROOT), *problem) for page in pages() for problem in find(page.read_text())
    ]
    for page, line, word, instead in found:
        print(f"{page}:{line}: {word!r}: expected {instead}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
