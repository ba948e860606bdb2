"""Collective restarts, for algorithms whose sums over all nodes would stay wrong after the loss of a node."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.algorithms.support.peer_monitor import PeerMonitor
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import MODEL, Check, Node
from shoal.sharing.sharing import Outgoing, payload_for
from shoal.topologies.graph import Peers
from shoal.types import NodeId

EPOCH = "epoch"
EXCLUDED = -1
"""The epoch sent to a peer that timed out: neither node then mixes the sums of the other."""
EPOCH_LIMIT = 2**53


class RestartEpochs:
    """The number of collective restarts that a node knows of, and the peers that agree on it.

    A node enters the next epoch, and restarts its sums, when a training node fails and when a peer times out or is
    received again. It enters a later epoch when it receives one. Only nodes of the same epoch mix their sums. Each pair
    does so in both directions or in none; otherwise one of the two enters the next epoch. The weights of peers that are
    not mixed stay with the node. So as soon as all nodes have received the latest epoch, their sums are exactly those
    of a fresh start.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._monitor = PeerMonitor(node)
        self._epoch: int
        self._failed_count: int
        self._next_epoch: int
        self._epoch, self._failed_count, self._next_epoch = node.algorithm_state.get("epoch", [0, 0, 0])
        self._failed: frozenset[NodeId] = frozenset()
        self._mixing_peers: frozenset[NodeId] = frozenset()

    def restart_needed(self) -> bool:
        """Enter the next epoch if there is one. Returns True if the node has to restart its sums.

        Call it once per round, before sending.
        """
        node = self._node
        self._failed = frozenset(node.failed_peers).intersection(range(node.nodes))
        before = self._epoch
        self._epoch = max(self._next_epoch, self._epoch + (len(self._failed) > self._failed_count))
        self._next_epoch, self._failed_count = self._epoch, len(self._failed)
        self._save()
        return self._epoch > before

    def tag(self, outgoing: Outgoing) -> Outgoing:
        """Add the epoch to what is sent to peers. Epoch 0 is not sent."""
        timed_out = self._monitor.timed_out
        if not self._epoch and not timed_out:
            return outgoing

        def tagged(peer: NodeId) -> Payload:
            epoch = EXCLUDED if peer in timed_out else self._epoch
            return payload_for(outgoing, peer).with_field(EPOCH, epoch)

        return tagged if timed_out or not isinstance(outgoing, Payload) else tagged(self._node.id)

    async def receive(
        self, peers: Peers, *, round: int, kind: str = MODEL, check: Check | None = None
    ) -> dict[NodeId, Payload]:
        """Receive payloads of any epoch. Call it once per round, after sending."""
        timed_out = self._monitor.timed_out
        received = await self._monitor.receive(peers, round=round, kind=kind, check=check)
        # A failed peer may have sent its last payload just before it failed.
        self._mixing_peers = frozenset(received) - timed_out - self._failed
        latest = max((epoch_of(payload) for payload in received.values()), default=self._epoch)
        self._next_epoch = max(latest, self._epoch + (self._monitor.timed_out != timed_out))
        self._save()
        return received

    def same_epoch(self, received: Mapping[NodeId, Payload]) -> dict[NodeId, Payload]:
        """Select the payloads of this node's epoch, from peers that also mix the sums of this node."""
        return {
            peer: payload
            for peer, payload in received.items()
            if peer in self._mixing_peers and epoch_of(payload) == self._epoch
        }

    def _save(self) -> None:
        self._node.algorithm_state["epoch"] = [self._epoch, self._failed_count, self._next_epoch]


def epoch_of(payload: Payload) -> int:
    """Return the epoch of a payload. Raises `MessageError`."""
    epoch = payload.fields.get(EPOCH, 0)
    if type(epoch) is not int or not EXCLUDED <= epoch < EPOCH_LIMIT:
        raise MessageError(f"epoch = {epoch!r}: expected an integer from {EXCLUDED} to 2^53 - 1")
    return epoch
