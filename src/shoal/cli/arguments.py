"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from shoal.errors import ExperimentError
from shoal.results.records import RunFolder, runs_below

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The commands of a parser, to which a module adds its own."""

PICTURES = (".png", ".svg", ".pdf")
"""The formats of pictures, by the ending of the file's name."""


def add_set_option(parser: argparse.ArgumentParser, help: str) -> None:
    """Add `--set KEY=VALUE`, which may be given several times."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=help)


def positive_integer(text: str) -> int:
    """Parse an integer of at least 1; argparse prints the error."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def port_number(text: str) -> int:
    """Parse a port, 0 for any free one; argparse prints the error."""
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535")
    return int(text)


def finite_number(text: str) -> float:
    """Parse a number that is neither infinite nor NaN; argparse prints the error."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number")


def picture_path(text: str) -> Path:
    """Parse the path of a picture to write; argparse prints the error."""
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in {', '.join(PICTURES)}")
    return Path(text)


@contextlib.contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Report an error while `path` is written as a problem of the option that asked for it."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        raise ExperimentError([problem], option) from error


def existing_run(path: Path, command: str) -> RunFolder:
    """Return the run at `path`, or the latest run below it; `command` needs it. It may be in progress."""
    return _runs_below(path, command)[0]


def existing_runs(paths: Iterable[Path], command: str) -> list[RunFolder]:
    """Return the runs at `paths` and all runs below them, in the order of the paths and of their names, each once."""
    found: dict[Path, RunFolder] = {}
    for path in paths:
        for run in sorted(_runs_below(path, command), key=lambda run: run.path):
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _runs_below(path: Path, command: str) -> list[RunFolder]:
    found = runs_below(path)
    if not found:
        raise ExperimentError([f"there is no run in {str(path)!r}; start one with 'shoal run FILE'"], command)
    return found
