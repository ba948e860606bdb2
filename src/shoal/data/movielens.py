"""MovieLens: ratings of films by users.

Harper and Konstan 2015, "The MovieLens Datasets: History and Context". Two versions are supported, as a zip or
unpacked: ml-latest-small (ratings.csv, half stars from 0.5 to 5) and ml-100k (u.data, whole stars from 1 to 5).
"""

from __future__ import annotations

import csv
import io
import math
import reprlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.data.decoded import Arrays, load_decoded
from shoal.data.store import UNREADABLE, locate
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import Bounds

VERSION = 1
COLUMNS = ("userId", "movieId", "rating")
RATING = np.dtype([("user", np.int64), ("film", np.int64), ("stars", np.float64)])
HIGHEST = 5.0
MAX_BYTES = 1 << 28
"""Bytes of a file of ratings. Both versions have less than three million."""


@dataclass(frozen=True)
class _VersionInfo:
    """The differences between the two versions."""

    name: str
    """The key in `PUBLISHERS`."""
    table: str
    """The file of ratings."""
    lowest: float


Version: TypeAlias = Literal["ml-latest-small", "ml-100k"]
VERSIONS: dict[Version, _VersionInfo] = {
    "ml-latest-small": _VersionInfo("movielens", "ratings.csv", 0.5),
    "ml-100k": _VersionInfo("movielens-100k", "u.data", 1.0),
}


@dataclass(frozen=True)
class Movielens:
    """MovieLens (2015): ratings of films by 610 users (ml-latest-small) or 943 (ml-100k); a regression.

    Inputs are pairs (user, film), both numbered from 0 without gaps in the order of their ids; targets are stars. The
    test set is `test_fraction` of each user's ratings, rounded down; it does not depend on the seed. The
    owner of a sample is its user.
    """

    version: Version = "ml-latest-small"
    path: Path | None = None
    """A zip, an unpacked folder, or a file of ratings; by default in movielens below SHOAL_DATA."""
    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.3

    def load(self, seed: int) -> Data:
        form = VERSIONS[self.version]
        source = locate(form.name, [f"{self.version}.zip", self.version, form.table], self.path)
        source = _file(self.version, source)
        arrays = load_decoded(form.name, VERSION, [source], lambda folder: _decode(self.version, source))
        x, y = arrays["x"], arrays["y"]
        test = _test(x[:, 0], self.test_fraction)
        if not test.any():
            raise DataError(
                f"{source}: a test_fraction of {self.test_fraction} of each user's ratings leaves the test set empty: "
                f"no user has more than {np.bincount(x[:, 0]).max()} ratings"
            )
        train_samples, test_samples = (
            Samples(x[rows], y[rows], x[rows, 0].astype(np.int64)) for rows in (np.flatnonzero(~test), test)
        )
        users, films = (len(arrays[ids]) for ids in ("users", "films"))
        return Data(train_samples, test_samples, classes=1, task="regression", sizes=(users, films))


def latest_small(source: Path) -> str:
    """Read the whole file and describe it."""
    return _describe("ml-latest-small", source)


def hundred_thousand(source: Path) -> str:
    """Read the whole file and describe it. Raises `DataError` if its counts differ from those of ml-100k."""
    found = _describe("ml-100k", source)
    expected = "100,000 ratings by 943 users of 1,682 films"
    if found != expected:
        raise DataError(f"not the published data: {found}; expected {expected}")
    return f"{found}, as ml-100k has"


def _describe(version: Version, source: Path) -> str:
    arrays = _decode(version, _file(version, source))
    return f"{len(arrays['y']):,} ratings by {len(arrays['users']):,} users of {len(arrays['films']):,} films"


def _file(version: Version, source: Path) -> Path:
    """Return the zip or the file of ratings. Raises `DataError` for a file of the other version."""
    form = VERSIONS[version]
    if source.is_dir():
        source = locate(form.name, [form.table], source)
    for other, its in VERSIONS.items():
        same = source.name == its.table or source.suffix == Path(its.table).suffix
        if other != version and same:
            raise DataError(f"{source}: a file of {other}; expected {form.table}, or dataset.version = {other!r}")
    return source


def _test(user: NDArray[np.int32], fraction: float) -> NDArray[np.bool_]:
    """Mark the test ratings: the first ⌊n·fraction⌋ of each user's n, in random order. `user` is sorted."""
    order = np.lexsort((generator(0, "movielens test ratings").random(len(user)), user))
    counts = np.bincount(user)
    place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.zeros(len(user), dtype=bool)
    chosen[order] = place < np.floor(np.repeat(counts, counts) * fraction + 1e-9)
    return chosen


def _decode(version: Version, source: Path) -> Arrays:
    form = VERSIONS[version]
    with _table(source, form.table) as lines:
        place = f"{source}: {form.table}" if source.suffix == ".zip" else str(source)
        rows = _csv_rows(lines, place) if form.table.endswith(".csv") else _tab_rows(lines)
        ratings = np.fromiter(_ratings(rows, place, form.lowest), dtype=RATING)
    if not len(ratings):
        raise DataError(f"{place}: it has no ratings")
    user_ids, users = np.unique(ratings["user"], return_inverse=True)
    film_ids, films = np.unique(ratings["film"], return_inverse=True)
    order = np.argsort(users, kind="stable")
    x = np.stack([users, films], axis=1)[order].astype(np.int32)
    return {"x": x, "y": ratings["stars"][order].astype(np.float32), "users": user_ids, "films": film_ids}


@contextmanager
def _table(source: Path, table: str) -> Iterator[io.TextIOBase]:
    """Open the file of ratings."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                inside = [n for n in sorted(archive.namelist(), key=len) if n.rpartition("/")[2] == table]
                if not inside:
                    raise DataError(f"{source}: no {table} in it")
                _check_size(f"{source}: {table}", archive.getinfo(inside[0]).file_size)
                with archive.open(inside[0]) as member:
                    yield io.TextIOWrapper(member, encoding="utf-8-sig", newline="")
        elif source.suffix == ".zip":
            raise DataError(f"{source}: not a zip, or incomplete; download it again")
        else:
            _check_size(str(source), source.stat().st_size)
            with open(source, encoding="utf-8-sig", newline="") as lines:
                yield lines
    except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source}: cannot be read: {error}; it may be damaged: download it again") from error


def _check_size(place: str, size: int) -> None:
    if size > MAX_BYTES:
        raise DataError(f"{place}: {size:,} bytes; expected at most {MAX_BYTES:,} for a file of ratings")


def _csv_rows(lines: io.TextIOBase, place: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, with its user, film and rating."""
    reader = csv.reader(lines)
    header = next(reader, [])
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise DataError(f"{place}: line 1: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    columns = [header.index(column) for column in COLUMNS]
    for row in reader:
        if row:
            yield reader.line_num, [row[column] for column in columns] if len(row) > max(columns) else row


def _tab_rows(lines: io.TextIOBase) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line.split("\t")[: len(COLUMNS)]


def _ratings(rows: Iterator[tuple[int, list[str]]], place: str, lowest: float) -> Iterator[tuple[int, int, float]]:
    for number, row in rows:
        if len(row) != len(COLUMNS):
            raise DataError(f"{place}: line {number}: {len(row)} columns; expected at least {', '.join(COLUMNS)}")
        try:
            user, film, stars = int(row[0]), int(row[1]), float(row[2])
        except ValueError as error:
            raise DataError(
                f"{place}: line {number}: {reprlib.repr(row)}; expected {', '.join(COLUMNS)} as numbers"
            ) from error
        if not (math.isfinite(stars) and lowest <= stars <= HIGHEST):
            raise DataError(f"{place}: line {number}: rating {row[2].strip()[:30]}; expected {lowest:g} to {HIGHEST:g}")
        if not (0 <= user < 2**53 and 0 <= film < 2**53):
            raise DataError(
                f"{place}: line {number}: user {reprlib.repr(user)}, film {reprlib.repr(film)}; expected ids from 0"
            )
        yield user, film, stars
