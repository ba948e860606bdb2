"""`shoal data`: list, download, verify and locate data sets, and draw how an experiment partitions one."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from rich.markup import escape
from rich.table import Table

from shoal.cli.arguments import add_set_option, picture_path, writing
from shoal.cli.display import Display, console, print_line, show_warnings
from shoal.data import store
from shoal.data.decoded import is_decoded
from shoal.data.downloads import download
from shoal.data.plots import draw_partition
from shoal.data.publishers import PUBLISHERS, PublishedFile, publisher
from shoal.errors import DataError
from shoal.results.progress_text import ProgressRow, TransferMeter, format_bytes

INVALID = 1
"""The exit code of `verify` when a file differs from the published one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(required=True, metavar="command")

    listing = subcommands.add_parser(
        "list", help="list the data sets that can be downloaded, and whether they are here"
    )
    listing.set_defaults(command=list_datasets)

    fetch = subcommands.add_parser("fetch", help="download a data set, or continue an interrupted download")
    fetch.add_argument("name", help="a data set of 'shoal data list'")
    fetch.set_defaults(command=fetch_dataset)

    verify = subcommands.add_parser("verify", help="compare a data set, packed or unpacked, with the published files")
    verify.add_argument("name", help="a data set of 'shoal data list'")
    verify.add_argument("--path", type=Path, help="its archive or folder (default: where Shoal looks for it)")
    verify.set_defaults(command=verify_dataset)

    path = subcommands.add_parser("path", help="print the folder of a data set, for scripts")
    path.add_argument("name", help="a data set of 'shoal data list'")
    path.set_defaults(command=print_path)

    plot = subcommands.add_parser("plot", help="draw how many samples of each class each node of an experiment holds")
    plot.add_argument("file", type=Path, help="the experiment, a TOML file")
    add_set_option(plot, "set a key of the experiment; may be repeated")
    plot.add_argument("--out", type=picture_path, default=Path("who-holds-what.png"),
                      help="a PNG, SVG or PDF file (default: who-holds-what.png)")  # fmt: skip
    plot.set_defaults(command=plot_partition)


def list_datasets(parsed: argparse.Namespace) -> int:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("data set", "size", "here", "decoded", "folder"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=column != "folder",
                         overflow="fold")  # fmt: skip
    for name, known in PUBLISHERS.items():
        folder = _complete_folder(name)
        table.add_row(
            name,
            format_bytes(sum(file.size for file in known.files)) if known.files else "",
            "no" if folder is None else "yes",
            "yes" if is_decoded(name) else "no",
            escape(str(folder or store.dataset_folder(name))),
        )
    console().print(table)
    print_line("\n'shoal data fetch NAME' downloads a data set. LEAF's scripts create the data sets without a size.")
    return 0


def fetch_dataset(parsed: argparse.Namespace) -> int:
    """Download the files of a data set that are missing."""
    name, screen = parsed.name, console()
    known, folder = publisher(name), store.dataset_folder(name)
    if not known.files:
        raise DataError(f"dataset {name!r} cannot be downloaded: {known.instructions} into {folder}")
    with Display(screen) as display:
        for file in known.files:
            found = _find(name, file)
            if found is not None:
                print_line(f"{found}: already here; 'shoal data verify {name}' checks it", screen)
                continue
            path = _download(name, file, display)
            checked = "its checksum is correct" if file.md5 is not None else "no checksum is published"
            print_line(f"{path}: {checked}", screen)
    return 0


def _download(name: str, file: PublishedFile, display: Display) -> Path:
    meter = TransferMeter(file.name)
    display.rows([ProgressRow([f"connecting to {urlsplit(file.url).netloc}"], None, file.name, "connect")])

    def show_progress(done: int, total: int | None) -> None:
        display.rows([meter.row(done, total or file.size)])

    try:
        return download(file, store.dataset_folder(name), show_progress)
    except DataError as error:
        missing = [other.url for other in publisher(name).files if other is not file and _find(name, other) is None]
        hint = f"; the other files are missing too: {', '.join(missing)}" if missing else ""
        raise DataError(f"{error}{hint}") from error


def verify_dataset(parsed: argparse.Namespace) -> int:
    screen, code = console(), 0
    for result in store.verify(parsed.name, parsed.path):
        mark = "[green]valid[/green]" if result.valid else "[red]not valid[/red]"
        screen.print(f"{mark}  {escape(str(result.path))}: {escape(result.reason)}", highlight=False, soft_wrap=True)
        code = code if result.valid else INVALID
    return code


def print_path(parsed: argparse.Namespace) -> int:
    """Print the folder where a data set is, or where it would be."""
    publisher(parsed.name)
    print(_complete_folder(parsed.name) or store.dataset_folder(parsed.name))
    return 0


def plot_partition(parsed: argparse.Namespace) -> int:
    """Draw the samples that each node would hold in a run of the experiment."""
    from shoal.experiment import Experiment, parse_overrides
    from shoal.experiment.setup import Setup

    with show_warnings(console()):
        experiment = Experiment.from_file(parsed.file, parse_overrides(parsed.settings))
        setup = Setup(experiment)
    if setup.data.task != "classification":
        raise DataError(
            f"dataset {experiment.dataset.name!r}: a {setup.data.task} task has no classes to draw; use a data set "
            "with classes, such as cifar10"
        )
    counts = setup.label_counts()
    with writing(parsed.out):
        draw_partition(counts, parsed.out, f"{experiment.dataset.name}, {experiment.partition.name}")
    held, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    print_line(
        f"{len(counts)} nodes hold {held.min():,} to {held.max():,} samples of {classes.min()} to {classes.max()} of "
        f"{counts.shape[1]} classes; drawn to {parsed.out}"
    )
    return 0


def _find(name: str, file: PublishedFile) -> Path | None:
    """Return the path of a file of a data set, or None if it is not on this machine."""
    try:
        return store.source(name, file)
    except DataError:
        return None


def _complete_folder(name: str) -> Path | None:
    """Return the folder that holds all files of a data set, or None if some are missing."""
    known = publisher(name)
    try:
        if not known.files:
            return store.locate(name, ("train", "data/train")).parent
        return store.sources(name)[0].parent
    except DataError:
        return None
