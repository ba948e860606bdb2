"""D-PSGD with and without records of what nodes do and to which nodes they send. Plug-ins for `recording.py`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.algorithms.dpsgd import DPSGD
from shoal.node import Node
from shoal.node_activity import NodeActivity
from shoal.results.spans import Span
from shoal.types import NodeId


class _NoReceivers(set[NodeId]):
    def add(self, node: NodeId) -> None:
        """Nothing is kept."""


class _NoActivity(NodeActivity):
    def __init__(self) -> None:
        super().__init__()
        self.receivers = _NoReceivers()

    def add(self, activity: str, start: float, end: float) -> None:
        """Nothing is kept."""

    def take(self) -> tuple[list[NodeId] | None, list[Span]]:
        return None, []


@dataclass(frozen=True)
class Recorded(DPSGD):
    """D-PSGD with all records. It is a plug-in as `Unrecorded` is, so that both cost the same otherwise."""


@dataclass(frozen=True)
class Unrecorded(DPSGD):
    """D-PSGD without records of activity."""

    async def run(self, node: Node) -> None:
        node.runtime.activity = _NoActivity()  # type: ignore[misc]
        await super().run(node)
