"""Receiving from peers that may time out, and knowing in the next rounds which of them did."""

from __future__ import annotations

from shoal.message import Payload
from shoal.node import MODEL, Check, Node
from shoal.topologies.graph import Peers
from shoal.types import NodeId


class PeerMonitor:
    """Receives from peers round by round. The node waits less for peers that timed out: see `shoal.peer_timeouts`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._timed_out: set[NodeId] = set(node.algorithm_state.get("missed", []))

    @property
    def timed_out(self) -> frozenset[NodeId]:
        """The peers whose last expected message did not arrive, although they are not known to have failed."""
        return frozenset(self._timed_out)

    async def receive(
        self, peers: Peers, *, round: int, kind: str = MODEL, check: Check | None = None
    ) -> dict[NodeId, Payload]:
        """Receive as `Node.receive_each` does, in ascending order of sender."""
        node = self._node
        received = await node.receive_each(peers, round=round, kind=kind, check=check)
        self._timed_out.difference_update(peers.weights)
        self._timed_out |= node.timed_out_peers
        node.algorithm_state["missed"] = sorted(self._timed_out)
        return dict(received)
