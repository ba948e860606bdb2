"""Networks between sites: a latency for each pair of them, measured or given, from a file."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from shoal.environment.network.links import AccessNetwork
from shoal.environment.network.network import MEGABIT, NetworkTimeline, Route, capacity
from shoal.randomness import generator
from shoal.types import Bounds, NodeId

UNKNOWN = {"", "-", "*", "?", "na", "n/a", "nan", "null", "none"}
"""The entries for values that were not measured, besides negative and infinite numbers; case does not matter."""


class Sites(AccessNetwork):
    """Nodes at sites, with links between the sites.

    `site` has the number of each node's site; `latency` and `jitter` are of pairs of sites, in seconds one way;
    `bandwidth` too, in bytes per second and for each direction, and None where only the nodes' own links have limits.
    The diagonal applies between two nodes at the same site. `shared`: all nodes of two sites share the link between
    them. Otherwise each pair of nodes has its own link.
    """

    def __init__(
        self,
        site: Sequence[int],
        *,
        latency: NDArray[np.float64],
        jitter: NDArray[np.float64],
        loss: float,
        upload: NDArray[np.float64],
        download: NDArray[np.float64],
        bandwidth: NDArray[np.float64] | None = None,
        shared: bool = True,
    ) -> None:
        self._site = list(site)
        self._latency, self._jitter, self._loss = latency, jitter, loss
        self._width = len(latency) if shared else len(self._site)
        self._places = self._site if shared else list(range(len(self._site)))
        self._bandwidth = bandwidth
        if bandwidth is None:
            super().__init__(upload, download)
        else:
            super().__init__(upload, download, bandwidth if shared else bandwidth[np.ix_(self._site, self._site)])

    def _create_route(self, sender: NodeId, receiver: NodeId) -> Route:
        sites = (self._site[sender], self._site[receiver])
        links: tuple[int, ...] = (2 * sender, 2 * receiver + 1)
        if self._bandwidth is not None and math.isfinite(self._bandwidth[sites]):
            between = self._places[sender] * self._width + self._places[receiver]
            links = (links[0], 2 * len(self._site) + between, links[1])
        return Route(links, float(self._latency[sites]), float(self._jitter[sites]), self._loss)


@dataclass(frozen=True)
class Matrix:
    """Nodes at sites, with a latency for each pair from a file: rows of numbers, a square in all.

    Commas, semicolons, tabs or blanks separate the numbers. The file may be compressed (.gz), and have a row and a
    column of names. Its numbers are in `unit`; `round_trip`: in both directions, so half of it is one way. A `missing`
    value (empty, negative, nan) is the shortest path through other sites, the mean of the known values of the two
    sites, or rejected. Nodes are at the first sites, or with `draw` at random sites; if there are more nodes than
    sites, nodes share the sites in turn.

    `bandwidth`: a file of the same shape in Mbit/s, of the link between two sites in each direction. A missing
    value is the mean, or rejected; within a site it is unlimited. `upload` and `download` of each node are in
    Mbit/s (0: unlimited). `jitter` is a fraction of the latency; `loss` the probability that a message is lost.
    """

    latency: Path
    unit: Literal["ms", "s"] = "ms"
    round_trip: bool = True
    missing: Literal["path", "mean", "refuse"] = "path"
    draw: bool = False
    bandwidth: Path | None = None
    upload: Annotated[float, Bounds(at_least=0)] = 0.0
    download: Annotated[float, Bounds(at_least=0)] = 0.0
    jitter: Annotated[float, Bounds(at_least=0)] = 0.0
    loss: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.0

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        measured = read(self.latency)
        np.fill_diagonal(measured.values, np.nan_to_num(np.diagonal(measured.values), nan=0.0))
        sites = len(measured.values)
        kept = np.arange(min(sites, nodes))
        if self.draw and sites > nodes:
            kept = generator(seed, "sites").choice(sites, nodes, replace=False)
        seconds = 1e-3 if self.unit == "ms" else 1.0
        latency = self._filled(measured, kept) * (seconds / 2 if self.round_trip else seconds)
        network_state = Sites(
            [i % len(kept) for i in range(nodes)],
            latency=latency,
            jitter=latency * self.jitter,
            loss=self.loss,
            upload=capacity([self.upload] * nodes),
            download=capacity([self.download] * nodes),
            bandwidth=None if self.bandwidth is None else self._widths(self.bandwidth, sites, kept),
        )
        return NetworkTimeline([(0.0, network_state)])

    def _filled(self, sheet: Sheet, kept: NDArray[np.int64]) -> NDArray[np.float64]:
        """The latencies between the used sites. Shortest paths may pass through other sites."""
        values, among = sheet.values, np.ix_(kept, kept)
        lacking = np.isnan(values[among])
        if self.missing == "path" and lacking.any():
            from scipy.sparse import csr_matrix
            from scipy.sparse.csgraph import dijkstra

            rows, columns = np.nonzero(~np.isnan(values))
            known = csr_matrix((values[rows, columns], (rows, columns)), shape=values.shape)
            senders = kept[lacking.any(axis=1)]
            paths = np.full_like(values, np.nan)
            paths[senders] = dijkstra(known, indices=senders)
            values = np.where(np.isnan(values) & np.isfinite(paths), paths, values)
        elif self.missing == "mean":
            values = _with_means(values)
        hint = {
            "path": "there is no path through other sites either",
            "mean": "the two sites have no other value either",
            "refuse": "give it, or set missing to 'path' or 'mean'",
        }[self.missing]
        for i, j in zip(*np.nonzero(np.isnan(values[among])), strict=True):
            sheet.reject(f"the value is missing; {hint}", kept[i], kept[j])
        return np.asarray(values[among], np.float64)

    def _widths(self, path: Path, sites: int, kept: NDArray[np.int64]) -> NDArray[np.float64]:
        """The bandwidths between the used sites, in bytes per second."""
        sheet = read(path)
        if len(sheet.values) != sites:
            raise ValueError(f"{path}: it has {len(sheet.values)} sites, but {self.latency} has {sites}")
        values = np.where(sheet.values > 0, sheet.values, np.nan)
        alone = np.isnan(np.diagonal(values))
        if self.missing != "refuse":
            values = _with_means(values)
        np.fill_diagonal(values, np.where(alone, np.inf, np.diagonal(values)))
        among = np.ix_(kept, kept)
        for i, j in zip(*np.nonzero(np.isnan(values[among])), strict=True):
            sheet.reject("expected a bandwidth above 0, in Mbit/s", kept[i], kept[j])
        return np.asarray(values[among] * MEGABIT, np.float64)


def _with_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace missing values by the mean of the known values in their row and column, without the diagonal."""
    known = ~np.isnan(values) & ~np.eye(len(values), dtype=bool)
    sums, counts = np.where(known, values, 0.0), known.astype(np.float64)
    total = sums.sum(axis=1)[:, None] + sums.sum(axis=0)[None, :]
    count = counts.sum(axis=1)[:, None] + counts.sum(axis=0)[None, :]
    means = np.divide(total, count, out=np.full_like(values, np.nan), where=count > 0)
    return np.where(np.isnan(values), means, values)


@dataclass(frozen=True)
class Sheet:
    """A square table of numbers from a file, with their places in it. nan: missing."""

    path: Path
    values: NDArray[np.float64]
    lines: Sequence[int]
    """The line of each row, the first being 1."""
    before: int
    """The number of columns before the first number."""

    def reject(self, problem: str, row: int, column: int) -> NoReturn:
        raise ValueError(f"{self.path}:{self.lines[row]}: row {row + 1}, column {column + 1 + self.before}: {problem}")


def read(path: Path) -> Sheet:
    """Read a square matrix from a file. Raises ValueError with the file, the line and the column of an error."""
    rows = list(_rows(path))
    if not rows:
        raise ValueError(f"{path}: it is empty; expected a square matrix")
    width = len(rows[-1][1])
    cornerless = len(rows) > 1 and len(rows[0][1]) == width - 1
    for line, cells in rows[1:] if cornerless else rows:
        if len(cells) != width:
            raise ValueError(f"{path}:{line}: {len(cells)} entries, but the last line has {width}")
    header, named = (True, True) if cornerless else _names([cells for _, cells in rows])
    body = rows[header:]
    if len(body) != width - named:
        raise ValueError(f"{path}: {len(body)} rows and {width - named} columns; expected a square matrix")
    lines = [line for line, _ in body]
    numbers = [[_number(path, line, i, cells[i]) for i in range(named, width)] for line, cells in body]
    return Sheet(path, np.array(numbers), lines, int(named))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines that are not empty, with their numbers, split at the separator of the first line."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is neither a text file nor a gzip file"
        raise ValueError(f"{path}: cannot read this matrix: {reason}") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip() and line.lstrip()[0] != "#"]
    mark = next((m for m in "\t;," if lines and m in lines[0][1]), None)
    rows = [(i, [cell.strip().strip('"') for cell in line.split(mark)]) for i, line in lines]
    ended = mark is not None and all(cells[-1] == "" for _, cells in rows) and len(rows[0][1]) > len(rows)
    yield from ((i, cells[:-1] if ended else cells) for i, cells in rows)


def _names(rows: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Whether the first row has names, and whether the first column has names."""
    above, beside = rows[0], [row[0] for row in rows]
    match len(rows) - len(above):
        case 0:  # both or none; names that are numbers cannot be detected
            both = _are_words(above[1:]) and _are_words(beside[1:])
            return both, both
        case 1:
            return _are_words(above) or _count_up(above), False
        case -1:
            return False, _are_words(beside) or _count_up(beside)
    return False, False


def _are_words(cells: Sequence[str]) -> bool:
    """Whether no cell is a number or a missing value."""
    return bool(cells) and all(cell.lower() not in UNKNOWN and not _is_number(cell) for cell in cells)


def _count_up(cells: Sequence[str]) -> bool:
    """Whether these are the numbers of rows or columns: 0, 1, 2, … or 1, 2, 3, …"""
    return any(list(cells) == [str(i) for i in range(first, first + len(cells))] for first in (0, 1))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(path: Path, line: int, column: int, cell: str) -> float:
    """The number in a cell; nan if it is missing."""
    try:
        value = float(cell)
    except ValueError:
        if cell.lower() in UNKNOWN:
            return math.nan
        raise ValueError(f"{path}:{line}: column {column + 1}: {cell!r} is not a number") from None
    return value if 0 <= value < math.inf else math.nan
