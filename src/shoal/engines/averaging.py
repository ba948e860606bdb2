"""The average of all nodes' models, and how far they are from it, from models that come one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.types import NodeId, Params


@dataclass(frozen=True)
class Averaged:
    """All models of one round, taken together."""

    round: int
    nodes: int
    mean: Params
    consensus_distance: float
    """The root mean square of the nodes' Euclidean distances to the mean."""


class Averages:
    """Sums in double precision, one model's worth of memory per round that is under way."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}
        self._squares: dict[int, float] = {}
        self._from: dict[int, set[NodeId]] = {}

    def add(self, node: NodeId, round: int, params: Params) -> None:
        double = params.astype(np.float64)
        if round in self._sums:
            self._sums[round] += double
        else:
            self._sums[round] = double.copy()
            self._squares[round] = 0.0
            self._from[round] = set()
        self._squares[round] += float(double @ double)
        self._from[round].add(node)

    def complete(self, alive: set[NodeId]) -> Iterator[Averaged]:
        """Take out the rounds for which the models of all nodes that are alive have come, in order."""
        for round in sorted(r for r, nodes in self._from.items() if len(alive) <= len(nodes) and alive <= nodes):
            yield self._take(round)

    def _take(self, round: int) -> Averaged:
        count = len(self._from.pop(round))
        mean = self._sums.pop(round) / count
        spread = max(0.0, self._squares.pop(round) / count - float(mean @ mean))
        return Averaged(round, count, mean.astype(np.float32), float(np.sqrt(spread)))
