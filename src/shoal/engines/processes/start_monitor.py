"""Nodes that were started, and have not said yet that they listen."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from shoal.types import NodeId

LONGEST_LOOK = 0.25
"""Seconds between two looks that count, at the most: who looks seldom was kept from its work, and heard nobody."""


@dataclass
class _Start:
    """Nodes that were started together."""

    nodes: set[NodeId]
    waited: float = 0.0
    """Seconds since one of them, or of those before them, was last heard of."""


class Starts:
    """Those whom others may wait for to begin.

    Whoever was started with a node, or before it, and listens shows that the node may still have to wait for its turn.
    Those that were started later do not, or where nodes come and go nobody would ever be given up.
    """

    def __init__(self) -> None:
        self._starts: list[_Start] = []
        """The first that were started first."""
        self._looked = math.inf

    @property
    def nodes(self) -> set[NodeId]:
        return {node for start in self._starts for node in start.nodes}

    def expect(self, nodes: Collection[NodeId], now: float) -> None:
        self._starts.append(_Start(set(nodes)))
        self._looked = now

    def settle(self, node: NodeId) -> None:
        """It listens, or is dead."""
        for place, start in enumerate(self._starts):
            if node in start.nodes:
                start.nodes.discard(node)
                for later in self._starts[place:]:
                    later.waited = 0.0
        self._starts = [start for start in self._starts if start.nodes]

    def overdue(self, now: float, patience: float) -> set[NodeId]:
        """Those that were waited for in vain for so many seconds; each is named once in these."""
        seconds, self._looked = min(LONGEST_LOOK, max(0.0, now - self._looked)), now
        found: set[NodeId] = set()
        for start in self._starts:
            start.waited += seconds
            if start.waited > patience:
                start.waited = 0.0
                found |= start.nodes
        return found
