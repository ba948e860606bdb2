"""One node's part in averaging a model by partitions: updates to holders, partial averages between them, results back.

A node sends an update, even an empty one, to every peer that is not known to have failed. So the first exchange ends
when every peer has sent its update or has failed, whatever roles each node assumes. An update lists the nodes that its
sender takes to be absent, and roles follow from that set. In the second and third exchange a node therefore knows the
roles that each peer follows, even if they differ from its own, and waits for no message that will not be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import numpy as np

from shoal.algorithms.support.partition_messages import Partitioning, Update, WeightedSlices, average
from shoal.algorithms.support.partition_roles import PartitionRoles, assign_roles
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.types import NodeId, Params

UPDATE, PARTIAL, RESULT = "ipls-update", "ipls-partial", "ipls-result"
RETRY_ROUNDS = frozenset(2**k for k in range(2, 32))
"""After this many missed rounds, a node waits for a peer once more: it may run again and be only a little late."""

Decoded = TypeVar("Decoded")


class PartitionExchange:
    """The three exchanges of a round. `deadline` is the timeout of each in seconds; None is that of the engine."""

    def __init__(self, node: Node, *, partitions: int, per_node: int, weighted: bool, deadline: float | None) -> None:
        self._node = node
        self._partitioning = Partitioning(node.params.size, partitions, node.nodes)
        self._per_node = per_node
        self._weighted = weighted
        self._deadline = deadline
        self._missed: dict[NodeId, int] = dict(node.algorithm_state.get("missed", []))
        """The peers whose last update did not arrive, though they did not fail: the number of such rounds in a row."""
        self._sent: dict[NodeId, list[int]] = {}
        """The partitions sent to each peer in this round, this node included."""

    async def exchange_updates(self, trained: Params, r: int) -> dict[NodeId, Update]:
        """Send each slice to a holder of its partition. Returns the updates received, and this node's own."""
        node, me = self._node, self._node.id
        failed = frozenset(node.failed_peers)
        others = [peer for peer in range(node.nodes) if peer != me and peer not in failed]
        absent = failed.intersection(range(node.nodes)).union(self._missed)
        self._sent = self._roles(absent).receivers(me)
        if node.rejects_non_finite and not np.isfinite(trained).all():  # the others would reject it
            node.record_event(
                "values not finite", f"round {r}: the trained model has values that are not finite; not sent"
            )
            self._sent = {}

        def update_for(partitions: Collection[int]) -> Update:
            weight = node.samples if self._weighted else 1
            return Update(absent, weight, self._partitioning.slices(trained, partitions))

        for partitions, peers in _group_receivers({peer: self._sent.get(peer, ()) for peer in others}).items():
            payload = self._partitioning.encode_update(update_for(partitions), with_samples=self._weighted)
            await node.send(peers, payload, round=r, kind=UPDATE)
        updates = {me: update_for(self._sent.get(me, ()))}
        await self._receive_updates(updates, others, r)
        self._missed = {peer: self._missed.get(peer, 0) + 1 for peer in others if peer not in updates}
        node.algorithm_state["missed"] = [[peer, rounds] for peer, rounds in self._missed.items()]
        return updates

    async def _receive_updates(self, updates: dict[NodeId, Update], others: list[NodeId], r: int) -> None:
        """Add the updates of `others`. Absent peers are waited for only if they are due for a retry or another peer
        takes them to be present; else their update counts if it is there already."""
        node = self._node
        absent = updates[node.id].absent

        async def wait_for(peers: Collection[NodeId]) -> None:
            received = await node.receive_each(peers, round=r, kind=UPDATE, timeout=self._deadline)
            updates.update(self._decode(received, self._decode_update))

        await wait_for(set(others) - absent)
        if late := absent.intersection(others):
            views = [update.absent for peer, update in updates.items() if peer != node.id]
            expected = {p for p in late if self._missed[p] in RETRY_ROUNDS or any(p not in view for view in views)}
            await wait_for(expected)
            for peer in sorted(late - expected):
                message = await node.receive(kind=UPDATE, round=r, sender=peer, timeout=0.0)
                if message is not None:
                    updates.update(self._decode({peer: message.payload}, self._decode_update))

    async def exchange_partials(self, updates: Mapping[NodeId, Update], r: int) -> WeightedSlices:
        """Average the slices received, and exchange the averages with the other holders of the same partitions."""
        node, me = self._node, self._node.id
        own = average({p: WeightedSlices(u.slices, dict.fromkeys(u.slices, u.weight)) for p, u in updates.items()})
        for peer, shared in self._roles(updates[me].absent).replicas(me).items():
            if self._expects_this_node(peer, updates):
                await node.send([peer], own.payload(shared), round=r, kind=PARTIAL)

        expected = self._expected(updates, lambda roles: roles.replicas(me))
        return average({**await self._receive_weighted(expected, PARTIAL, r), me: own})

    async def exchange_results(
        self, trained: Params, updates: Mapping[NodeId, Update], averages: WeightedSlices, r: int
    ) -> Params:
        """Send the averages to the senders of the slices. Returns the new model: `trained` with all averages in it."""
        node, me = self._node, self._node.id
        to_send = self._roles(updates[me].absent).senders(me)
        for peer, update in updates.items():  # a peer with other roles may have sent slices too
            to_send[peer] = sorted({*to_send.get(peer, ()), *update.slices})
        del to_send[me]
        due = {peer: ps for peer, ps in to_send.items() if ps and self._expects_this_node(peer, updates)}
        for partitions, peers in _group_receivers(due).items():
            await node.send(peers, averages.payload(partitions), round=r, kind=RESULT)

        expected = self._expected(updates, lambda roles: roles.receivers(me))
        for holder, sent in self._sent.items():
            if holder != me and holder in updates and self._expects_this_node(holder, updates):
                expected[holder] = sorted({*expected.get(holder, ()), *sent})
        results = await self._receive_weighted(expected, RESULT, r)
        return self._assemble(trained, {**results, me: averages}, updates[me].absent, r)

    def _assemble(
        self, trained: Params, results: Mapping[NodeId, WeightedSlices], absent: frozenset[NodeId], r: int
    ) -> Params:
        """Put the results in place of the trained slices.

        While roles differ between nodes, several results may arrive for a partition: the one with the largest weight
        counts; of equal weights, that of the holder this node sent its slice to.
        """
        holders = self._roles(absent).destinations[self._node.id].tolist()
        best: dict[int, tuple[float, bool]] = {}
        model = trained.copy()
        for peer, each in sorted(results.items()):
            for p, values in each.slices.items():
                rank = (each.weights[p], peer == holders[p])
                if rank > best.get(p, (0.0, False)):
                    best[p] = rank
                    self._partitioning.slice(model, p)[:] = values
        if missing := [str(p) for p in range(len(holders)) if p not in best]:
            self._node.record_event(
                "partitions not averaged", f"round {r}: no result for partitions {', '.join(missing)}"
            )
        return model

    def _roles(self, absent: frozenset[NodeId]) -> PartitionRoles:
        return assign_roles(self._node.nodes, self._partitioning.count, self._per_node, absent)

    def _expects_this_node(self, peer: NodeId, updates: Mapping[NodeId, Update]) -> bool:
        """Whether `peer` takes this node to be present. A peer without an update in this round is assumed to."""
        return peer not in updates or self._node.id not in updates[peer].absent

    def _expected(
        self, updates: Mapping[NodeId, Update], duties: Callable[[PartitionRoles], dict[NodeId, list[int]]]
    ) -> dict[NodeId, list[int]]:
        """Return the partitions that each peer will send to this node, by the roles that the peer follows."""
        me = self._node.id
        by_view = {absent: duties(self._roles(absent)) for absent in {update.absent for update in updates.values()}}
        return {
            peer: by_view[update.absent][peer]
            for peer, update in updates.items()
            if peer != me and peer not in updates[me].absent and peer in by_view[update.absent]
        }

    async def _receive_weighted(
        self, expected: Mapping[NodeId, Collection[int]], kind: str, r: int
    ) -> dict[NodeId, WeightedSlices]:
        received = await self._node.receive_each(expected, round=r, kind=kind, timeout=self._deadline)
        return self._decode(received, lambda peer, payload: self._partitioning.decode_weighted(payload, expected[peer]))

    def _decode(
        self, received: Mapping[NodeId, Payload], decode: Callable[[NodeId, Payload], Decoded]
    ) -> dict[NodeId, Decoded]:
        """Decode payloads; invalid payloads are rejected and left out."""
        decoded: dict[NodeId, Decoded] = {}
        for peer, payload in received.items():
            try:
                decoded[peer] = decode(peer, payload)
            except MessageError as error:
                self._node.reject(peer, str(error))
        return decoded

    def _decode_update(self, peer: NodeId, payload: Payload) -> Update:
        weight = self._partitioning.decode_weight(payload) if self._weighted else 1
        absent = self._partitioning.decode_absent(payload)
        if peer in absent:
            raise MessageError("the sender lists itself as absent")
        expected = np.flatnonzero(self._roles(absent).destinations[peer] == self._node.id).tolist()
        return Update(absent, weight, self._partitioning.decode_slices(payload, expected))


def _group_receivers(partitions_of: Mapping[NodeId, Collection[int]]) -> dict[tuple[int, ...], list[NodeId]]:
    """Group peers that are sent the same partitions, so that each payload is encoded once."""
    groups: dict[tuple[int, ...], list[NodeId]] = {}
    for peer, partitions in sorted(partitions_of.items()):
        groups.setdefault(tuple(partitions), []).append(peer)
    return groups
