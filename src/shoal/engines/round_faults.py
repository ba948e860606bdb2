"""The faults and the joins of nodes that are scheduled by round."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from shoal.environment.faults import Fault
from shoal.types import NodeId


class RoundFaults:
    """The faults of one node that happen at the start of a round. Each of them happens once.

    A restarted node has none: the fault that ended its predecessor would happen again in its first round.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        """`faults` are in the order of rounds."""
        self._faults = deque(faults)

    def due(self, round: int) -> Fault | None:
        """Remove and return the next fault, if it happens to a node that starts `round`."""
        if self._faults and self._faults[0].happens_at(round):
            return self._faults.popleft()
        return None


class RoundJoins:
    """The late nodes that join when the others start a given round. Each of them joins once."""

    def __init__(self, rounds: Mapping[NodeId, int], not_joined: Collection[NodeId]) -> None:
        """`rounds` are the rounds of all such nodes. Those that have joined before a checkpoint do not join again."""
        self._rounds = {node: round for node, round in rounds.items() if node in not_joined}

    def due(self, round: int) -> list[NodeId]:
        """Remove and return the nodes that join when a node starts `round`."""
        if not self._rounds:
            return []
        nodes = sorted(node for node, first in self._rounds.items() if first <= round)
        for node in nodes:
            del self._rounds[node]
        return nodes
