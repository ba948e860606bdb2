"""`shoal show` and `shoal plot`: the summary of a run, and a metric of several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shoal.cli.arguments import Commands, finite_number, picture_path, writing
from shoal.cli.display import console, print_line, show_warnings, summary_table
from shoal.errors import ExperimentError
from shoal.results.plots import Axis, choose_axis, choose_metric, metric_plot
from shoal.results.records import RunFolder, latest_run
from shoal.results.summary import read_or_summarize
from shoal.results.timing import curve, target_and_best


def add_parser(commands: Commands) -> None:
    show = commands.add_parser("show", help="show the summary of a run")
    show.add_argument(
        "run", nargs="?", type=Path,
        help="the folder of a run, a folder above it, or the name of an experiment (default: the latest in runs)",
    )  # fmt: skip
    show.add_argument(
        "--target", type=finite_number,
        help="show the time until the mean score reached this value (default: the target of the experiment)",
    )  # fmt: skip
    show.add_argument("--metric", help="the metric of the target (default: accuracy, or the main metric of the task)")
    show.set_defaults(command=show_run)

    plot = commands.add_parser("plot", help="plot accuracy or another metric of runs over rounds, time or bytes")
    plot.add_argument("runs", nargs="+", type=Path, help="the folders of runs, or names of experiments")
    plot.add_argument("--metric", help="the metric to plot (default: accuracy, or the main metric of the task)")
    plot.add_argument(
        "--x", choices=["rounds", "time", "bytes"],
        help="the horizontal axis (default: rounds, or time if a run was evaluated by time)",
    )  # fmt: skip
    plot.add_argument("--out", type=picture_path, help="a PNG, SVG or PDF file (default: the metric's name, as a PNG)")
    plot.set_defaults(command=plot_command)


def show_run(parsed: argparse.Namespace) -> int:
    folder, screen = _latest_run(parsed.run or Path("runs"), "show"), console()
    with show_warnings(screen):
        summary = read_or_summarize(folder)
        if parsed.target is not None or parsed.metric is not None:
            found = curve(folder, parsed.metric)
            summary.update(target_and_best(found, found.metric, parsed.target))
    screen.print(summary_table(summary, str(folder.path)))
    return 0


def plot_command(parsed: argparse.Namespace) -> int:
    with show_warnings(console()):
        plot_runs([_latest_run(run, "plot") for run in parsed.runs], parsed.out, parsed.metric, parsed.x)
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


def _latest_run(path: Path, command: str) -> RunFolder:
    """Return the run at `path`, or the latest run below it; `command` needs it. It may be in progress."""
    found = latest_run(path)
    if found is None:
        raise ExperimentError([f"there is no run in {str(path)!r}; start one with 'shoal run FILE'"], command)
    return found
