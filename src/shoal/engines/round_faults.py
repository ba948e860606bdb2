"""The faults of a node that are scheduled by round."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shoal.environment.faults import Fault


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
