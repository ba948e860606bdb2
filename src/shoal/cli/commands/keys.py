"""`shoal keys`: make, list and check the keys that encrypt the links between nodes."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table
from rich.text import Text

from shoal.cli.arguments import positive_integer
from shoal.cli.display import console, print_line
from shoal.errors import ExperimentError
from shoal.types import format_node_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(required=True, metavar="command")

    make = subcommands.add_parser(
        "make", help="make a key pair for every node that has none, or for coordinators and agents",
        description="Make a key pair for every node that has none: shoal keys make keys --nodes 16; an experiment uses "
        "them with processes = { sealed = true, keys = \"keys\" }. Make key pairs for a coordinator and its agents: "
        "shoal keys make keys --name coordinator --name agent.",
    )  # fmt: skip
    make.add_argument("folder", type=Path, help="the folder to write the keys to")
    owners = make.add_mutually_exclusive_group(required=True)
    owners.add_argument("--nodes", type=positive_integer, help="the number of nodes, including service nodes")
    owners.add_argument("--name", action="append", metavar="NAME",
                        help="the name of a coordinator or an agent; may be repeated")  # fmt: skip
    make.add_argument("--force", action="store_true", help="replace existing keys; they are lost")
    make.set_defaults(command=make_keys)

    listing = subcommands.add_parser("list", help="list the public keys in a folder, and which secret keys are there")
    listing.add_argument("folder", type=Path, help="a folder of keys")
    listing.set_defaults(command=list_keys)

    check = subcommands.add_parser("check", help="check that a run can use the keys in a folder")
    check.add_argument("folder", type=Path, help="a folder of keys")
    check.add_argument("--nodes", type=positive_integer,
                       help="the number of nodes that need keys (default: the nodes found)")  # fmt: skip
    check.set_defaults(command=check_keys)


def make_keys(parsed: argparse.Namespace) -> int:
    from shoal.engines.processes import keys

    if parsed.name is not None:
        named, left = keys.make_named_keys(parsed.folder, parsed.name, parsed.force)
        report = f"made keys for {', '.join(named)}" if named else "made no keys"
        if left:
            report += f"; {', '.join(left)} keep theirs (--force replaces them)"
        print_line(f"{report}: {parsed.folder}")
        return 0
    made, kept = keys.make_keys(parsed.folder, parsed.nodes, parsed.force)
    report = f"made keys for nodes {format_node_ids(made)}" if made else "made no keys"
    if kept:
        report += f"; nodes {format_node_ids(kept)} keep theirs (--force replaces them)"
    print_line(f"{report}: {parsed.folder}")
    return 0


def list_keys(parsed: argparse.Namespace) -> int:
    from shoal.engines.processes import keys

    table = Table(box=None, padding=(0, 2))
    table.add_column("node", no_wrap=True)
    table.add_column("public key", overflow="fold")  # or a problem with it, which may be long
    table.add_column("secret key", no_wrap=True)
    for node, public, has_secret in keys.list_keys(parsed.folder):
        table.add_row(str(node), Text(public), "here" if has_secret else "elsewhere")
    console().print(table, highlight=False)
    return 0


def check_keys(parsed: argparse.Namespace) -> int:
    from shoal.engines.processes import keys

    problems = keys.check_keys(parsed.folder, None if parsed.nodes is None else range(parsed.nodes))
    count = len(keys.list_keys(parsed.folder)) if parsed.nodes is None else parsed.nodes
    if not count:
        problems = [f"there are no keys in {str(parsed.folder)!r}; make them with 'shoal keys make'"]
    if problems:
        raise ExperimentError(problems, f"keys in {parsed.folder}")
    print_line(f"the keys of {count} nodes are valid: {parsed.folder}")
    return 0
