"""The command line: shoal run | show | plot | list | topology | data | keys | new | doctor.

Exit codes: 0 the run completed; 1 it failed; 2 the input is wrong, or more than this machine can do; 3 some nodes
were lost; 130 and 143 it was interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.errors import DataError, ExperimentError, LaunchError, ShoalError, TopologyError
from shoal.types import format_node_ids

EXIT_CODES = {"completed": 0, "failed": 1, "incomplete": 3, "interrupted": 130}
WRONG_INPUT = 2
PICTURES = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = command(parsed)
    except (ExperimentError, DataError, TopologyError, LaunchError) as error:
        code = _complain(error, WRONG_INPUT)
    except ShoalError as error:
        code = _complain(error, 1)
    except KeyboardInterrupt as stop:
        code = 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a command as Ctrl-C does, with an exit code of its own."""
    raise KeyboardInterrupt(number)


def _complain(error: Exception, code: int) -> int:
    from rich.markup import escape

    from shoal.cli.display import console

    console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="Decentralized learning, simulated and real.")
    commands = parser.add_subparsers(required=True, metavar="command")

    run = commands.add_parser("run", help="run an experiment", description="Run the experiment in a TOML file.")
    run.add_argument("file", type=Path, help="the experiment, a TOML file")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="set a key: a dotted name and a TOML value; may be given again",
    )  # fmt: skip
    run.add_argument("--engine", help="simulation or processes")
    run.add_argument("--seed", type=int, help="the seed of every random draw")
    run.add_argument("--out", type=Path, default=Path("runs"), help="where runs are written (default: runs)")
    run.add_argument("--plot", action="store_true", help="draw accuracy into the run's folder at the end")
    run.set_defaults(command=_run)

    show = commands.add_parser("show", help="the summary of a run")
    show.add_argument("run", nargs="?", type=Path, help="a run's folder, or one above it (default: the latest in runs)")
    show.add_argument("--target", type=_finite, help="say how long it took to this mean score (default: the run's own)")
    show.add_argument(
        "--metric", help="what it is a score of (default: accuracy or, where there is none, what there is)"
    )
    show.set_defaults(command=_show)

    plot = commands.add_parser("plot", help="accuracy or another metric of one or more runs, by rounds, time or bytes")
    plot.add_argument("runs", nargs="+", type=Path, help="runs' folders")
    plot.add_argument("--metric", help="what to draw (default: accuracy or, where there is none, what there is)")
    plot.add_argument(
        "--x", choices=["rounds", "time", "bytes"],
        help="what to draw by (default: rounds, or time where a run was looked at by time)",
    )  # fmt: skip
    plot.add_argument("--out", type=_picture, help="PNG, SVG or PDF (default: the metric's name, as a PNG)")
    plot.set_defaults(command=_plot)

    everything = commands.add_parser("list", help="every name an experiment may use, with its parameters")
    everything.add_argument("kind", nargs="?", help="only this kind: algorithm, sharing, topology, …")
    everything.set_defaults(command=_list)

    topology = commands.add_parser(
        "topology", help="measure and draw a graph",
        description="Measure and draw a graph: shoal topology regular --nodes 16 --set degree=5 --out graph.png",
    )  # fmt: skip
    topology.add_argument("name", help="a topology's name, or an experiment's TOML file")
    topology.add_argument("--nodes", type=int, help="how many nodes (default: 16, or what the file says)")
    topology.add_argument("--seed", type=int, help="the seed (default: 0, or what the file says)")
    topology.add_argument("--round", type=int, default=0, help="the round to draw (default: 0)")
    topology.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                          help="a parameter of the topology")  # fmt: skip
    topology.add_argument("--out", type=_picture, help="draw it to this PNG, SVG or PDF file")
    topology.set_defaults(command=_topology)

    _add_data(commands.add_parser("data", help="list, fetch, verify and locate data sets; draw who holds what"))

    _add_keys(commands.add_parser("keys", help="make, list and check the keys that seal the links between nodes"))

    new = commands.add_parser(
        "new", help="a plug-in of your own to start from, with its test and an experiment",
        description="Write a working plug-in, its test and an experiment that uses it: shoal new sharing my-sharing",
    )  # fmt: skip
    new.add_argument("kind", help="sharing, algorithm, topology or dataset")
    new.add_argument("name", help="its name: letters, digits, - and _")
    new.add_argument("--out", type=Path, default=Path("."), help="the folder to write to (default: the working folder)")
    new.set_defaults(command=_new)

    doctor = commands.add_parser("doctor", help="what this machine can do")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_data(data: argparse.ArgumentParser) -> None:
    commands = data.add_subparsers(required=True, metavar="command")

    everything = commands.add_parser("list", help="every data set that has a publisher, and whether it is here")
    everything.set_defaults(command=_data_list)

    fetch = commands.add_parser("fetch", help="download a data set from its publisher; goes on where it was cut off")
    fetch.add_argument("name", help="a data set of 'shoal data list'")
    fetch.set_defaults(command=_data_fetch)

    verify = commands.add_parser("verify", help="compare a data set with what was published, however it is packed")
    verify.add_argument("name", help="a data set of 'shoal data list'")
    verify.add_argument("--path", type=Path, help="its archive or folder (default: where it is looked for)")
    verify.set_defaults(command=_data_verify)

    path = commands.add_parser("path", help="the folder of a data set, for scripts")
    path.add_argument("name", help="a data set of 'shoal data list'")
    path.set_defaults(command=_data_path)

    plot = commands.add_parser("plot", help="how many samples of each class each node of an experiment holds")
    plot.add_argument("file", type=Path, help="the experiment, a TOML file")
    plot.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                      help="set a key of the experiment; may be given again")  # fmt: skip
    plot.add_argument("--out", type=_picture, default=Path("who-holds-what.png"),
                      help="PNG, SVG or PDF (default: who-holds-what.png)")  # fmt: skip
    plot.set_defaults(command=_data_plot)


def _add_keys(keys: argparse.ArgumentParser) -> None:
    commands = keys.add_subparsers(required=True, metavar="command")

    make = commands.add_parser(
        "make", help="a key pair for every node that has none",
        description="Make a key pair for every node that has none: shoal keys make keys --nodes 16; an experiment uses "
        "them with processes = { sealed = true, keys = \"keys\" }.",
    )  # fmt: skip
    make.add_argument("folder", type=Path, help="where they are written to")
    make.add_argument("--nodes", type=_natural, required=True, help="for how many nodes, with those that serve")
    make.add_argument("--force", action="store_true", help="make all of them anew; those that were there are lost")
    make.set_defaults(command=_keys_make)

    everything = commands.add_parser("list", help="whose public keys are in a folder, and whose secret ones")
    everything.add_argument("folder", type=Path, help="a folder of keys")
    everything.set_defaults(command=_keys_list)

    check = commands.add_parser("check", help="whether the keys in a folder can seal a run, and what is wrong if not")
    check.add_argument("folder", type=Path, help="a folder of keys")
    check.add_argument("--nodes", type=_natural, help="for how many nodes there should be keys (default: those found)")
    check.set_defaults(command=_keys_check)


def _natural(text: str) -> int:
    """How many of something; argparse shows the error."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _picture(text: str) -> Path:
    """A file to draw to; argparse shows the error."""
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in {', '.join(PICTURES)}")
    return Path(text)


def _finite(text: str) -> float:
    """A number; argparse shows the error."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number")


@contextlib.contextmanager
def _drawing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        raise ExperimentError([problem], "--out") from error


def _run(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import Display, console, summary_table
    from shoal.engines.operating_system import process_start_time
    from shoal.experiment import Experiment, parse_overrides
    from shoal.experiment.running import run

    overrides = parse_overrides(parsed.settings)
    if parsed.engine is not None:
        overrides["engine"] = parsed.engine
    if parsed.seed is not None:
        overrides["seed"] = parsed.seed
    screen = console()
    with warnings.catch_warnings(), Display(screen) as display:
        warnings.showwarning = lambda message, *_, **__: display.notice(str(message))
        experiment = Experiment.from_file(parsed.file, overrides)
        done = run(experiment, parsed.out, display, process_start_time())
    screen.print(summary_table(done.summary, f"{experiment.name}: {done.folder.path}"))
    if parsed.plot:
        from shoal.results.plots import choose_axis, choose_metric, metric_plot

        metric, x = choose_metric([done.folder]), choose_axis([done.folder])
        path = done.folder.path / f"{metric.replace(' ', '-')}.png"
        metric_plot([done.folder], path, metric, x)
        screen.print(f"{metric} by {x}: {path}", highlight=False, markup=False, soft_wrap=True)
    if done.summary.get("signal") is not None:
        return 128 + int(done.summary["signal"])
    return EXIT_CODES[done.status]


def _show(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console, summary_table

    folder = _latest(parsed.run or Path("runs"))
    summary = folder.read_summary()
    if parsed.target is not None or parsed.metric is not None:
        from shoal.results.timing import curve, target_and_best

        found = curve(folder, parsed.metric)
        summary.update(target_and_best(found, found.metric, parsed.target))
    console().print(summary_table(summary, str(folder.path)))
    return 0


def _latest(path: Path) -> Any:
    """The run at `path`, or the latest below it."""
    from shoal.results.records import RunFolder

    found = sorted(path.rglob("summary.json"), key=lambda file: file.stat().st_mtime) if path.is_dir() else []
    if not found:
        raise ExperimentError([f"there is no finished run in {str(path)!r}; 'shoal run FILE' makes one"], "show")
    return RunFolder(found[-1].parent)


def _plot(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console
    from shoal.results.plots import choose_axis, choose_metric, metric_plot

    folders = [_latest(run) for run in parsed.runs]
    metric = choose_metric(folders, parsed.metric)
    x = parsed.x or choose_axis(folders)
    path = parsed.out or Path(f"{metric.replace(' ', '-')}.png")
    with _drawing(path):
        metric_plot(folders, path, metric, x)
    console().print(f"{metric} by {x}: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _list(parsed: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from shoal import schema
    from shoal.cli.display import console
    from shoal.experiment.registry import REGISTRIES, components

    if parsed.kind is not None and parsed.kind not in REGISTRIES:
        raise ExperimentError([f"unknown kind {parsed.kind!r}{schema.nearest(parsed.kind, REGISTRIES)}"], "list")
    screen = console()
    for kind in REGISTRIES if parsed.kind is None else [parsed.kind]:
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, cls in components(kind):
            first = (cls.__doc__ or "").strip().splitlines()[0]
            options = "\n".join(_listed(parameter) for parameter in schema.parameters(cls).values())
            table.add_row(name, escape(first) + (f"\n[dim]{escape(options)}[/dim]" if options else ""))
        screen.print(table)
        screen.print()
    return 0


def _listed(parameter: Any) -> str:
    """A parameter and its default as an experiment would spell it."""
    from shoal.experiment.registry import component_name

    if parameter.nested is None or parameter.required or parameter.default is None:
        return str(parameter)
    return str(dataclasses.replace(parameter, default=component_name(parameter.nested, parameter.default)))


def _topology(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import Display, console
    from shoal.experiment import Experiment, parse_overrides
    from shoal.topologies.graph import FromLabels, Mixing
    from shoal.topologies.measures import measure

    options = {f"topology.{key}": value for key, value in parse_overrides(parsed.settings).items()}
    given = {key: value for key in ("nodes", "seed") if (value := getattr(parsed, key)) is not None}
    if parsed.name.endswith(".toml"):
        experiment = Experiment.from_file(parsed.name, {**given, **options})
    else:
        table = {"name": "topology", "topology": {"name": parsed.name}}
        experiment = Experiment.from_table(table, {**given, **options}, source="topology")
    screen = console()
    with warnings.catch_warnings(), Display(screen) as display:
        warnings.showwarning = lambda message, *_, **__: display.notice(str(message))
        topology = experiment.topology.build()
        if isinstance(topology, FromLabels):
            from shoal.experiment.setup import Setup

            mixing = Setup(experiment).mixing
        else:
            mixing = Mixing(topology.build(experiment.nodes, experiment.seed), experiment.weights)
    screen.print(str(measure(mixing, parsed.round)), highlight=False, markup=False, soft_wrap=True)
    if parsed.out is not None:
        from shoal.topologies.drawing import draw

        with _drawing(parsed.out):
            draw(mixing, parsed.out, parsed.round)
        screen.print(f"drawn to {parsed.out}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _data_list(parsed: argparse.Namespace) -> int:
    from shoal.cli.data_commands import list_datasets

    return list_datasets()


def _data_fetch(parsed: argparse.Namespace) -> int:
    from shoal.cli.data_commands import fetch

    return fetch(parsed.name)


def _data_verify(parsed: argparse.Namespace) -> int:
    from shoal.cli.data_commands import verify

    return verify(parsed.name, parsed.path)


def _data_path(parsed: argparse.Namespace) -> int:
    from shoal.cli.data_commands import print_path

    return print_path(parsed.name)


def _data_plot(parsed: argparse.Namespace) -> int:
    from shoal.cli.data_commands import draw, holdings

    held = holdings(parsed.file, parsed.settings)
    with _drawing(parsed.out):
        return draw(held, parsed.out)


def _keys_make(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console
    from shoal.engines.processes.keys import make_keys

    made, kept = make_keys(parsed.folder, parsed.nodes, parsed.force)
    said = f"made keys for nodes {format_node_ids(made)}" if made else "made no keys"
    if kept:
        said += f"; nodes {format_node_ids(kept)} keep theirs (--force makes them anew)"
    console().print(f"{said}: {parsed.folder}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _keys_list(parsed: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from shoal.cli.display import console
    from shoal.engines.processes.keys import list_keys

    table = Table(box=None, padding=(0, 2))
    table.add_column("node", no_wrap=True)
    table.add_column("public key", overflow="fold")  # or what is wrong with it, which may be long
    table.add_column("secret key", no_wrap=True)
    for node, public, is_here in list_keys(parsed.folder):
        table.add_row(str(node), Text(public), "here" if is_here else "elsewhere")
    console().print(table, highlight=False)
    return 0


def _keys_check(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console
    from shoal.engines.processes.keys import check_keys, list_keys

    problems = check_keys(parsed.folder, None if parsed.nodes is None else range(parsed.nodes))
    count = len(list_keys(parsed.folder)) if parsed.nodes is None else parsed.nodes
    if not count:
        problems = [f"there are no keys in {str(parsed.folder)!r}; 'shoal keys make' makes them"]
    if problems:
        raise ExperimentError(problems, f"keys in {parsed.folder}")
    said = f"the keys of {count} nodes are in order: {parsed.folder}"
    console().print(said, highlight=False, markup=False, soft_wrap=True)
    return 0


def _new(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console
    from shoal.cli.scaffold import write_plugin

    code, test, experiment = (shlex.quote(str(p)) for p in write_plugin(parsed.kind, parsed.name, parsed.out))
    said = f"wrote {code}, {test} and {experiment}; try:\n  shoal run {experiment}\n  pytest {test}"
    console().print(said, highlight=False, markup=False, soft_wrap=True)
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from shoal.cli.display import console
    from shoal.cli.doctor import report

    screen = console()
    screen.print(report())
    return 0
