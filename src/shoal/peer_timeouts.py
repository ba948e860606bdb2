"""How long a node waits for a neighbour that has timed out before.

Otherwise a neighbour that is stopped, or slower than the timeout, would cost a node the whole timeout in every round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.types import NodeId

FACTOR = 0.1
"""After each timeout, a node waits for the peer only for this fraction of the time that it waited before."""
MIN_FRACTION = 0.001
"""The smallest fraction of the first wait, where no receive has been complete yet."""


class PeerTimeouts:
    """The peers that timed out in a receive by round, and how long to wait for each of them in the next one.

    The wait shrinks to the longest time that a complete receive has taken. So a peer that has recovered is noticed, and
    so is the recovery of a node that was cut off from all its peers.
    """

    def __init__(self) -> None:
        self._usual = 0.0
        """Seconds that the longest complete receive took."""
        self._waits: dict[NodeId, tuple[float, float]] = {}
        """For each peer that timed out: seconds of the first wait, and of the next one."""

    def wait_for(self, peers: Collection[NodeId]) -> tuple[tuple[NodeId, ...], float]:
        """The peers among `peers` that timed out last time, and the longest time to wait for one of them."""
        slow = tuple(peer for peer in peers if peer in self._waits)
        return slow, max((self._waits[peer][1] for peer in slow), default=0.0)

    def timed_out(self, peers: Iterable[NodeId], waited: float) -> None:
        """No message came from `peers` in `waited` seconds, or in the time of `wait_for` if that was shorter."""
        for peer in peers:
            first, wait = self._waits.get(peer, (waited, waited))
            self._waits[peer] = first, max(FACTOR * wait, MIN_FRACTION * first, self._usual)

    def complete(self, waited: float) -> None:
        """Messages came from all peers, in `waited` seconds."""
        self._usual = max(self._usual, waited)

    def responded(self, peers: Iterable[NodeId]) -> None:
        """Messages came from `peers`, or they have rejoined: wait for them as for any other peer."""
        for peer in peers:
            self._waits.pop(peer, None)
