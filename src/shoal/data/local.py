"""What one node holds: its part of the common data set, and samples that others sent it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, Samples
from shoal.state import State


class NodeData:
    """Samples by number: those of the common data set by their place in it, those that were added after them."""

    def __init__(self, common: Samples, held: Indices, classes: int) -> None:
        self.shape: tuple[int, ...] = common.x.shape[1:]
        self.classes = classes
        self.held = held
        """The numbers of all samples that the node holds."""
        self.added: Samples | None = None
        """What others sent, in order; the first has the number `len(common)`."""
        self._common = common
        self._known: set[bytes] | None = None

    def __len__(self) -> int:
        return len(self.held)

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
            before = self.added
            x, y = samples.x[fresh], samples.y[fresh]
            self.added = (
                Samples(x, y)
                if before is None
                else Samples(np.concatenate([before.x, x]), np.concatenate([before.y, y]))
            )
            first = len(self._common) + (0 if before is None else len(before))
            self.held = np.concatenate([self.held, np.arange(first, first + len(fresh))])
        return len(fresh)

    def state(self) -> State:
        added = self.added
        return {} if added is None else {"x": added.x, "y": added.y}

    def restore(self, state: State) -> None:
        if state:
            self.add(Samples(state["x"], state["y"]))

    def _rows(self, numbers: Indices) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        common, added = self._common, self.added
        if added is None:
            return common.x[numbers], common.y[numbers]
        foreign = numbers >= len(common)
        x, y = common.x[np.where(foreign, 0, numbers)], common.y[np.where(foreign, 0, numbers)]
        x[foreign], y[foreign] = added.x[numbers[foreign] - len(common)], added.y[numbers[foreign] - len(common)]
        return x, y


def _digests(x: NDArray[np.float32], y: NDArray[np.int64]) -> list[bytes]:
    """What tells samples apart: a hash of the input and its target."""
    return [
        hashlib.blake2b(row.tobytes() + target.tobytes(), digest_size=16).digest()
        for row, target in zip(np.ascontiguousarray(x), y.astype(np.int64), strict=True)
    ]
