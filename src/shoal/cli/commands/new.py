"""`shoal new`: write a plug-in to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from shoal.cli.display import print_line
from shoal.cli.scaffold import KINDS, write_plugin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a working plug-in, its test and an experiment that uses it: shoal new sharing my-sharing"
    )
    parser.add_argument("kind", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("name", help="its name: letters, digits, - and _")
    parser.add_argument("--out", type=Path, default=Path("."),
                        help="the folder to write to (default: the working folder)")  # fmt: skip
    parser.set_defaults(command=write_new_plugin)


def write_new_plugin(parsed: argparse.Namespace) -> int:
    code, test, experiment = (shlex.quote(str(p)) for p in write_plugin(parsed.kind, parsed.name, parsed.out))
    print_line(f"wrote {code}, {test} and {experiment}; try:\n  shoal run {experiment}\n  pytest {test}")
    return 0
