"""`shoal sweep`: run an experiment with many settings and seeds, search for the best settings, compare the results."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import add_set_option, positive_integer
from shoal.cli.display import console, print_line
from shoal.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.cli.sweep_display import SweepDisplay
    from shoal.results.records import RunFolder
    from shoal.sweeps.plan import Combination
    from shoal.sweeps.running import SweepResult
    from shoal.sweeps.sweep import Sweep

FAILED = 1
INCOMPLETE = 3
"""The exit code if nodes of a run failed, as of `shoal run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an experiment with many settings and seeds, as many runs at once as cores and memory allow. All runs are "
        "checked before the first one starts. The same command goes on where a stopped sweep has ended."
    )
    parser.add_argument("file", type=Path, help="a sweep (a TOML file with the key 'base'), or an experiment")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=A,B,C",
                        help="run all combinations of these values; may be repeated")  # fmt: skip
    parser.add_argument("--seeds", metavar="SEEDS", help="the seeds of each combination: 1-5, or 1,3,7-9")
    add_set_option(parser, "set a key for all runs: a dotted name and a TOML value; may be repeated")
    parser.add_argument("--out", type=Path, help="the folder of the sweep (default: runs/NAME of the sweep)")
    parser.add_argument("--dry-run", action="store_true",
                        help="check and print all combinations, and estimate the time with short runs")  # fmt: skip
    parser.add_argument("--jobs", type=positive_integer, metavar="N",
                        help="the most runs at once (default: as many as cores and memory allow)")  # fmt: skip
    parser.add_argument("--any-version", action="store_true",
                        help="count finished runs of other versions of Shoal, Python or torch as done")  # fmt: skip
    add_tuning_options(parser)
    parser.set_defaults(command=sweep_experiment)


def add_tuning_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search for the best values", "for each combination, with the same budget")
    group.add_argument("--tune", action="append", default=[], metavar="KEY=LOW:HIGH[:log]",
                       help="search a range, or values KEY=A,B,C; may be repeated")  # fmt: skip
    group.add_argument("--trials", type=positive_integer, default=9, metavar="N",
                       help="the number of values that are tried for each combination (default: 9)")  # fmt: skip
    group.add_argument("--tuner", choices=("halving", "optuna"), default="halving",
                       help="successive halving (default), or Optuna")  # fmt: skip


def sweep_experiment(parsed: argparse.Namespace) -> int:
    from shoal.cli.sweep_display import SweepDisplay
    from shoal.results.records import ROOT
    from shoal.sweeps.sweep import SweepChanges, read_sweep

    screen = console()
    with SweepDisplay(screen) as display:
        sweep = read_sweep(parsed.file, SweepChanges(parsed.settings, parsed.grid, parsed.seeds, parsed.tune))
        out = parsed.out or ROOT / sweep.name
        if parsed.dry_run:
            return _dry_run(sweep, out, parsed, display)
        try:
            combinations, result, untuned = _run(sweep, out, parsed, display)
        except KeyboardInterrupt:
            display.notice(f"interrupted; give the same command again to go on (runs: {out})")
            raise
        folders = [result.folders[c.identity] for c in combinations if c.identity in result.folders]
        display.stop_live()
        _compare(folders, display, screen)
        _show_failures(result, len(combinations), untuned, screen)
    if result.failed or untuned:
        return FAILED
    return INCOMPLETE if any(folder.read_summary()["status"] == "incomplete" for folder in folders) else 0


def _run(
    sweep: Sweep, out: Path, parsed: argparse.Namespace, display: SweepDisplay
) -> tuple[list[Combination], SweepResult, list[str]]:
    """Run a sweep, after a search if it has one. Returns also the combinations whose search found nothing."""
    from shoal.sweeps.folder import opened
    from shoal.sweeps.plan import plan
    from shoal.sweeps.running import LOG, SweepOptions, SweepRunner
    from shoal.sweeps.tuning import RESULTS, describe_tuning, final_runs, plan_tuning, tune, write_tuning

    searched = plan_tuning(sweep, parsed.trials, parsed.tuner) if sweep.tune else None
    combinations = plan(sweep) if searched is None else []
    untuned: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(opened(out, sweep))
        options = SweepOptions(parsed.jobs, parsed.any_version)
        runner = stack.enter_context(SweepRunner(out / LOG, display, options))
        if searched is not None:
            trials = tuning_folder(out)
            stack.enter_context(opened(trials, sweep))
            display.show_search(searched, trials)
            tune(searched, runner, trials)
            write_tuning(searched, out / RESULTS)
            display.show_tuned(searched, out / RESULTS)
            untuned = [describe_tuning(tuning) for tuning in searched.tunings if tuning.best is None]
            combinations = final_runs(searched)
        return combinations, runner.run(combinations, out), untuned


def tuning_folder(out: Path) -> Path:
    """Return the folder of the runs of a search: beside the folder of the sweep, whose runs are compared."""
    out = out.resolve()
    return out.with_name(f"{out.name}-tuning")


def _dry_run(sweep: Sweep, out: Path, parsed: argparse.Namespace, display: SweepDisplay) -> int:
    from shoal.sweeps.estimate import estimate
    from shoal.sweeps.folder import find_progress
    from shoal.sweeps.plan import plan
    from shoal.sweeps.tuning import plan_tuning

    searched = plan_tuning(sweep, parsed.trials, parsed.tuner) if sweep.tune else None
    combinations = plan(sweep) if searched is None else searched.final
    done = find_progress(combinations, out, parsed.any_version).done if searched is None else {}
    display.show_plan(sweep, combinations, len(done), searched)
    missing = [combination for combination in combinations if combination.identity not in done]
    if not missing:
        return 0
    estimated = estimate(missing, display, parsed.jobs)
    display.show_estimate(estimated, len(missing), searched)
    return FAILED if estimated.failed else 0


def _compare(folders: list[RunFolder], display: SweepDisplay, screen: Console) -> None:
    """Print the comparison of the runs that reached their end."""
    from shoal.cli.commands.compare import show_comparison
    from shoal.results.comparison import compare_groups
    from shoal.results.groups import group_runs

    if not folders:
        return
    try:
        show_comparison(compare_groups(group_runs(folders)), screen)
    except DataError as error:
        display.notice(f"the runs are not compared: {error}")


def _show_failures(result: SweepResult, total: int, untuned: list[str], screen: Console) -> None:
    for text in untuned:
        print_line(f"all trials of the search failed: {text}", screen)
    if result.failed:
        print_line(f"{len(result.failed)} of {total} runs failed; the same command tries them again:", screen)
    for run in result.failed:
        print_line(f"  {run.combination.label}: {run.error or run.status}", screen)
