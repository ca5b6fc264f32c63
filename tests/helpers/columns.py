"""The width of text in a terminal."""

import unicodedata


def columns(line):
    """Return how many columns a line takes. A Chinese character takes two."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in line)
