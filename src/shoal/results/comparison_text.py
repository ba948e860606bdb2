"""A comparison of runs as a table: plain text, CSV, Markdown or LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.results.comparison import Comparison, Quantity
from shoal.results.statistics import Estimate

Format: TypeAlias = Literal["table", "csv", "markdown", "latex"]

BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "…": r"\ldots{}",
}  # fmt: skip
"""Characters with a meaning in LaTeX, and how to write them."""
MARKDOWN = {"|": r"\|", "<": "&lt;", "*": r"\*", "_": r"\_", "`": r"\`", "\n": " "}


@dataclass(frozen=True)
class TextTable:
    """Cells of text: the first column is the label of the group."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    """How to read the table, in sentences."""


def text_table(comparison: Comparison) -> TextTable:
    """Return what a reader sees: means with half of the width of their intervals, and ratios."""
    groups, target = comparison.groups, comparison.target
    columns = [
        ["group", *(g.group.label for g in groups)],
        ["runs", *(str(len(g.seeds)) for g in groups)],
        [f"final {comparison.split} {comparison.metric}", *(_mean(g.final, "finite") for g in groups)],
        ["best", *(_mean(g.best, "finite") for g in groups)],
    ]
    if target is not None:
        for clock in dict.fromkeys(g.clock for g in groups):
            name = "time" if clock == "wall" else "virtual time"
            cells = (_mean(g.seconds, "reached") if g.clock == clock else "–" for g in groups)
            columns.append([f"{name} to {target:g} [s]", *cells])
        unit, size = _unit(comparison)
        columns.append([f"sent to {target:g} [{unit}]", *(_mean(g.bytes, "reached", size) for g in groups)])
        ratios = {"time": [g.seconds for g in groups], "bytes": [g.bytes for g in groups]}
    else:
        ratios = {"final": [g.final for g in groups]}
    if len(groups) > 1:
        columns += [[f"ratio of {name}", *map(_ratio, range(len(groups)), found)] for name, found in ratios.items()]
    header, *rows = zip(*columns, strict=True)
    return TextTable(header, tuple(rows), tuple(_notes(comparison)))


def csv_text(comparison: Comparison) -> str:
    """Return all numbers, in seconds and bytes; a cell without a value is empty."""
    keys = dict.fromkeys(key for g in comparison.groups for key in g.group.settings)
    names = [("final", "final"), ("best", "best")]
    if comparison.target is not None:
        names += [("seconds_to_target", "seconds"), ("bytes_to_target", "bytes")]
    parts = ("mean", "low", "high", "known", "ratio", "ratio_low", "ratio_high")
    header = ["group", *keys, "runs", "metric", "split", "target", "clock", "paired"]
    found = io.StringIO()
    writer = csv.writer(found, lineterminator="\n")
    writer.writerow([*header, *(f"{name}_{part}" for name, _ in names for part in parts)])
    for g in comparison.groups:
        settings = [g.group.settings.get(key, "") for key in keys]
        target = "" if comparison.target is None else comparison.target
        row = [g.group.label, *settings, len(g.seeds), comparison.metric, comparison.split, target, g.clock, g.paired]
        writer.writerow([*row, *(cell for _, field in names for cell in _numbers(getattr(g, field)))])
    return found.getvalue()


def markdown_text(comparison: Comparison) -> str:
    table = text_table(comparison)
    lines = [[_replaced(cell, MARKDOWN) for cell in row] for row in (table.header, *table.rows)]
    lines.insert(1, ["---", *["---:"] * (len(table.header) - 1)])
    notes = "".join(f"\n{_replaced(note, MARKDOWN)}\n" for note in table.notes)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes


def latex_text(comparison: Comparison) -> str:
    """Return a tabular with the rules of the package booktabs; the notes are comments."""
    table = text_table(comparison)
    header, *rows = (" & ".join(_replaced(cell, LATEX) for cell in row) + r" \\" for row in (table.header, *table.rows))
    return "\n".join([
        *(f"% {note}" for note in table.notes), r"% Needs \usepackage{booktabs}.",
        rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"\toprule", header, r"\midrule", *rows,
        r"\bottomrule", r"\end{tabular}", "",
    ])  # fmt: skip


def _mean(quantity: Quantity | None, what: str, size: float = 1.0) -> str:
    """Return the mean and half of the width of its interval; `what` is said of runs that have a value."""
    if quantity is None:
        return "–"
    if quantity.mean is None:
        return f"{quantity.known} of {len(quantity.values)} {what}"
    mean = quantity.mean
    width = 0.0 if mean.high is None else (mean.high - mean.value) / size
    if not width:
        return f"{mean.value / size:.4g}" + ("" if mean.high is None else " ± 0")
    digits = max(0, 1 - math.floor(math.log10(width)))  # two significant digits of the width
    return f"{mean.value / size:.{digits}f} ± {width:.{digits}f}"


def _ratio(number: int, quantity: Quantity | None) -> str:
    if number == 0:
        return "1"
    if quantity is None or quantity.ratio is None:
        return "–"
    ratio = quantity.ratio
    return f"{ratio.value:.3g}" + ("" if ratio.low is None else f" [{ratio.low:.3g}, {ratio.high:.3g}]")


def _unit(comparison: Comparison) -> tuple[str, float]:
    """Return the unit of bytes in which no mean is below 1."""
    means = [g.bytes.mean.value for g in comparison.groups if g.bytes is not None and g.bytes.mean is not None]
    least = min((mean for mean in means if mean > 0), default=1.0)
    return next((unit for unit in BYTE_UNITS if least >= unit[1]), BYTE_UNITS[-1])


def _numbers(quantity: Quantity) -> list[float | None]:
    return [*_parts(quantity.mean), quantity.known, *_parts(quantity.ratio)]


def _parts(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)


def _notes(comparison: Comparison) -> Iterator[str]:
    groups = comparison.groups
    if any(len(g.seeds) > 1 for g in groups):
        yield "± is half of the width of the 95 % t-interval of the mean over the runs of a group."
    if any(len(g.seeds) == 1 for g in groups):
        yield "A group of one run has no interval."
    if len(groups) > 1:
        paired = {g.paired for g in groups[1:]}
        how = "not paired" if paired == {False} else "paired by seed" if paired == {True} else "paired by seed if equal"
        yield f"Ratios are of geometric means, to the first group, with 95 % t-intervals ({how})."
    quantities = [q for g in groups for q in (g.seconds, g.bytes) if q is not None]
    if any(q.mean is None for q in quantities):
        yield "There is no mean if some runs of a group did not reach the target: it would be biased."


def _replaced(text: str, characters: Mapping[str, str]) -> str:
    return "".join(characters.get(character, character) for character in text)
