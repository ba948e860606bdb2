"""How long a node waits for a neighbour that has timed out before.

Otherwise a neighbour that is stopped, or slower than the timeout, would cost a node the whole timeout in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shoal.types import NodeId

FACTOR = 0.1
"""After each timeout, a node waits for the peer only for this fraction of the time that it waited before."""
MIN_FRACTION = 0.001
"""The smallest fraction of the first wait, where no receive has been complete yet."""


@dataclass
class _SlowPeer:
    """A peer that timed out in the last receive."""

    first_wait: float
    wait: float
    """Seconds to wait for it in the next receive."""
    late_messages: int
    """How many late messages it had sent when the node last waited for the whole timeout."""
    late_needed: int = 1
    """After so many more late messages the node waits for the whole timeout again."""
    retried: bool = True
    """Whether the node waited for the whole timeout in the last receive."""


class PeerTimeouts:
    """The peers that timed out in a receive by round, and how long to wait for each of them in the next one.

    The wait shrinks to the longest time that a complete receive has taken. A peer that sends nothing costs little more
    than one timeout. A peer whose messages arrive late is alive and may catch up: the node waits for the whole timeout
    again after 1 late message, then after 2 more, 4 more and so on. So a peer that has recovered is awaited until it
    has caught up, and a peer that is always too slow costs the timeout less and less often.
    """

    def __init__(self, late_messages: Callable[[NodeId], int]) -> None:
        """`late_messages` is the number of late messages from a peer so far."""
        self._late_messages = late_messages
        self._slow: dict[NodeId, _SlowPeer] = {}
        self._usual = 0.0
        """Seconds that the longest complete receive took."""

    def wait_for(self, peers: Collection[NodeId]) -> tuple[tuple[NodeId, ...], float]:
        """The peers among `peers` to wait for less than the whole timeout, and the longest of their waits."""
        if not self._slow:
            return (), 0.0
        for peer in peers:
            if (known := self._slow.get(peer)) is not None:
                known.retried = self._late_messages(peer) - known.late_messages >= known.late_needed
        slow = tuple(peer for peer in peers if peer in self._slow and not self._slow[peer].retried)
        return slow, max((self._slow[peer].wait for peer in slow), default=0.0)

    def timed_out(self, peers: Iterable[NodeId], waited: float) -> None:
        """No message came from `peers` in `waited` seconds, or in the time of `wait_for` if that was shorter."""
        for peer in peers:
            if (known := self._slow.get(peer)) is None:
                self._slow[peer] = known = _SlowPeer(waited, waited, self._late_messages(peer))
            elif known.retried:
                known.late_messages, known.late_needed = self._late_messages(peer), 2 * known.late_needed
            known.wait = max(FACTOR * known.wait, MIN_FRACTION * known.first_wait, self._usual)

    def complete(self, waited: float) -> None:
        """Messages came from all peers, in `waited` seconds."""
        self._usual = max(self._usual, waited)

    def responded(self, peers: Iterable[NodeId]) -> None:
        """Messages came from `peers` in time, or they have rejoined: wait for them as for any other peer."""
        if self._slow:
            for peer in peers:
                self._slow.pop(peer, None)
