"""For algorithms that must know who takes part: whom they hear, and since when all of them start from the same."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import MODEL, Check, Node
from shoal.sharing.sharing import Outgoing
from shoal.topologies.graph import Peers
from shoal.types import NodeId

EPOCH = "epoch"
APART = -1
"""The epoch that is said to a peer which this node does not hear: neither mixes what it has of the other."""
LATEST = 2**53
"""No epoch is as late."""

SHORTER = 0.25
"""Of the patience with others: how long to wait for a peer that kept silent before."""
MOMENT = 1.0
"""The same in seconds, where only the engine knows its patience."""


class PeerMonitor:
    """Hears peers round by round, and does not wait in every one of them for those that kept silent before.

    After k rounds of silence a peer is waited for with probability 1/(k + 1), and for a part of the node's patience
    only, so that others who wait for this node do not take it to be silent in its turn. In other rounds a peer is heard
    if it was early. So one that hangs costs its neighbours less and less time, and one that was only late counts again
    soon.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._missed: dict[NodeId, int] = dict(node.memory.get("missed", []))

    @property
    def silent(self) -> frozenset[NodeId]:
        """Those not heard when they last should have been, though nobody knows them to be dead."""
        return frozenset(self._missed)

    async def hear(
        self, peers: Peers, *, round: int, kind: str = MODEL, check: Check | None = None
    ) -> dict[NodeId, Payload]:
        """As `Node.receive_each`, in ascending order of sender."""
        node, missed = self._node, self._missed
        usual = [peer for peer in peers.weights if peer not in missed]
        again = [peer for peer in peers.weights if peer in missed and self._waits_again(peer)]
        received = dict(await node.receive_each(usual, round=round, kind=kind, check=check))
        silent = set(node.timed_out_peers)
        if again:
            patience = SHORTER * node.receive_timeout if node.receive_timeout else MOMENT
            received |= await node.receive_each(again, round=round, kind=kind, check=check, timeout=patience)
            silent |= node.timed_out_peers
        for peer in peers.weights.keys() - {*usual, *again}:
            message = await node.receive(kind=kind, round=round, sender=peer, timeout=0.0, check=check)
            if message is None:
                silent.add(peer)
            else:
                received[peer] = message.payload
        for peer in peers.weights:
            if peer in silent and peer not in node.failed_peers:
                missed[peer] = missed.get(peer, 0) + 1
            else:
                missed.pop(peer, None)
        node.memory["missed"] = [[peer, rounds] for peer, rounds in sorted(missed.items())]
        return dict(sorted(received.items()))

    def _waits_again(self, peer: NodeId) -> bool:
        return bool(self._node.rng("patience").random() * (1 + self._missed[peer]) < 1)


class Epochs:
    """Which nodes started anew together: for algorithms whose sums over all nodes a loss would spoil for ever.

    A node enters another epoch, and has to start anew, when a learner dies, when a peer falls silent or speaks again,
    and when it hears of a later epoch than its own. Only nodes of the same epoch mix their sums: each pair does so in
    both directions or in none, or else one of the two enters the next epoch. Weights of peers that are not mixed stay
    with the node. So as soon as all have heard of the latest epoch, their sums are those of a fresh start, exactly.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._listener = PeerMonitor(node)
        self.now: int
        self._dead: int
        self.now, self._dead = node.memory.get("epoch", [0, 0])
        self._next = self.now
        self._gone: frozenset[NodeId] = frozenset()
        self._partners: frozenset[NodeId] = frozenset()

    def begins(self) -> bool:
        """At the start of a round: whether the node has to start anew."""
        node = self._node
        self._gone = frozenset(node.failed_peers).intersection(range(node.nodes))
        before, self.now = self.now, max(self._next, self.now + (len(self._gone) > self._dead))
        self._next, self._dead = self.now, len(self._gone)
        node.memory["epoch"] = [self.now, self._dead]
        return self.now > before

    def stamped(self, outgoing: Outgoing) -> Outgoing:
        """What is said to peers, with the epoch that it is of. The first is not said."""
        silent = self._listener.silent
        if not self.now and not silent:
            return outgoing

        def stamped(peer: NodeId) -> Payload:
            said = outgoing if isinstance(outgoing, Payload) else outgoing(peer)
            return Payload(said.arrays, {**said.fields, EPOCH: APART if peer in silent else self.now})

        return stamped if silent or not isinstance(outgoing, Payload) else stamped(self._node.id)

    async def hear(
        self, peers: Peers, *, round: int, kind: str = MODEL, check: Check | None = None
    ) -> dict[NodeId, Payload]:
        """What came, of any epoch. Call it once in a round, after sending."""
        silent = self._listener.silent
        received = await self._listener.hear(peers, round=round, kind=kind, check=check)
        self._partners = frozenset(received) - silent - self._gone  # the dead may have said their last just before
        latest = max((epoch_of(said) for said in received.values()), default=self.now)
        self._next = max(latest, self.now + (self._listener.silent != silent))
        return received

    def alike(self, received: Mapping[NodeId, Payload]) -> dict[NodeId, Payload]:
        """Of what came: what is of this node's epoch, from peers that mix this node's in return."""
        return {peer: said for peer, said in received.items() if peer in self._partners and epoch_of(said) == self.now}


def epoch_of(payload: Payload) -> int:
    epoch = payload.fields.get(EPOCH, 0)
    if type(epoch) is not int or not APART <= epoch < LATEST:
        raise MessageError(f"epoch = {epoch!r}: expected how often nodes started anew")
    return epoch
