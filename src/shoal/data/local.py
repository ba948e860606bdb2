"""What one node holds: its part of the common data set, and samples that others sent it."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Indices, Samples
from shoal.state import State

T = TypeVar("T", bound=np.generic)


class NodeData:
    """Samples by number: those of the common data set by their place in it, those that were added after them."""

    def __init__(self, data: Data, held: Indices) -> None:
        self.added: Samples | None = None
        """What others sent, in order; the first has the number `len(common)`."""
        self._data = data
        self._common = data.train
        self._held = _Rows(held)
        self._added: tuple[_Rows[Any], _Rows[Any]] | None = None
        self._known: set[bytes] | None = None

    @property
    def held(self) -> Indices:
        """The numbers of all samples that the node holds."""
        return self._held.rows

    def __len__(self) -> int:
        return len(self.held)

    def require(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._data.require(x, y)

    def drawn(self, count: int, rng: np.random.Generator) -> Samples:
        """`count` of them at random, each at most once; all of them when there are fewer."""
        numbers = rng.choice(self.held, min(count, len(self.held)), replace=False)
        return Samples(*self._rows(numbers))

    def add(self, samples: Samples) -> int:
        """Keep those of `samples` that the node does not hold yet; how many those were."""
        if self._known is None:
            self._known = set(_digests(*self._rows(self.held)))
        fresh = []
        for row, digest in enumerate(_digests(samples.x, samples.y)):
            if digest not in self._known:
                self._known.add(digest)
                fresh.append(row)
        if fresh:
            if self._added is None:
                self._added = _Rows(samples.x[:0]), _Rows(samples.y[:0])
            x, y = self._added
            first = len(self._common) + len(y.rows)
            self._held.add(np.arange(first, first + len(fresh)))
            x.add(samples.x[fresh])
            y.add(samples.y[fresh])
            self.added = Samples(x.rows, y.rows)
        return len(fresh)

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
        foreign = numbers >= len(common)
        x, y = common.x[np.where(foreign, 0, numbers)], common.y[np.where(foreign, 0, numbers)]
        x[foreign], y[foreign] = added.x[numbers[foreign] - len(common)], added.y[numbers[foreign] - len(common)]
        return x, y


class _Rows(Generic[T]):
    """Rows to which more are added behind the last, in a buffer that doubles: a row is moved a few times at most."""

    def __init__(self, first: NDArray[T]) -> None:
        self._buffer = first  # and full, so nothing is ever written into what was given
        self.rows = first
        """All so far. They stay as they are when more come, which are seen in another view."""

    def add(self, more: NDArray[T]) -> None:
        count = len(self.rows)
        if count + len(more) > len(self._buffer):
            size = max(count + len(more), 2 * count)
            self._buffer = np.empty((size, *self._buffer.shape[1:]), self._buffer.dtype)
            self._buffer[:count] = self.rows
        self._buffer[count : count + len(more)] = more
        self.rows = self._buffer[: count + len(more)]


def _digests(x: NDArray[Any], y: NDArray[Any]) -> list[bytes]:
    """What tells samples apart: a hash of the input and its target."""
    return [
        hashlib.blake2b(row.tobytes() + target.tobytes(), digest_size=16).digest()
        for row, target in zip(np.ascontiguousarray(x), y, strict=True)
    ]
