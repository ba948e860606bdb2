"""`shoal resume`: continue a run from its latest checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.commands.run import add_agent_options, exit_code
from shoal.cli.display import console, show_warnings, summary_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a run that was killed, stopped or failed from its latest checkpoint, in the same folder."
    )
    parser.add_argument(
        "run", nargs="?", type=Path, default=Path("runs"),
        help="the folder of a run, a folder above it, or the name of an experiment (default: the latest in runs)",
    )  # fmt: skip
    parser.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS",
                        help="run on the Ray cluster at ADDRESS ('auto', HOST:PORT); without ADDRESS, start Ray on "
                        "this machine. For processes, and for a simulation with batching = 'ray'")  # fmt: skip
    add_agent_options(parser)
    parser.set_defaults(command=resume_run)


def resume_run(parsed: argparse.Namespace) -> int:
    from shoal.engines.operating_system import process_start_time
    from shoal.engines.processes.remote.agents_plan import read_plan
    from shoal.experiment.resuming import resume
    from shoal.experiment.running import Machines

    screen = console()
    with show_warnings(screen) as display:
        agents = read_plan(parsed.agents, parsed.listen, parsed.expect, parsed.key, parsed.trust)
        done = resume(parsed.run, display, process_start_time(), Machines(agents, parsed.ray))
    screen.print(summary_table(done.summary, str(done.folder.path)))
    return exit_code(done)
