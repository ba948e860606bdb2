"""`shoal plot`: a metric of several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shoal.cli.arguments import existing_run, picture_path, writing
from shoal.cli.display import console, print_line, show_warnings
from shoal.results.plots import Axis, choose_axis, choose_metric, metric_plot
from shoal.results.records import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="the folders of runs, or names of experiments")
    parser.add_argument("--metric", help="the metric to plot (default: accuracy, or the main metric of the task)")
    parser.add_argument(
        "--x", choices=["rounds", "time", "bytes"],
        help="the horizontal axis (default: rounds, or time if a run was evaluated by time)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=picture_path, help="a PNG, SVG or PDF file (default: the metric's name, as a PNG)"
    )
    parser.set_defaults(command=plot_command)


def plot_command(parsed: argparse.Namespace) -> int:
    with show_warnings(console()):
        plot_runs([existing_run(run, "plot") for run in parsed.runs], parsed.out, parsed.metric, parsed.x)
    return 0


def plot_runs(
    folders: Sequence[RunFolder],
    out: Path | None = None,
    metric: str | None = None,
    axis: Axis | None = None,
    folder: Path = Path(),
    option: str = "--out",
) -> None:
    """Plot a metric of runs to `out`, by default to a picture in `folder` that is named after the metric.

    `option` is the option that asked for the plot, for the error if it cannot be written.
    """
    metric = choose_metric(folders, metric)
    axis = axis or choose_axis(folders)
    path = out or folder / f"{metric.replace(' ', '-')}.png"
    with writing(path, option):
        metric_plot(folders, path, metric, axis)
    print_line(f"{metric} by {axis}: {path}")
