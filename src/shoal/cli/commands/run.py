"""`shoal run`: run an experiment."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import add_set_option, positive_integer
from shoal.cli.commands.plot import plot_runs
from shoal.cli.display import console, print_line, show_warnings, summary_table

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.cli.watching import Watching
    from shoal.experiment.run_results import Run
    from shoal.results.records import RunFolder

EXIT_CODES = {"completed": 0, "failed": 1, "incomplete": 3, "interrupted": 130}
"""By the status of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run the experiment in a TOML file."
    parser.add_argument("file", type=Path, help="the experiment, a TOML file")
    add_set_option(parser, "set a key of the experiment: a dotted name and a TOML value; may be repeated")
    parser.add_argument("--engine", help="simulation or processes")
    parser.add_argument("--seed", type=int, help="the seed of all random draws")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="the folder of all runs (default: runs)")
    parser.add_argument("--resume", action="store_true",
                        help="continue the latest run of this experiment that has not ended and has a checkpoint; "
                        "without one, start a new run")  # fmt: skip
    parser.add_argument("--plot", action="store_true", help="plot the accuracy into the run's folder at the end")
    parser.add_argument("--watch", action="store_true",
                        help="show the run in a web page while it goes on; the page stays until Ctrl-C")  # fmt: skip
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run on the Ray cluster at ADDRESS ('auto', HOST:PORT); without ADDRESS, start Ray on this machine. "
        "Processes: one agent on each Ray node runs nodes. Simulation: the cluster's CPUs train",
    )
    add_agent_options(parser)
    parser.set_defaults(command=run_experiment)


def add_agent_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the machines of a run."""
    group = parser.add_argument_group("several machines", "each of them runs 'shoal agent'")
    group.add_argument("--agents", metavar="FILE|HOST:PORT,…",
                       help="the agents that run the nodes: a file such as agents.toml, or addresses")  # fmt: skip
    group.add_argument("--listen", metavar="HOST:PORT", help="let agents join at this address ('shoal agent --join')")
    group.add_argument("--expect", type=positive_integer, metavar="N", help="how many agents must join")
    group.add_argument("--key", type=Path, metavar="FILE", help="the secret key of this coordinator")
    group.add_argument("--trust", type=Path, action="append", default=[], metavar="FILE",
                       help="the public key of an agent, or a folder of keys; may be repeated")  # fmt: skip


def run_experiment(parsed: argparse.Namespace) -> int:
    from shoal.engines.operating_system import process_start_time
    from shoal.engines.processes.remote.agents_plan import read_plan
    from shoal.experiment import Experiment, parse_overrides
    from shoal.experiment.resuming import resume, unfinished_run
    from shoal.experiment.running import Machines, run

    overrides = parse_overrides(parsed.settings)
    overrides.update({key: value for key in ("engine", "seed") if (value := getattr(parsed, key)) is not None})
    screen = console()
    with contextlib.ExitStack() as stack:
        with show_warnings(screen) as display:
            display.begin(f"reading {parsed.file}")
            experiment = Experiment.from_file(parsed.file, overrides)
            if parsed.ray is not None and experiment.engine == "simulation":
                experiment = Experiment.from_file(parsed.file, {**overrides, "simulation.batching": "ray"})
            agents = read_plan(parsed.agents, parsed.listen, parsed.expect, parsed.key, parsed.trust)
            began = process_start_time()
            earlier = unfinished_run(experiment, parsed.out, display) if parsed.resume else None
            page = _watch(parsed, earlier, screen, stack)
            if earlier is None:
                done = run(experiment, parsed.out, display, began, agents=agents, ray=parsed.ray)
            else:
                display.notice(f"resuming the run in {earlier.path}")
                done = resume(earlier.path, display, began, Machines(agents, parsed.ray))
        screen.print(summary_table(done.summary, f"{experiment.name}: {done.folder.path}"))
        if parsed.plot:
            plot_runs([done.folder], folder=done.folder.path, option="--plot")
        if page is not None and done.status != "interrupted":
            page.wait(done.folder)
    return exit_code(done)


def _watch(
    parsed: argparse.Namespace, resumed: RunFolder | None, screen: Console, stack: contextlib.ExitStack
) -> Watching | None:
    """Start the page beside the run if the user asks for it; `stack` ends it."""
    if not parsed.watch:
        return None
    from shoal.cli.watching import Watching

    page = stack.enter_context(Watching(parsed.out, resumed))
    print_line(f"watch the run: {page.url}", screen)
    return page


def exit_code(done: Run) -> int:
    """Return the exit code of a command whose run ended."""
    if done.summary.get("signal") is not None:
        return 128 + int(done.summary["signal"])
    return EXIT_CODES[done.status]
