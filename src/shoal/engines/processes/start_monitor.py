"""How long nodes that were started have not reported that they listen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.engines.processes.watch_clock import WatchClock
from shoal.types import NodeId


@dataclass
class _Batch:
    """Nodes that were started together."""

    nodes: set[NodeId]
    since: float
    """When a node of this batch, or of an earlier one, last settled."""


class StartMonitor:
    """The nodes that are starting, in the order in which they were started.

    A node that listens shows that nodes started with it, or after it, may still be waiting for their turn. It
    shows nothing about nodes started before it: otherwise, where nodes crash and restart, no node would ever be
    overdue.
    """

    def __init__(self, clock: WatchClock) -> None:
        self._clock = clock
        self._batches: list[_Batch] = []
        """The oldest first."""

    @property
    def nodes(self) -> set[NodeId]:
        return {node for batch in self._batches for node in batch.nodes}

    def expect(self, nodes: Collection[NodeId]) -> None:
        self._batches.append(_Batch(set(nodes), self._clock.seconds))

    def settle(self, node: NodeId) -> None:
        """The node listens, or its process has exited."""
        for place, batch in enumerate(self._batches):
            if node in batch.nodes:
                batch.nodes.discard(node)
                for later in self._batches[place:]:
                    later.since = self._clock.seconds
        self._batches = [batch for batch in self._batches if batch.nodes]

    def overdue(self, timeout: float) -> set[NodeId]:
        """The nodes that did not settle for `timeout` seconds. A node is returned once in `timeout` seconds."""
        found: set[NodeId] = set()
        for batch in self._batches:
            if self._clock.seconds - batch.since > timeout:
                batch.since = self._clock.seconds
                found |= batch.nodes
        return found
