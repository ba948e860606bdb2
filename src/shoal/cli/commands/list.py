"""`shoal list`: every name that an experiment may use."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Iterator

from rich.text import Text

from shoal import schema
from shoal.cli.display import console
from shoal.errors import ExperimentError
from shoal.experiment.registry import REGISTRIES, component_name, components

FORMER_KINDS = {"device": "speed"}
"""Earlier names of kinds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="only this kind: algorithm, sharing, topology, …")
    parser.set_defaults(command=list_components)


def list_components(parsed: argparse.Namespace) -> int:
    asked = FORMER_KINDS.get(parsed.kind, parsed.kind)
    if asked is not None and asked not in REGISTRIES:
        raise ExperimentError([f"unknown kind {asked!r}{schema.nearest(asked, REGISTRIES)}"], "list")
    screen = console()
    for kind in REGISTRIES if asked is None else [asked]:
        screen.print(Text("\n").join([Text(kind, "bold"), *_lines(kind, screen.width), Text()]), soft_wrap=True)
    return 0


def _lines(kind: str, width: int) -> Iterator[Text]:
    """Return two columns: names; first lines of the docstrings with the parameters. A table of rich takes longer."""
    found = list(components(kind))
    indent = 4 + max((len(name) for name, _ in found), default=0)
    for name, cls in found:
        first = (cls.__doc__ or "").strip().splitlines()[0]
        left = Text(f"  {name:{indent - 2}}", "bold")
        for line in _wrap(first, width - indent):
            yield left + Text(line)
            left = Text(" " * indent)
        for parameter in schema.parameters(cls).values():
            for line in _wrap(_describe(parameter), width - indent):
                yield Text(" " * indent + line, "dim")


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_on_hyphens=False, break_long_words=False)


def _describe(parameter: schema.Parameter) -> str:
    """Return the name, type and default of a parameter; a component as default is shown by its name."""
    if parameter.nested is None or parameter.required or parameter.default is None:
        return str(parameter)
    return str(dataclasses.replace(parameter, default=component_name(parameter.nested, parameter.default)))
