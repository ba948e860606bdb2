"""Networks between sites, with a latency for each pair of sites from a file."""

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

MAX_BYTES = 2**27
"""The size of the largest file, unpacked: a matrix of 3,600 sites with ten characters per value. A gzip file can unpack
to a thousand times its size."""
MISSING = {"", "-", "*", "?", "na", "n/a", "nan", "null", "none"}
"""Entries that mean a missing value, in any case. Negative and infinite numbers are missing values too."""


class Sites(AccessNetwork):
    """Nodes at sites, with links between the sites.

    `site` has the site index of each node. `latency` and `jitter` are matrices over the sites, in seconds one way.
    `bandwidth` is a matrix too, in bytes per second and per direction; None: only the nodes' own links have limits.
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
        self._columns = len(latency) if shared else len(self._site)
        self._link_index = self._site if shared else list(range(len(self._site)))
        self._bandwidth = bandwidth
        if bandwidth is None:
            super().__init__(upload, download)
        else:
            super().__init__(upload, download, bandwidth if shared else bandwidth[np.ix_(self._site, self._site)])

    def _create_route(self, sender: NodeId, receiver: NodeId) -> Route:
        sites = (self._site[sender], self._site[receiver])
        links: tuple[int, ...] = (2 * sender, 2 * receiver + 1)
        if self._bandwidth is not None and math.isfinite(self._bandwidth[sites]):
            between = self._link_index[sender] * self._columns + self._link_index[receiver]
            links = (links[0], 2 * len(self._site) + between, links[1])
        return Route(links, float(self._latency[sites]), float(self._jitter[sites]), self._loss)


@dataclass(frozen=True)
class LatencyMatrix:
    """Nodes at sites, with the latency of each pair of sites from a file that holds a square matrix.

    Commas, semicolons, tabs or blanks separate the numbers. The file may be compressed (.gz), and have a row and a
    column of names. Its numbers are in `unit`. With `round_trip` they cover both directions, so half is one way. A
    `missing` value (empty, negative, nan) is the shortest path through other sites, the mean of the known values of the
    two sites, or rejected. Nodes are at the first sites, or with `draw` at random sites. If there are more nodes than
    sites, nodes share the sites in turn.

    `bandwidth`: a file of the same shape with the bandwidth between two sites, in Mbit/s per direction. A missing
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
        used = np.arange(min(sites, nodes))
        if self.draw and sites > nodes:
            used = generator(seed, "sites").choice(sites, nodes, replace=False)
        seconds = 1e-3 if self.unit == "ms" else 1.0
        latency = self._latencies(measured, used) * (seconds / 2 if self.round_trip else seconds)
        network_state = Sites(
            [i % len(used) for i in range(nodes)],
            latency=latency,
            jitter=latency * self.jitter,
            loss=self.loss,
            upload=capacity([self.upload] * nodes),
            download=capacity([self.download] * nodes),
            bandwidth=None if self.bandwidth is None else self._bandwidths(self.bandwidth, sites, used),
        )
        return NetworkTimeline([(0.0, network_state)])

    def _latencies(self, matrix: MatrixFile, used: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the latencies between the used sites. Shortest paths may pass through other sites."""
        values, selected = matrix.values, np.ix_(used, used)
        missing = np.isnan(values[selected])
        if self.missing == "path" and missing.any():
            from scipy.sparse import csr_matrix
            from scipy.sparse.csgraph import dijkstra

            rows, columns = np.nonzero(~np.isnan(values))
            known = csr_matrix((values[rows, columns], (rows, columns)), shape=values.shape)
            senders = used[missing.any(axis=1)]
            paths = np.full_like(values, np.nan)
            paths[senders] = dijkstra(known, indices=senders)
            values = np.where(np.isnan(values) & np.isfinite(paths), paths, values)
        elif self.missing == "mean":
            values = _with_means(values)
        hint = {
            "path": "no path through other sites exists either",
            "mean": "the two sites have no other values to average",
            "refuse": "add it, or set missing to 'path' or 'mean'",
        }[self.missing]
        for i, j in zip(*np.nonzero(np.isnan(values[selected])), strict=True):
            matrix.reject(f"the value is missing; {hint}", used[i], used[j])
        return np.asarray(values[selected], np.float64)

    def _bandwidths(self, path: Path, sites: int, used: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the bandwidths between the used sites, in bytes per second."""
        matrix = read(path)
        if len(matrix.values) != sites:
            raise ValueError(f"{path}: {len(matrix.values)} sites, but {self.latency} has {sites}")
        values = np.where(matrix.values > 0, matrix.values, np.nan)
        unlimited = np.isnan(np.diagonal(values))
        if self.missing != "refuse":
            values = _with_means(values)
        np.fill_diagonal(values, np.where(unlimited, np.inf, np.diagonal(values)))
        selected = np.ix_(used, used)
        for i, j in zip(*np.nonzero(np.isnan(values[selected])), strict=True):
            matrix.reject("expected a bandwidth above 0, in Mbit/s", used[i], used[j])
        return np.asarray(values[selected] * MEGABIT, np.float64)


def _with_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace missing values by the mean of the known values in their row and column, without the diagonal."""
    known = ~np.isnan(values) & ~np.eye(len(values), dtype=bool)
    sums, counts = np.where(known, values, 0.0), known.astype(np.float64)
    total = sums.sum(axis=1)[:, None] + sums.sum(axis=0)[None, :]
    count = counts.sum(axis=1)[:, None] + counts.sum(axis=0)[None, :]
    means = np.divide(total, count, out=np.full_like(values, np.nan), where=count > 0)
    return np.where(np.isnan(values), means, values)


@dataclass(frozen=True)
class MatrixFile:
    """A square matrix from a file, with the position of each row in the file. nan: missing."""

    path: Path
    values: NDArray[np.float64]
    lines: Sequence[int]
    """The line number of each row, counted from 1."""
    leading_columns: int
    """The number of columns before the first number."""

    def reject(self, problem: str, row: int, column: int) -> NoReturn:
        raise ValueError(
            f"{self.path}:{self.lines[row]}: row {row + 1}, column {column + 1 + self.leading_columns}: {problem}"
        )


def read(path: Path) -> MatrixFile:
    """Read a square matrix from a file. Raises ValueError with the file, the line and the column of an error."""
    rows = list(_read_rows(path))
    if not rows:
        raise ValueError(f"{path}: the file is empty; expected a square matrix")
    width = len(rows[-1][1])
    no_corner = len(rows) > 1 and len(rows[0][1]) == width - 1
    for line, cells in rows[1:] if no_corner else rows:
        if len(cells) != width:
            raise ValueError(f"{path}:{line}: {len(cells)} entries, but the last line has {width}")
    header, has_names = (True, True) if no_corner else _has_names([cells for _, cells in rows])
    if not header and _could_be_names([cells for _, cells in rows]):
        raise ValueError(
            f"{path}: the first cell is empty, and the first row and the first column count 0, 1, 2, … or 1, 2, 3, …: "
            "if they are names, leave out the first cell and its separator; if they are values, write nan in this cell"
        )
    body = rows[header:]
    if len(body) != width - has_names:
        raise ValueError(f"{path}: {len(body)} rows and {width - has_names} columns; expected a square matrix")
    lines = [line for line, _ in body]
    numbers = [[_number(path, line, i, cells[i]) for i in range(has_names, width)] for line, cells in body]
    return MatrixFile(path, np.array(numbers), lines, int(has_names))


def _read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of every line that is not empty. The first line determines the separator."""
    separator: str | None = None
    rows: list[tuple[int, list[str]]] = []
    for number, line in _read_lines(path):
        if not rows:
            separator = next((m for m in "\t;," if m in line), None)
        rows.append((number, [cell.strip().strip('"') for cell in line.split(separator)]))
        if len(rows) > len(rows[0][1]) + 2:  # names of columns, and no name above the names of rows
            raise ValueError(f"{path}:{number}: more rows than columns; expected a square matrix")
    trailing = separator is not None and all(cells[-1] == "" for _, cells in rows) and len(rows[0][1]) > len(rows)
    yield from ((i, cells[:-1] if trailing else cells) for i, cells in rows)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line that is neither empty nor a comment, unpacked."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as stream:
            number = size = 0
            while raw := stream.readline(MAX_BYTES - size + 1):
                size += len(raw)
                if size > MAX_BYTES:
                    raise ValueError(
                        f"{path}: {'unpacked, it' if is_packed else 'it'} has more than {MAX_BYTES:,} bytes, the limit "
                        "for a matrix; remove digits or sites that the experiment does not need"
                    )
                for line in raw.decode("utf-8-sig" if number == 0 else "utf-8").splitlines():
                    number += 1
                    if line.strip() and line.lstrip()[0] != "#":
                        yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is neither a text file nor a gzip file"
        raise ValueError(f"{path}: cannot read this matrix: {reason}") from None


def _has_names(rows: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Whether the first row has names, and whether the first column has names."""
    above, beside = rows[0], [row[0] for row in rows]
    match len(rows) - len(above):
        case 0:  # both or none; numeric names cannot be detected
            both = _are_names(above[1:]) and _are_names(beside[1:])
            return both, both
        case 1:
            return _are_names(above) or _are_indices(above), False
        case -1:
            return False, _are_names(beside) or _are_indices(beside)
    return False, False


def _could_be_names(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a square file has numbers that are either names of at least two sites, or values."""
    above, beside = rows[0], [row[0] for row in rows]
    is_square = len(rows) == len(above) > 2
    return is_square and above[0] == "" and _are_indices(above[1:]) and _are_indices(beside[1:])


def _are_names(cells: Sequence[str]) -> bool:
    """Whether no cell is a number or a missing value."""
    return bool(cells) and all(cell.lower() not in MISSING and not _is_number(cell) for cell in cells)


def _are_indices(cells: Sequence[str]) -> bool:
    """Whether these are the numbers of rows or columns: 0, 1, 2, … or 1, 2, 3, …"""
    return any(list(cells) == [str(i) for i in range(first, first + len(cells))] for first in (0, 1))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(path: Path, line: int, column: int, cell: str) -> float:
    """Return the number in a cell; nan if it is missing."""
    try:
        value = float(cell)
    except ValueError:
        if cell.lower() in MISSING:
            return math.nan
        raise ValueError(f"{path}:{line}: column {column + 1}: {cell!r} is not a number") from None
    return value if 0 <= value < math.inf else math.nan
