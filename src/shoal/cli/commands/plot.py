"""`shoal plot`: figures of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from shoal.cli.arguments import existing_run, existing_runs, finite_number, picture_path, writing
from shoal.cli.display import console, print_line, show_warnings
from shoal.results.figures import FigureOptions, Kind, draw_figure
from shoal.results.plot_curves import Axis, Spread
from shoal.results.plot_style import save_figure
from shoal.results.plots import LogAxis
from shoal.results.records import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a figure of runs. Runs that differ only in the seed are one line: their mean, with its 95 % confidence "
        "interval. A folder stands for all runs in it."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, folders above them, names of experiments")
    parser.add_argument(
        "--y", "--metric", dest="y",
        help="what to plot: a metric such as accuracy or loss, consensus, drift, training-loss, averaged-accuracy "
        "(default: accuracy, or the main metric of the task); a topology is coloured by a metric or by class",
    )  # fmt: skip
    horizontal = parser.add_mutually_exclusive_group()
    horizontal.add_argument(
        "--x", choices=get_args(Axis),
        help="the horizontal axis (default: rounds, or time if a run was evaluated by time)",
    )  # fmt: skip
    horizontal.add_argument("--panels", type=_panels, metavar="X,…", help="several panels: --panels rounds,time,bytes")
    parser.add_argument(
        "--spread", choices=get_args(Spread),
        help="the band: the 95 %% interval over seeds, the range over nodes, or none (default: seeds; one run: nodes)",
    )  # fmt: skip
    parser.add_argument("--log", type=_log_axes, default=(), metavar="AXIS,…",
                        help="logarithmic axes: some of rounds, time, bytes and y")  # fmt: skip
    parser.add_argument(
        "--label", action="append", default=[], dest="labels", metavar="TEXT",
        help="the label of a line, in the order of the lines; give one for each line",
    )  # fmt: skip
    parser.add_argument("--kind", choices=get_args(Kind), default="lines",
                        help="lines, or a figure of the nodes of one run (default: lines)")  # fmt: skip
    parser.add_argument("--round", type=int, metavar="N", help="the round of a topology, from 0 (default: the last)")
    parser.add_argument("--start", type=finite_number, metavar="SECONDS", help="the time at which a timeline begins")
    parser.add_argument("--end", type=finite_number, metavar="SECONDS", help="the time at which a timeline ends")
    parser.add_argument("--columns", type=int, choices=[1, 2],
                        help="the width of the figure, in columns of a paper (default: 2; a topology: 1)")  # fmt: skip
    parser.add_argument(
        "--out", type=picture_path, help="a PNG, SVG or PDF file (default: a PNG, named after the metric or the kind)"
    )
    parser.set_defaults(command=plot_command)


def _names(text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Parse names with commas; argparse prints the error."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {', '.join(allowed)}, with commas")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: a name is there twice")
    return names


def _panels(text: str) -> tuple[str, ...]:
    return _names(text, get_args(Axis))


def _log_axes(text: str) -> tuple[str, ...]:
    return _names(text, get_args(LogAxis))


def plot_command(parsed: argparse.Namespace) -> int:
    axes = parsed.panels or ((parsed.x,) if parsed.x else ())
    options = FigureOptions(
        parsed.y, axes, parsed.kind, parsed.spread, parsed.columns, parsed.labels, parsed.log, parsed.round,
        parsed.start, parsed.end,
    )  # fmt: skip
    with show_warnings(console()):
        one = parsed.kind != "lines" and len(parsed.runs) == 1
        folders = [existing_run(parsed.runs[0], "plot")] if one else existing_runs(parsed.runs, "plot")
        plot_runs(folders, options, parsed.out)
    return 0


def plot_runs(
    folders: Sequence[RunFolder],
    options: FigureOptions | None = None,
    out: Path | None = None,
    folder: Path = Path(),
    option: str = "--out",
) -> None:
    """Draw a figure of runs to `out`, by default to a picture in `folder` that is named after its content.

    `option` is the option that asked for the figure, for the error if it cannot be written.
    """
    drawn = draw_figure(folders, options or FigureOptions())
    path = out or folder / f"{drawn.name}.png"
    with writing(path, option):
        save_figure(drawn.figure, path)
    print_line(f"{drawn.title}: {path}")
