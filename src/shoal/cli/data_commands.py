"""What `shoal data` does: list, fetch, verify and locate data sets, and draw who holds what of one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from shoal.cli.display import Display, console, size
from shoal.data import store
from shoal.data.decoded import is_decoded
from shoal.data.downloads import download
from shoal.data.plots import Counts, draw_holdings
from shoal.data.publishers import PUBLISHERS, Published, publisher
from shoal.errors import DataError

UNSOUND = 1
"""The exit code of `verify` when something is not what was published."""


def list_datasets() -> int:
    """Every data set that has a publisher: how large it is, where it lies, and whether it is there."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("data set", "size", "here", "decoded", "folder"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=column != "folder",
                         overflow="fold")  # fmt: skip
    for name, known in PUBLISHERS.items():
        place = _place(name)
        table.add_row(
            name,
            size(sum(file.size for file in known.files)) if known.files else "",
            "no" if place is None else "yes",
            "yes" if is_decoded(name) else "no",
            escape(str(place or store.dataset_folder(name))),
        )
    screen = console()
    screen.print(table)
    screen.print("\n'shoal data fetch NAME' downloads one. Those without a size are made by LEAF's scripts.",
                 highlight=False, soft_wrap=True)  # fmt: skip
    return 0


def fetch(name: str) -> int:
    """Download what is missing of a data set."""
    known, folder, screen = publisher(name), store.dataset_folder(name), console()
    if not known.files:
        raise DataError(f"dataset {name!r} cannot be downloaded: {known.by_hand} into {folder}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        for file in known.files:
            found = _found(name, file)
            if found is not None:
                said = f"{found}: there already; 'shoal data verify {name}' checks it"
                bars.console.print(said, highlight=False, markup=False, soft_wrap=True)
                continue
            bar = bars.add_task(escape(file.name), total=file.size)

            def tell(done: int, total: int | None, bar: object = bar) -> None:
                bars.update(bar, completed=done, total=total)  # type: ignore[arg-type]

            try:
                path = download(file, folder, tell)
            except DataError as error:
                others = [o.url for o in known.files if o is not file and _found(name, o) is None]
                hint = f"; so with the others: {', '.join(others)}" if others else ""
                raise DataError(f"{error}{hint}") from error
            checked = "its checksum is right" if file.md5 is not None else "no checksum is published"
            bars.console.print(f"{path}: {checked}", highlight=False, markup=False, soft_wrap=True)
    return 0


def verify(name: str, path: Path | None = None) -> int:
    """Say of each file whether it is what was published."""
    screen, code = console(), 0
    for verdict in store.verified(name, path):
        mark = "[green]sound[/green]" if verdict.sound else "[red]not sound[/red]"
        screen.print(f"{mark}  {escape(str(verdict.path))}: {escape(verdict.reason)}", highlight=False, soft_wrap=True)
        code = code if verdict.sound else UNSOUND
    return code


def print_path(name: str) -> int:
    """The folder of a data set, for scripts: where it is, or where it would be."""
    publisher(name)
    print(_place(name) or store.dataset_folder(name))
    return 0


@dataclass(frozen=True)
class Holdings:
    """How many samples of each class each node of an experiment holds."""

    title: str
    counts: Counts


def holdings(file: Path, settings: Sequence[str] = ()) -> Holdings:
    """As a run of the experiment would divide its data."""
    from shoal.experiment import Experiment, parse_overrides
    from shoal.experiment.setup import Setup

    with warnings.catch_warnings(), Display(console()) as display:
        warnings.showwarning = lambda message, *_, **__: display.notice(str(message))
        experiment = Experiment.from_file(file, parse_overrides(settings))
        setup = Setup(experiment)
    if setup.data.task != "classification":
        raise DataError(
            f"dataset {experiment.dataset.name!r}: a {setup.data.task} task has no classes to draw; data sets of "
            "classes have, such as cifar10"
        )
    return Holdings(f"{experiment.dataset.name}, {experiment.partition.name}", setup.label_counts())


def draw(holdings: Holdings, out: Path) -> int:
    counts = holdings.counts
    draw_holdings(counts, out, holdings.title)
    held, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
    console().print(
        f"{len(counts)} nodes hold {held.min():,} to {held.max():,} samples of {kinds.min()} to {kinds.max()} of "
        f"{counts.shape[1]} classes; drawn to {out}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def _found(name: str, file: Published) -> Path | None:
    try:
        return store.source(name, file)
    except DataError:
        return None


def _place(name: str) -> Path | None:
    """The folder in which all of a data set is; None when some is missing."""
    known = publisher(name)
    try:
        if not known.files:
            return store.located(name, ("train", "data/train")).parent
        return store.sources(name)[0].parent
    except DataError:
        return None
