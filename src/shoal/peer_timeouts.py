"""How long a node waits for a peer that has timed out before.

Otherwise a peer that is stopped, or slower than the timeout, would cost a node the whole timeout in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass

from shoal.state import State
from shoal.types import NodeId

FACTOR = 0.1
"""After each timeout, a node waits for the peer only for this fraction of the time that it waited before."""
MIN_FRACTION = 0.001
"""The smallest fraction of the first wait."""
USUAL_FACTOR = 0.5
"""After each timeout but the first, a node waits at least for this fraction of the usual time that it used before."""


@dataclass
class _SlowPeer:
    """A peer that timed out in the last receive."""

    first_wait: float
    wait: float
    """Seconds to wait for it in the next receive."""
    usual: float
    """A lower bound of the wait, from the usual time of a complete receive."""
    late_messages: int
    """How many late messages it had sent when the node last waited for the whole timeout."""
    late_needed: int = 1
    """After so many more late messages the node waits for the whole timeout again."""
    retried: bool = True
    """Whether the node waited for the whole timeout in the last receive."""


class PeerTimeouts:
    """The peers that timed out in a receive by round, and how long to wait for each of them in the next one.

    With t the first wait and u the usual time of a complete receive, the waits after the timeouts 1, 2, 3, … are
    max(t/10, u), max(t/100, u/2), max(t/1000, u/4), max(t/1000, u/8), … So a peer that sends nothing costs at most
    1.111 t + 2u, and t/1000 per receive. The bound u lets a peer respond that has lost one message. It shrinks too: if
    nodes that wait for such a peer delay others, their complete receives are long as well.

    A peer whose messages arrive late is alive and may catch up: the node waits for the whole timeout again after 1 late
    message, then after 2 more, 4 more and so on. So a peer that has recovered is awaited until it has caught up, and a
    peer that is always too slow costs the timeout less and less often.
    """

    def __init__(self, late_messages: Callable[[NodeId], int]) -> None:
        """`late_messages` is the number of late messages from a peer so far."""
        self._late_messages = late_messages
        self._slow: dict[NodeId, _SlowPeer] = {}
        self._usual = 0.0
        """The usual seconds of a complete receive."""

    def state(self) -> State:
        return {"usual": self._usual, "slow": [[peer, *astuple(known)] for peer, known in self._slow.items()]}

    def restore(self, state: State) -> None:
        self._usual = state["usual"]
        self._slow = {peer: _SlowPeer(*known) for peer, *known in state["slow"]}

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
                usual = min(self._usual, waited) / USUAL_FACTOR
                self._slow[peer] = known = _SlowPeer(waited, waited, usual, self._late_messages(peer))
            elif known.retried:
                known.late_messages, known.late_needed = self._late_messages(peer), 2 * known.late_needed
            known.usual *= USUAL_FACTOR
            known.wait = max(FACTOR * known.wait, MIN_FRACTION * known.first_wait, known.usual)

    def complete(self, waited: float) -> None:
        """Messages came from all peers, in `waited` seconds."""
        self._usual = max(waited, (self._usual + waited) / 2)

    def responded(self, peers: Iterable[NodeId]) -> None:
        """Messages came from `peers` in time, or they have rejoined: wait for them as for any other peer."""
        if self._slow:
            for peer in peers:
                self._slow.pop(peer, None)
