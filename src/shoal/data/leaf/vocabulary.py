"""Vocabularies: words and their numbers, from files or by frequency."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shoal.data.leaf.json_reader import shorten
from shoal.errors import DataError

MAX_NUMBER = 1 << 24
"""The numbers of words are below this, because a model has one row per number."""


def most_frequent(words: Iterable[str], count: int) -> list[str]:
    """Return the `count` most frequent words. Equally frequent words are in alphabetical order."""
    return [word for word, _ in sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))[:count]]


def read_words(file: Path) -> list[str]:
    """Return the distinct words of a GloVe file, of a list, or of LEAF's embs.json."""
    if file.suffix == ".json":
        found = _read_json(file)
        words = found.get("vocab") if isinstance(found, dict) else found
    else:
        words = [line.split(" ", 1)[0].strip() for line in _read_text(file).splitlines()]
    if not isinstance(words, list | dict) or not all(isinstance(word, str) for word in words) or not words:
        raise DataError(f"{file}: expected words: a GloVe file, one word per line, or JSON with a list 'vocab'")
    return [word for word in dict.fromkeys(words) if word]


def read_numbered_words(file: Path, special: Sequence[str]) -> dict[str, int]:
    """Return words and their numbers: LEAF's vocabulary as JSON, {word: number}, or one word per line.

    JSON must have a number for each of the `special` words; in a list of words they come first.
    """
    if file.suffix in (".pck", ".pkl", ".pickle"):
        raise DataError(
            f"{file}: pickles are not read, because they can run code; write the dictionary with json.dump to a .json"
        )
    if file.suffix != ".json":
        words = [*special, *_read_text(file).split()]
        return {word: number for number, word in enumerate(dict.fromkeys(words))}
    found = _read_json(file)
    numbers = found.get("vocab", found) if isinstance(found, dict) else found
    if not isinstance(numbers, dict):
        raise DataError(f"{file}: expected words and their numbers: {{\"vocab\": {{word: number}}}}")  # fmt: skip
    for word, number in numbers.items():
        if type(number) is not int or not 0 <= number < MAX_NUMBER:
            raise DataError(
                f"{file}: the number of {shorten(word)} is {shorten(number)}; expected an integer from 0 to "
                f"{MAX_NUMBER - 1:,}"
            )
    for word in special:
        if word not in numbers:
            raise DataError(f"{file}: no number for {word}; add it")
    return numbers


def _read_json(file: Path) -> Any:
    try:
        return json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # deeply nested lists, or a number with thousands of digits
        raise DataError(f"{file}: malformed JSON: {error}") from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
