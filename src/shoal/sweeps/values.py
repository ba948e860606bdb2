"""Values of a sweep as text: lists of values, seeds and ranges to search; and settings as short labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shoal.errors import ExperimentError
from shoal.experiment import parse_override

Settings: TypeAlias = Mapping[str, Any]
"""Dotted keys of an experiment, and their values."""
Scale: TypeAlias = Literal["linear", "log"]

MAX_SEEDS = 100_000
"""A range of more seeds is an error: it has one digit too many."""
CLOSED_BY = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Range:
    """Numbers to search: from `low` to `high`, uniform on a scale. Whole numbers if both limits are."""

    low: float
    high: float
    scale: Scale = "linear"

    def at(self, fraction: float) -> float:
        """Return the number at a fraction of the way from `low` to `high`, which is at least 0 and below 1.

        Every whole number has the same share of the way on a linear scale, and one unit of the axis on a log scale.
        """
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        low, high = (self.low, self.high + 1) if whole else (self.low, self.high)
        if self.scale == "log":
            found = math.exp(math.log(low) + fraction * (math.log(high) - math.log(low)))
        else:
            found = low + fraction * (high - low)
        if whole:
            return min(int(found + 1e-9), int(self.high))
        return float(f"{found:.4g}")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}:{self.scale}"


Searched: TypeAlias = Range | tuple[Any, ...]
"""What a search may choose from: a range, or some values."""


def parse_values(text: str, option: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `key=a,b,c`: a dotted key, and values as for `--set`."""
    key, separator, values = text.partition("=")
    if not separator or not values.strip():
        raise ExperimentError([f"{text!r}: expected key=value,value, such as training.lr=0.01,0.1"], option)
    parts = list(_split(values))
    try:
        return key.strip(), tuple(parse_override(f"{key}={part.strip()}")[1] for part in parts)
    except ExperimentError as error:
        raise ExperimentError(list(error.problems), option) from None


def _split(text: str) -> Iterator[str]:
    """Split a text at its commas, except in brackets and quotes."""
    closing: list[str] = []
    quote, start = "", 0
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[i - 1] != "\\" else quote
        elif character in "\"'":
            quote = character
        elif character in CLOSED_BY:
            closing.append(CLOSED_BY[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def parse_seeds(text: str, option: str) -> tuple[int, ...]:
    """Parse seeds and ranges of them: "1-5", or "1, 3, 7-9"."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if not match or (last := int(match[2] or match[1])) < (first := int(match[1])):
            raise ExperimentError([f"{text!r}: expected seeds and ranges of seeds, such as '1-5' or '1,3,7-9'"], option)
        if last - first >= MAX_SEEDS:
            raise ExperimentError([f"{text!r}: {last - first + 1:,} seeds; expected at most {MAX_SEEDS:,}"], option)
        found.extend(range(first, last + 1))
    return check_seeds(found, option)


def check_seeds(seeds: Sequence[Any], option: str) -> tuple[int, ...]:
    """Return seeds that are different whole numbers of at least 0."""
    wrong = [seed for seed in seeds if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0]
    if wrong:
        raise ExperimentError([f"seeds: {wrong[0]!r} is no seed; expected whole numbers of at least 0"], option)
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise ExperimentError([f"seeds: {repeated[0]} is given twice; the two runs would be equal"], option)
    return tuple(seeds)


def parse_search(text: str, option: str) -> tuple[str, Searched]:
    """Parse `key=low:high`, `key=low:high:log`, or values to choose from, `key=a,b,c`."""
    key, _, values = text.partition("=")
    if (found := re.fullmatch(r"\s*([^:,\s]+):([^:,\s]+)(?::(\w+))?\s*", values)) is None:
        return parse_values(text, option)
    low, high = (_number(limit, text, option) for limit in (found[1], found[2]))
    scale = found[3] or "linear"
    if scale not in ("linear", "log"):
        raise ExperimentError([f"{text!r}: scale {scale!r}; expected 'log' or 'linear'"], option)
    if not low < high:
        raise ExperimentError([f"{text!r}: expected a lower limit, and a higher one after the colon"], option)
    if scale == "log" and low <= 0:
        raise ExperimentError([f"{text!r}: a range with scale 'log' must begin above 0"], option)
    return key.strip(), Range(low, high, "log" if scale == "log" else "linear")


def _number(text: str, whole: str, option: str) -> float:
    try:
        number = int(text) if re.fullmatch(r"[+-]?\d+", text, re.ASCII) else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        problem = f"{whole!r}: {text!r} is no finite number; expected low:high:log, such as 0.01:1:log"
        raise ExperimentError([problem], option)
    return number


def flatten(table: Settings, prefix: str = "") -> dict[str, Any]:
    """Return a table with dotted keys. A table with a name is a component: a value as a whole."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and "name" not in value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe_value(value: Any) -> str:
    """Return a value of a setting as short text: a component as "topk(fraction=0.1)"."""
    if isinstance(value, Mapping):
        options = ", ".join(f"{k}={describe_value(v)}" for k, v in value.items() if k != "name")
        name = str(value.get("name", ""))
        return f"{name}({options})" if options else name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def describe_settings(settings: Settings) -> str:
    """Return settings as one line: "sharing = topk, training.lr = 0.1"."""
    return ", ".join(f"{key} = {describe_value(value)}" for key, value in settings.items())
