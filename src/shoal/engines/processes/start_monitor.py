"""How long nodes that were started have not reported that they listen."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from shoal.types import NodeId

MAX_CHECK_INTERVAL = 0.25
"""Seconds between two checks that count at most. A coordinator that checks less often was kept from its work, and has
not read the nodes' messages."""


@dataclass
class _Batch:
    """Nodes that were started together."""

    nodes: set[NodeId]
    waited: float = 0.0
    """Seconds since a node of this batch, or of an earlier one, last settled."""


class StartMonitor:
    """The nodes that are starting, in the order in which they were started.

    A node that listens shows that nodes started with it, or after it, may still be waiting for their turn. It
    shows nothing about nodes started before it: otherwise, where nodes crash and restart, no node would ever be
    overdue.
    """

    def __init__(self) -> None:
        self._batches: list[_Batch] = []
        """The oldest first."""
        self._checked = math.inf

    @property
    def nodes(self) -> set[NodeId]:
        return {node for batch in self._batches for node in batch.nodes}

    def expect(self, nodes: Collection[NodeId], now: float) -> None:
        self._batches.append(_Batch(set(nodes)))
        self._checked = now

    def settle(self, node: NodeId) -> None:
        """The node listens, or its process has exited."""
        for place, batch in enumerate(self._batches):
            if node in batch.nodes:
                batch.nodes.discard(node)
                for later in self._batches[place:]:
                    later.waited = 0.0
        self._batches = [batch for batch in self._batches if batch.nodes]

    def overdue(self, now: float, timeout: float) -> set[NodeId]:
        """The nodes that did not settle for `timeout` seconds. A node is returned once in `timeout` seconds."""
        seconds, self._checked = min(MAX_CHECK_INTERVAL, max(0.0, now - self._checked)), now
        found: set[NodeId] = set()
        for batch in self._batches:
            batch.waited += seconds
            if batch.waited > timeout:
                batch.waited = 0.0
                found |= batch.nodes
        return found
