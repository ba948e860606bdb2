"""A partition: which training samples each node has."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from shoal import Bounds, Traits
from shoal.errors import DataError


@dataclass(frozen=True)
class PluginName:
    """Samples sorted by class and cut into one block per node; then a share `mixed` of them changes places."""

    mixed: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.2

    traits: ClassVar[Traits] = Traits(splits_by_class=True)  # the data set must have classes

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        # Every process splits the data itself: the result must depend on the arguments only. Every sample has one
        # node, and every node has at least one sample.
        if len(labels) < nodes:
            raise DataError(f"{len(labels)} samples for {nodes} nodes: use fewer nodes, or a larger data set")
        owner = np.empty(len(labels), np.int64)
        owner[np.argsort(labels, kind="stable")] = np.arange(len(labels)) * nodes // len(labels)
        moved = rng.permutation(len(labels))[: round(self.mixed * len(labels))]
        owner[moved] = owner[rng.permutation(moved)]
        return [np.flatnonzero(owner == node) for node in range(nodes)]
