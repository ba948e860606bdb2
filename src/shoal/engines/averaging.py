"""The average of all nodes' models and their distance from it, computed from models that arrive one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.types import NodeId, Params


@dataclass(frozen=True)
class ModelAverage:
    """The average of the models of one round."""

    round: int
    nodes: int
    mean: Params
    consensus_distance: float
    """The root mean square of the nodes' Euclidean distances to the mean."""


class ModelAverages:
    """Sums of models in double precision. Memory: one model per incomplete round."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}
        self._squares: dict[int, float] = {}
        self._nodes: dict[int, set[NodeId]] = {}

    def add(self, node: NodeId, round: int, params: Params) -> None:
        double = params.astype(np.float64)
        if round in self._sums:
            self._sums[round] += double
        else:
            self._sums[round] = double.copy()
            self._squares[round] = 0.0
            self._nodes[round] = set()
        self._squares[round] += float(double @ double)
        self._nodes[round].add(node)

    def complete(self, awaited: set[NodeId]) -> Iterator[ModelAverage]:
        """Remove and return, in order, the rounds that have a model of every node in `awaited`."""
        for round in sorted(r for r, n in self._nodes.items() if len(awaited) <= len(n) and awaited <= n):
            yield self._take(round)

    def _take(self, round: int) -> ModelAverage:
        count = len(self._nodes.pop(round))
        mean = self._sums.pop(round) / count
        variance = max(0.0, self._squares.pop(round) / count - float(mean @ mean))
        return ModelAverage(round, count, mean.astype(np.float32), float(np.sqrt(variance)))
