"""MovieLens: how people rate films.

Harper and Konstan 2015, "The MovieLens Datasets: History and Context". Two of its publications are read, as a zip or
unpacked: ml-latest-small (ratings.csv, half stars from 0.5 to 5) and ml-100k (u.data, whole stars from 1 to 5).
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.data.decoded import Arrays, decoded
from shoal.data.store import located
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.schema import Bounds

VERSION = 1
COLUMNS = ("userId", "movieId", "rating")
TABLES = {"ratings.csv": 0.5, "u.data": 1.0}
"""The files of ratings, and the lowest rating of each."""
HIGHEST = 5.0


@dataclass(frozen=True)
class Movielens:
    """MovieLens (2015): ratings of films by 610 users (ml-latest-small) or 943 (ml-100k), to be foretold as numbers.

    Inputs are pairs (user, film), both numbered from 0 without gaps in the order of their ids; targets are stars. Of
    each user's ratings `test_fraction` are the test, rounded down, the same whatever the seed. Samples go by user.
    """

    version: Literal["ml-latest-small", "ml-100k"] = "ml-latest-small"
    path: Path | None = None
    """A zip, the folder in it, or a file of ratings; looked for in movielens below SHOAL_DATA when not given."""
    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.3

    def load(self, seed: int) -> Data:
        source = located("movielens", [f"{self.version}.zip", self.version, *TABLES], self.path)
        if source.is_dir():
            source = located("movielens", list(TABLES), source)
        arrays = decoded("movielens", VERSION, [source], lambda folder: _decode(source))
        x, y = arrays["x"], arrays["y"]
        test = _test(x[:, 0], self.test_fraction)
        train_samples, test_samples = (
            Samples(x[rows], y[rows], x[rows, 0].astype(np.int64)) for rows in (np.flatnonzero(~test), test)
        )
        users, films = (len(arrays[ids]) for ids in ("users", "films"))
        return Data(train_samples, test_samples, classes=1, task="regression", sizes=(users, films))


def _test(user: NDArray[np.int32], fraction: float) -> NDArray[np.bool_]:
    """Which ratings are the test: of each user's n, in a random order, the first ⌊n·fraction⌋. Users ascend."""
    order = np.lexsort((generator(0, "movielens test ratings").random(len(user)), user))
    counts = np.bincount(user)
    place = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.zeros(len(user), dtype=bool)
    chosen[order] = place < np.floor(np.repeat(counts, counts) * fraction + 1e-9)
    return chosen


def _decode(source: Path) -> Arrays:
    with _table(source) as (name, lines):
        place = str(source) if source.name == name else f"{source}: {name}"
        rows = _csv_rows(lines, place) if name.endswith(".csv") else _tab_rows(lines, place)
        ratings = np.array(list(_ratings(rows, place, TABLES[name])), dtype=np.float64)
    if not len(ratings):
        raise DataError(f"{place}: no ratings in it")
    user_ids, users = np.unique(ratings[:, 0].astype(np.int64), return_inverse=True)
    film_ids, films = np.unique(ratings[:, 1].astype(np.int64), return_inverse=True)
    order = np.argsort(users, kind="stable")
    x = np.stack([users, films], axis=1)[order].astype(np.int32)
    return {"x": x, "y": ratings[order, 2].astype(np.float32), "users": user_ids, "films": film_ids}


@contextmanager
def _table(source: Path) -> Iterator[tuple[str, io.TextIOBase]]:
    """The file of ratings, and what it is called."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                inside = [n for n in sorted(archive.namelist(), key=len) if n.rpartition("/")[2] in TABLES]
                if not inside:
                    raise DataError(f"{source}: neither {' nor '.join(TABLES)} is in it")
                with archive.open(inside[0]) as member:
                    yield inside[0].rpartition("/")[2], io.TextIOWrapper(member, encoding="utf-8-sig", newline="")
        elif source.suffix == ".zip":
            raise DataError(f"{source}: not a zip, or cut short; get it again")
        else:
            name = "ratings.csv" if source.suffix == ".csv" else "u.data"
            with open(source, encoding="utf-8-sig", newline="") as lines:
                yield name, lines
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{source}: cannot be read: {error}; it may be damaged: get it again") from error


def _csv_rows(lines: io.TextIOBase, place: str) -> Iterator[tuple[int, list[str]]]:
    """User, film and rating of each line, and its number."""
    reader = csv.reader(lines)
    header = next(reader, [])
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise DataError(f"{place}: line 1: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    columns = [header.index(column) for column in COLUMNS]
    for row in reader:
        if row:
            yield reader.line_num, [row[column] for column in columns] if len(row) > max(columns) else row


def _tab_rows(lines: io.TextIOBase, place: str) -> Iterator[tuple[int, list[str]]]:
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
            raise DataError(f"{place}: line {number}: {error}; expected {', '.join(COLUMNS)} as numbers") from error
        if not (math.isfinite(stars) and lowest <= stars <= HIGHEST):
            raise DataError(f"{place}: line {number}: rating {row[2].strip()}; expected {lowest:g} to {HIGHEST:g}")
        if not (0 <= user < 2**53 and 0 <= film < 2**53):
            raise DataError(f"{place}: line {number}: user {user}, film {film}; expected ids from 0")
        yield user, film, stars
