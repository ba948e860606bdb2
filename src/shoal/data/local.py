"""The samples of one node: its part of the common data set, and samples received from other nodes."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Indices, Samples
from shoal.state import State

T = TypeVar("T", bound=np.generic)


class NodeData:
    """Samples by index: first those of the common data set, then the added ones."""

    def __init__(self, data: Data, held: Indices) -> None:
        self.added: Samples | None = None
        """Samples received from other nodes, in order. The first has the index `len(data.train)`."""
        self._data = data
        self._common = data.train
        self._held = _GrowingArray(held)
        self._added: tuple[_GrowingArray[Any], _GrowingArray[Any]] | None = None
        self._digests: set[bytes] | None = None

    @property
    def held(self) -> Indices:
        """The indices of all samples that the node holds."""
        return self._held.rows

    def __len__(self) -> int:
        return len(self.held)

    def validate(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._data.validate(x, y)

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        """Return `count` random samples, each at most once; all of them if there are fewer."""
        numbers = rng.choice(self.held, min(count, len(self.held)), replace=False)
        return Samples(*self._rows(numbers))

    def add(self, samples: Samples) -> int:
        """Add the samples that the node does not hold yet. Return their number."""
        if self._digests is None:
            self._digests = set(_digests(*self._rows(self.held)))
        new = []
        for row, digest in enumerate(_digests(samples.x, samples.y)):
            if digest not in self._digests:
                self._digests.add(digest)
                new.append(row)
        if new:
            if self._added is None:
                self._added = _GrowingArray(samples.x[:0]), _GrowingArray(samples.y[:0])
            x, y = self._added
            first = len(self._common) + len(y.rows)
            self._held.append(np.arange(first, first + len(new)))
            x.append(samples.x[new])
            y.append(samples.y[new])
            self.added = Samples(x.rows, y.rows)
        return len(new)

    def state(self) -> State:
        added = self.added
        return {} if added is None else {"x": added.x, "y": added.y}

    def restore(self, state: State) -> None:
        if state:
            self.add(Samples(state["x"], state["y"]))

    def _rows(self, numbers: Indices) -> tuple[NDArray[Any], NDArray[Any]]:
        common, added = self._common, self.added
        if added is None:
            return common.x[numbers], common.y[numbers]
        return select_rows(common.x, added.x, numbers), select_rows(common.y, added.y, numbers)


def select_rows(rows: Any, added: Any, numbers: Any) -> Any:
    """Return the rows with these numbers, of which those of `added` follow the last of `rows`.

    All three are NumPy arrays, or all three are torch tensors.
    """
    is_added = numbers >= len(rows)
    selected = rows[numbers * ~is_added]  # row 0 in place of an added row
    selected[is_added] = added[numbers[is_added] - len(rows)]
    return selected


class _GrowingArray(Generic[T]):
    """An array that rows are appended to. Its buffer doubles when it is full, so that rows are rarely copied."""

    def __init__(self, first: NDArray[T]) -> None:
        self._buffer = first  # full, so nothing is ever written into the array of the caller
        self.rows = first
        """All rows. `append` does not change this view; it creates a new one."""

    def append(self, more: NDArray[T]) -> None:
        count = len(self.rows)
        if count + len(more) > len(self._buffer):
            size = max(count + len(more), 2 * count)
            self._buffer = np.empty((size, *self._buffer.shape[1:]), self._buffer.dtype)
            self._buffer[:count] = self.rows
        self._buffer[count : count + len(more)] = more
        self.rows = self._buffer[: count + len(more)]


def _digests(x: NDArray[Any], y: NDArray[Any]) -> list[bytes]:
    """Return a hash of each input with its target, to recognise equal samples."""
    return [
        hashlib.blake2b(row.tobytes() + target.tobytes(), digest_size=16).digest()
        for row, target in zip(np.ascontiguousarray(x), y, strict=True)
    ]
