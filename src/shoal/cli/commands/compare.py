"""`shoal compare`: groups of runs that differ only in the seed."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.arguments import existing_runs, finite_number, writing
from shoal.cli.display import console, print_line, show_warnings
from shoal.results.comparison import Comparison, compare_groups
from shoal.results.comparison_text import csv_text, latex_text, markdown_text, text_table
from shoal.results.groups import group_runs

WRITERS = {"csv": csv_text, "markdown": markdown_text, "latex": latex_text}
FORMATS = ("table", *WRITERS)
ENDINGS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
"""The format of a file, by the ending of its name."""
TEXT_WIDTH = 400
"""The width of a table that is not shown in a terminal: its lines are not wrapped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folders of runs, folders that contain runs, or names of experiments"
    )
    parser.add_argument(
        "--target", type=finite_number,
        help="also compare the time and the bytes until the mean score reached this value "
        "(default: the target of the experiments, if it is the same)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", help="the metric to compare (default: evaluation.metric, or the main metric of the task)"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="the format of the output (default: by the ending of --out, or table)"
    )
    parser.add_argument("--out", type=Path, help="write the output to this file")
    parser.set_defaults(command=compare_runs)


def compare_runs(parsed: argparse.Namespace) -> int:
    screen = console()
    with show_warnings(console(stderr=True)):
        comparison = compare_groups(group_runs(existing_runs(parsed.runs, "compare")), parsed.target, parsed.metric)
    form = parsed.format or (ENDINGS.get(parsed.out.suffix) if parsed.out else None) or "table"
    if parsed.out is None and form == "table":
        show_comparison(comparison, screen)
        return 0
    text = WRITERS[form](comparison) if form in WRITERS else _plain_table(comparison)
    if parsed.out is None:
        print(text, end="")
        return 0
    with writing(parsed.out):
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(text, encoding="utf-8")
    print_line(f"{len(comparison.groups)} groups: {parsed.out}", screen)
    return 0


def show_comparison(comparison: Comparison, screen: Console) -> None:
    """Print a comparison as a table. Its lines are wrapped only in a terminal."""
    if screen.is_terminal:
        _print_table(comparison, screen)
    else:
        print(_plain_table(comparison), end="")


def _plain_table(comparison: Comparison) -> str:
    text = io.StringIO()
    _print_table(comparison, Console(file=text, width=TEXT_WIDTH))
    return "\n".join(line.rstrip() for line in text.getvalue().split("\n"))


def _print_table(comparison: Comparison, screen: Console) -> None:
    found = text_table(comparison)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for number, name in enumerate(found.header):
        table.add_column(Text(name), justify="left" if number == 0 else "right", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    screen.print(table)
    for note in found.notes:
        print_line(note, screen)
