"""`shoal sweep`: run an experiment with many settings and seeds, and compare the results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import add_set_option, positive_integer
from shoal.cli.display import console, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.sweeps.plan import Combination
    from shoal.sweeps.running import SweepResult

INCOMPLETE = 3
"""The exit code if nodes of a run failed, as of `shoal run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an experiment with many settings and seeds, as many runs at once as the machine allows. The same command "
        "goes on where a stopped sweep has ended. All runs are checked before the first one starts."
    )
    parser.add_argument("file", type=Path, help="a sweep (a TOML file with the key 'base'), or an experiment")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=A,B,C",
                        help="run all combinations of these values; may be repeated")  # fmt: skip
    parser.add_argument("--seeds", metavar="SEEDS", help="the seeds of each combination: 1-5, or 1,3,7-9")
    add_set_option(parser, "set a key for all runs: a dotted name and a TOML value; may be repeated")
    parser.add_argument("--out", type=Path, help="the folder of the sweep (default: runs/NAME of the sweep)")
    parser.add_argument("--jobs", type=positive_integer, metavar="N", help="the most runs at once (default: one per core)")
    parser.add_argument("--any-version", action="store_true",
                        help="use finished runs of other versions of Shoal, Python or torch")  # fmt: skip
    parser.set_defaults(command=run_sweep)


def run_sweep(parsed: argparse.Namespace) -> int:
    from shoal.cli.sweep_display import SweepDisplay
    from shoal.results.records import ROOT
    from shoal.sweeps.folder import opened
    from shoal.sweeps.plan import plan
    from shoal.sweeps.running import SweepOptions, run_combinations
    from shoal.sweeps.sweep import SweepChanges, read_sweep

    screen = console()
    with SweepDisplay(screen) as display:
        sweep = read_sweep(parsed.file, SweepChanges(parsed.settings, parsed.grid, parsed.seeds))
        out = parsed.out or ROOT / sweep.name
        combinations = plan(sweep)
        with opened(out, sweep):
            try:
                result = run_combinations(combinations, out, display, SweepOptions(parsed.jobs, parsed.any_version))
            except KeyboardInterrupt:
                display.notice(f"interrupted; give the same command again to go on (runs: {out})")
                raise
    return _report(combinations, result, screen)


def _report(combinations: list[Combination], result: SweepResult, screen: Console) -> int:
    """Print the comparison and the failed runs. Returns the exit code."""
    folders = [result.folders[c.identity] for c in combinations if c.identity in result.folders]
    statuses = [folder.read_summary()["status"] for folder in folders]
    if result.failed:
        print_line(f"{len(result.failed)} of {len(combinations)} runs failed; give the same command to try them again:")
        for run in result.failed:
            print_line(f"  {run.combination.label}: {run.error or run.status}")
        return 1
    return INCOMPLETE if "incomplete" in statuses else 0
