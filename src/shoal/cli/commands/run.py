"""`shoal run`: run an experiment."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.arguments import Commands, add_set_option
from shoal.cli.commands.results import plot_runs
from shoal.cli.display import console, show_warnings, summary_table

EXIT_CODES = {"completed": 0, "failed": 1, "incomplete": 3, "interrupted": 130}
"""By the status of the run."""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("run", help="run an experiment", description="Run the experiment in a TOML file.")
    parser.add_argument("file", type=Path, help="the experiment, a TOML file")
    add_set_option(parser, "set a key of the experiment: a dotted name and a TOML value; may be repeated")
    parser.add_argument("--engine", help="simulation or processes")
    parser.add_argument("--seed", type=int, help="the seed of all random draws")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="the folder of all runs (default: runs)")
    parser.add_argument("--plot", action="store_true", help="plot the accuracy into the run's folder at the end")
    parser.set_defaults(command=run_experiment)


def run_experiment(parsed: argparse.Namespace) -> int:
    from shoal.engines.operating_system import process_start_time
    from shoal.experiment import Experiment, parse_overrides
    from shoal.experiment.running import run

    overrides = parse_overrides(parsed.settings)
    overrides.update({key: value for key in ("engine", "seed") if (value := getattr(parsed, key)) is not None})
    screen = console()
    with show_warnings(screen) as display:
        experiment = Experiment.from_file(parsed.file, overrides)
        done = run(experiment, parsed.out, display, process_start_time())
    screen.print(summary_table(done.summary, f"{experiment.name}: {done.folder.path}"))
    if parsed.plot:
        plot_runs([done.folder], folder=done.folder.path, option="--plot")
    if done.summary.get("signal") is not None:
        return 128 + int(done.summary["signal"])
    return EXIT_CODES[done.status]
