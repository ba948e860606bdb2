"""`shoal list`: every name that an experiment may use."""

from __future__ import annotations

import argparse
import dataclasses

from rich.markup import escape
from rich.table import Table

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
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, cls in components(kind):
            first = (cls.__doc__ or "").strip().splitlines()[0]
            options = "\n".join(_describe(parameter) for parameter in schema.parameters(cls).values())
            table.add_row(name, escape(first) + (f"\n[dim]{escape(options)}[/dim]" if options else ""))
        screen.print(table)
        screen.print()
    return 0


def _describe(parameter: schema.Parameter) -> str:
    """Return the name, type and default of a parameter; a component as default is shown by its name."""
    if parameter.nested is None or parameter.required or parameter.default is None:
        return str(parameter)
    return str(dataclasses.replace(parameter, default=component_name(parameter.nested, parameter.default)))
