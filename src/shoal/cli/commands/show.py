"""`shoal show`: the summary of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.arguments import existing_run, finite_number
from shoal.cli.display import console, show_warnings, summary_table
from shoal.results.frames import read_records
from shoal.results.summary import read_or_summarize
from shoal.results.timing import curve, target_and_best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=Path,
        help="the folder of a run, a folder above it, or the name of an experiment (default: the latest in runs)",
    )  # fmt: skip
    parser.add_argument(
        "--target", type=finite_number,
        help="show the time until the mean score reached this value (default: the target of the experiment)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", help="the metric of the target (default: evaluation.metric, or the main metric of the task)"
    )
    parser.set_defaults(command=show_run)


def show_run(parsed: argparse.Namespace) -> int:
    folder, screen = existing_run(parsed.run or Path("runs"), "show"), console()
    with show_warnings(screen):
        has_target = parsed.target is not None or parsed.metric is not None
        records = read_records(folder) if has_target else None
        summary = read_or_summarize(folder, records)
        if has_target:
            found = curve(folder, parsed.metric, records)
            summary.update(target_and_best(found, found.metric, parsed.target))
    screen.print(summary_table(summary, str(folder.path)))
    return 0
