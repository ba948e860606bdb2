"""What a data set and a partition are.

A data set is loaded once and shared by all nodes of a machine; a partition tells which node holds which of
its training samples, as indices. Each works with every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, one row each, in one piece of memory that nobody writes to: both are read-only."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs and {len(self.y)} targets; expected a target for each input")
        for name, array in (("x", self.x), ("y", self.y)):
            shared = array.view()  # the caller's own array stays as it is
            shared.flags.writeable = False
            object.__setattr__(self, name, shared)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Data:
    """A loaded data set. The test samples are common to all nodes."""

    train: Samples
    test: Samples
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])


class LocalData(Protocol):
    """The samples that one node trains on."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        ...

    @property
    def classes(self) -> int:
        """Targets are 0 to classes − 1."""
        ...

    def __len__(self) -> int: ...

    def drawn(self, count: int, rng: np.random.Generator) -> Samples:
        """`count` of them at random, each at most once; all of them when there are fewer."""
        ...

    def add(self, samples: Samples) -> int:
        """Keep those of `samples` that the node does not hold yet; how many those were."""
        ...


class Dataset(Protocol):
    """A recipe for data; its parameters are those of its constructor."""

    def load(self, seed: int) -> Data: ...


class Partition(Protocol):
    """Who holds what."""

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        """One array of sample indices per node. No sample is given to two nodes; no node is left empty.

        Every sample is given to someone, unless the partition says when not. Equal arguments, with `rng` in
        the same state, give equal arrays. Raises `DataError` when there is no such split.
        """
        ...
