"""Columns that grow: the records of a run in a few large arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class Columns:
    """A table whose rows are only appended. `types` has the NumPy type of each column."""

    def __init__(self, **types: str) -> None:
        self._columns: dict[str, Array] = {name: np.empty(64, type) for name, type in types.items()}
        self.size = 0

    def __getitem__(self, name: str) -> Array:
        """All rows of a column; a view that is valid until rows are appended."""
        return self._columns[name][: self.size]

    def append(self, **values: Sequence[Any] | Array) -> None:
        """Append rows: the same number of values for every column."""
        added = len(next(iter(values.values())))
        if self.size + added > len(next(iter(self._columns.values()))):
            capacity = 2 * (self.size + added)
            for name, column in self._columns.items():
                self._columns[name] = np.resize(column, capacity)
        for name, column in self._columns.items():
            column[self.size : self.size + added] = values[name]
        self.size += added


class PerNode:
    """One value for each node. `fill` is the value of a node that has none yet."""

    def __init__(self, type: str, fill: float) -> None:
        self._fill = fill
        self.values: Array = np.full(64, fill, type)

    def reserve(self, nodes: int) -> None:
        if nodes > len(self.values):
            grown = np.full(2 * nodes, self._fill, self.values.dtype)
            grown[: len(self.values)] = self.values
            self.values = grown
