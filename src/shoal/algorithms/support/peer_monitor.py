"""Receiving from peers that may time out, without waiting for the same peers in every round."""

from __future__ import annotations

from shoal.message import Payload
from shoal.node import MODEL, Check, Node
from shoal.topologies.graph import Peers
from shoal.types import NodeId

RETRY_TIMEOUT_SHARE = 0.25
"""The share of the node's timeout to wait for a peer that timed out before."""
DEFAULT_RETRY_TIMEOUT = 1.0
"""The same in seconds, if only the engine knows the timeout."""


class PeerMonitor:
    """Receives from peers round by round, and waits less often for peers that timed out.

    After k missed rounds in a row, the node waits for a peer with probability 1/(k + 1), and for a share of its timeout
    only, so that its own peers do not time out while they wait for it. In the other rounds, a message of that peer
    counts if it is there already. So a peer that hangs costs its neighbours less and less time, and a peer that was
    only late soon counts again.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._missed: dict[NodeId, int] = dict(node.algorithm_state.get("missed", []))
        """The number of rounds in a row that each peer missed."""

    @property
    def timed_out(self) -> frozenset[NodeId]:
        """The peers whose last expected message did not arrive, although they are not known to have failed."""
        return frozenset(self._missed)

    async def receive(
        self, peers: Peers, *, round: int, kind: str = MODEL, check: Check | None = None
    ) -> dict[NodeId, Payload]:
        """Receive as `Node.receive_each` does, in ascending order of sender."""
        node, missed = self._node, self._missed
        reliable = [peer for peer in peers.weights if peer not in missed]
        retried = [peer for peer in peers.weights if peer in missed and self._retries(peer)]
        received = dict(await node.receive_each(reliable, round=round, kind=kind, check=check))
        timed_out = set(node.timed_out_peers)
        if retried:
            timeout = RETRY_TIMEOUT_SHARE * node.receive_timeout if node.receive_timeout else DEFAULT_RETRY_TIMEOUT
            received |= await node.receive_each(retried, round=round, kind=kind, check=check, timeout=timeout)
            timed_out |= node.timed_out_peers
        for peer in peers.weights.keys() - {*reliable, *retried}:
            message = await node.receive(kind=kind, round=round, sender=peer, timeout=0.0, check=check)
            if message is None:
                timed_out.add(peer)
            else:
                received[peer] = message.payload
        for peer in peers.weights:
            if peer in timed_out and peer not in node.failed_peers:
                missed[peer] = missed.get(peer, 0) + 1
            else:
                missed.pop(peer, None)
        node.algorithm_state["missed"] = [[peer, rounds] for peer, rounds in sorted(missed.items())]
        return dict(sorted(received.items()))

    def _retries(self, peer: NodeId) -> bool:
        return bool(self._node.rng("patience").random() * (1 + self._missed[peer]) < 1)
