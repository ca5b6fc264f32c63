"""What check.py says: English templates with values, put into the reader's language at the end."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

CHINESE = Path(__file__).with_name("chinese.json")


class Sentence(NamedTuple):
    """A sentence, or a part of one, that has not yet a language."""

    template: str  # in English, such as "rank {rank} waits in {line}"
    values: dict  # of its names: numbers, texts, other sentences


def say(template, **values):
    return Sentence(template, values)


def joined(template, parts):
    """Return sentences or texts as one. The template, with {before} and {after}, joins two."""
    whole, *rest = parts
    for part in rest:
        whole = say(template, before=whole, after=part)
    return whole


@functools.cache
def translations():
    """Return {English template: Chinese template}."""
    return json.loads(CHINESE.read_text(encoding="utf-8"))


def text_of(sentence, language):
    """Return a Sentence as text in "en" or "zh". Other values stay as they are."""
    if not isinstance(sentence, Sentence):
        return sentence
    template = sentence.template
    if language == "zh":
        template = translations().get(template, template)
    return template.format(
        **{name: text_of(value, language) for name, value in sentence.values.items()}
    )
