"""Files of FedScale (Lai et al., ICML 2022): measurements of real phones, by client id.

They are published as pickles, which are read without running any code in them; JSON works too. Nodes use the clients in
a random order, or in that of the file; if there are more nodes than clients, clients repeat. In two files of the same
clients, a node has the same client.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.pickles import read_pickle
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import NodeId

MAX_FILE_BYTES = 1 << 28
"""Bytes of a file; the largest that is published has 26 million."""
Order: TypeAlias = Literal["drawn", "file"]


class Clients:
    """The clients of a file. Errors name the file and the client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tables = _read(path)
        self._ids = list(self._tables)
        self._drawn: dict[int, NDArray[np.int64]] = {}

    def of(self, node: NodeId, seed: int, order: Order) -> Client:
        """The client of a node."""
        number = node % len(self._ids)
        if order == "drawn":
            if seed not in self._drawn:
                self._drawn[seed] = generator(seed, "clients").permutation(len(self._ids))
            number = int(self._drawn[seed][number])
        id = self._ids[number]
        return Client(f"{self.path}: client {reprlib.repr(id)}", self._tables[id])


class Client:
    """The entry of one client in a file."""

    def __init__(self, place: str, table: Any) -> None:
        if not isinstance(table, Mapping):
            raise DataError(f"{place} is {reprlib.repr(table)}: expected a dictionary")
        self.place = place
        # Strings that Python 2 pickled are bytes.
        self._table = {key.decode("latin-1") if isinstance(key, bytes) else key: v for key, v in table.items()}

    def above_zero(self, key: str) -> float:
        value = _number(self._get(key))
        if value is None or value <= 0:
            raise DataError(f"{self.place}: {key} = {reprlib.repr(self._get(key))}: expected a number above 0")
        return value

    def times(self, key: str) -> list[float]:
        """Seconds from the beginning of the trace."""
        values = self._get(key)
        if not isinstance(values, list | tuple):
            raise DataError(f"{self.place}: {key} = {reprlib.repr(values)}: expected a list of seconds")
        found = [_number(value) for value in values]
        for value, number in zip(values, found, strict=True):
            if number is None or number < 0:
                raise DataError(f"{self.place}: {key} holds {reprlib.repr(value)}: expected seconds, 0 or more")
        return [number for number in found if number is not None]

    def _get(self, key: str) -> Any:
        if key not in self._table:
            known = ", ".join(map(str, list(self._table)[:9])) or "nothing"
            raise DataError(f"{self.place} has no {key!r}; found {known}: is it a file of another kind?")
        return self._table[key]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a FedScale file") from None
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: it has more than {MAX_FILE_BYTES:,} bytes; expected a FedScale file")
    table = _read_json(content, path) if content.lstrip().startswith(b"{") else read_pickle(content, str(path))
    if not isinstance(table, dict) or not table:
        raise DataError(f"{path}: it holds {reprlib.repr(table)}; expected a dictionary of clients")
    return table


def _read_json(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {str(error)[:200]}") from None
