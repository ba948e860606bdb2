"""Secure aggregation: a receiver gets the weighted sum of its neighbours' models in place of the models.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. Here every node of the
graph acts as the server, and its neighbours act as the clients.

In each round, each sender j of receiver i

1. weights its model with w_ij, which both know, and encodes it as integers, whose sums are exact;
2. for each mask partner k (another sender of i with which j shares a key), adds a pairwise mask if k > j and subtracts
   it if k < j, so that these masks cancel in the sum; and adds a self mask. The seeds of all masks are derived from the
   node's keys;
3. sends the masked update, a commitment to the seed of each mask, and, for each partner, encrypted Shamir shares of the
   seeds (key shares).

The receiver sends to each sender the list of senders whose updates have arrived. Each sender in the list reveals the
seed of its self mask, and the seeds of its pairwise masks with nodes whose updates have not arrived. If a sender has
failed after it sent its update, these seeds are reconstructed from the key shares that its partners hold. A node
reveals the seed of its self mask only if its update is in the sum together with those of enough partners; it reveals
the seed of a pairwise mask only if the partner's update is not in the sum. So late updates stay hidden, and so does the
update of a node without partners.

This protects against a honest-but-curious receiver that colludes with fewer of its senders than hold enough key shares
to recover a secret, and against invalid or forged updates. It does not protect against receivers that combine their
sums, nor against eavesdroppers, who obtain all sums: they can solve them for single models (see docs/privacy.md). So
links that other machines can read must be sealed. The masks of two senders cancel only if both use the same senders,
coordinates, encoding and, on a graph, weights. Assumption: a receiver sends the same list of senders to all senders. A
receiver that names a node to some senders but not to others obtains all seeds of that node. With sparse models, a
receiver requests coordinates, so its neighbours learn roughly where its own model has changed most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import Positions
from shoal.errors import MessageError, PrivacyError
from shoal.message import Payload
from shoal.node import Node, Received
from shoal.sharing.full import FullSharing
from shoal.sharing.secure.coordinates import CoordinateExchange
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.key_exchange import KeyExchange
from shoal.sharing.secure.messages import (
    COMMITMENTS,
    FINISHED,
    UNMASKED,
    VALUES,
    ProtocolRound,
    describe_content,
    mask_update,
)
from shoal.sharing.secure.requirements import incompatibilities
from shoal.sharing.secure.responder import UnmaskingResponder
from shoal.sharing.secure.sender_groups import SenderGroups
from shoal.sharing.secure.unmasking import Unmasking, UnmaskingError
from shoal.sharing.sharing import CoordinateSelector, NodeAware, NodeInfo, SenderGroup, Sharing
from shoal.state import State, Stateful
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, FormerOption, Nested, NodeId, Params

SUM, WEIGHT, POSITIONS = "sum", "weight", "positions"
DRAIN_TIMEOUTS = 5
"""At the end of its algorithm, a node waits up to this many receive timeouts for each receiver, because the receiver
itself may wait that many times: for a key, for coordinates, for updates, for seeds and for key shares. A slower
receiver gets no more answers, and its last sums stay masked."""


@dataclass
class Secure:
    """Bonawitz et al. 2017: each node gets the exact weighted sum of its neighbours' models in place of the models.

    Model values are encoded as fixed-point integers of `bits` bits and must be within ±`range`; a node whose model
    exceeds the range ends with an error. `inner` selects the coordinates: "full": all; "random": coordinates drawn from
    a seed; "topk": those with the largest estimated change, at the receiver and its neighbours, since the receiver last
    averaged them. This differs from top-k sharing without masks: a receiver gets the same `fraction` of the coordinates
    from all its neighbours, where without masks it gets from each neighbour the coordinates that have changed most
    there.

    Each sender of a receiver masks with up to `partners` others, and a fraction `threshold` of the key shares that they
    hold is enough to recover its secrets. Let s be the number of key shares that recover a secret. A sum is unmasked
    only if it contains at least the fraction `threshold` of the neighbours, and at least s + 1 senders. If fewer than s
    of them collude, at least two senders in the sum do not collude. Otherwise the receiver keeps its own model and
    records an event. In a static graph, an experiment in which a node has fewer than two neighbours is rejected. In a
    changing graph, such a node receives nothing in that round. With `single_sender` = "unmasked", the experiment is
    accepted and the node receives unmasked models.
    """

    traits: ClassVar[Traits] = Traits(interactive=True, needs_private_links=True)

    inner: Annotated[Sharing, Nested("sharing")] = field(default_factory=FullSharing)
    bits: Literal[32, 64] = 32
    range: Annotated[float, Bounds(at_least=2.0**-64, at_most=2.0**64)] = 64.0
    threshold: Annotated[float, Bounds(above=0, at_most=1)] = 0.75
    partners: Annotated[int, Bounds(at_least=2, at_most=64)] = 8
    single_sender: Annotated[
        Literal["reject", "unmasked"], FormerOption("few", (("refuse", "reject"), ("plain", "unmasked")))
    ] = "reject"

    def __post_init__(self) -> None:
        if self.partners % 2:
            raise ValueError(
                f"partners = {self.partners}: expected an even number: senders are ordered on a circle, and half of "
                "the partners are on each side"
            )
        self._codec = FixedPoint(self.bits, self.range)
        self.key_exchange = KeyExchange()
        """The node's keys, and the keys that it received."""
        self._sender_groups = SenderGroups()
        self.responder = UnmaskingResponder()
        """Answers the requests of this node's receivers."""
        self._coordinates: CoordinateExchange | None = None
        """Set if nodes do not all select the same coordinates."""
        self._node: Node | None = None
        self._params: Params = np.empty(0, np.float32)
        self._last_round: dict[NodeId, int] = {}
        """The last round in which this node sent to each receiver."""
        self._past_senders: set[NodeId] = set()
        """The senders of this node in earlier rounds, which may wait for its unmasking requests."""
        self._positions: dict[NodeId, Positions] = {}
        """In the current round: the coordinates to send to each receiver, and those that this node receives."""
        self._protocol_rounds: dict[NodeId, ProtocolRound] = {}
        """Cache for the current round, by receiver, because a large mask graph is slow to compute."""

    # The sharing

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        if isinstance(self.inner, NodeAware):
            self.inner.bind(info)

    def start(self, params: Params) -> None:
        self.inner.start(params)
        self._coordinate_count = (
            self.inner.select(params, 0).size if isinstance(self.inner, CoordinateSelector) else params.size
        )
        if isinstance(self.inner, CoordinateSelector) and not self.inner.common:
            self._coordinates = CoordinateExchange(params, self._coordinate_count)

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        if (value := self._codec.outside(params)) is not None:
            limit = "a finite number" if not np.isfinite(value) else f"within ±{self.range:g}"
            raise PrivacyError(
                f"node {self._info.id}, round {round}: a parameter is {value:g}, expected {limit}: it would corrupt "
                "the sum; set a larger sharing.range, or a smaller training.lr if the model diverges"
            )
        self._params = params
        return partial(self._update, params=params, round=round)

    def check(self, payload: Payload, params: Params) -> None:
        values = payload.arrays.get(VALUES)
        if values is None or values.dtype != self._codec.dtype or values.shape != (self._coordinate_count,):
            raise MessageError(f"expected an array {VALUES!r} of {self._coordinate_count} integers of {self.bits} bits")
        if (payload.fields.get(UNMASKED) is True) != (COMMITMENTS not in payload.arrays):
            raise MessageError(f"expected {COMMITMENTS!r}, or the field {UNMASKED!r} if the update is not masked")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = np.array(params)
        if not received:
            return merged
        peer, unmasked = next(iter(received.items()))
        # Renormalisation for missing senders multiplies all other weights by the same factor, so one sender is enough
        # to compute it.
        factor = weights[peer] / float(unmasked.fields[WEIGHT])
        positions = unmasked.arrays.get(POSITIONS, slice(None))
        own = params[positions] * np.float64(1.0 - sum(weights.values()))
        merged[positions] = own + factor * unmasked.arrays[SUM]
        if self._coordinates is not None:
            mean = unmasked.arrays[SUM] / sum(float(payload.fields[WEIGHT]) for payload in received.values())
            self._coordinates.chooser.update(merged, unmasked.arrays[POSITIONS], mean, len(received))
        return merged

    def state(self) -> State:
        """Return the state without keys: nodes that continue from a checkpoint agree on new ones."""
        return {name: part.state() for name, part in self._stateful_parts().items()}

    def restore(self, state: State) -> None:
        for name, part in self._stateful_parts().items():
            part.restore(state[name])

    def _stateful_parts(self) -> dict[str, Stateful]:
        chooser = None if self._coordinates is None else self._coordinates.chooser
        parts = {"inner": self.inner, "coordinates": chooser}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return incompatibilities(self.inner, self.single_sender, experiment)

    # Before the updates: keys and coordinates

    def set_sender_group(self, receiver: NodeId, round: int, group: SenderGroup) -> None:
        self._sender_groups.announce(receiver, round, group)

    async def before_send(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        self._node = node
        self._protocol_rounds = {}
        rounds = {receiver: self._protocol_round(node, receiver, round) for receiver in to}
        masked = [receiver for receiver, protocol_round in rounds.items() if protocol_round.masked]
        single = [receiver for receiver in to if receiver not in masked]
        if single:
            event = "sent unmasked" if self.single_sender == "unmasked" else "receiver skipped"
            node.record_event(event, f"round {round}: no other node sends to {', '.join(map(str, single))}")
        await self.key_exchange.run(node, {p for receiver in masked for p in rounds[receiver].partners[node.id]})
        allowed: Sequence[NodeId] = sorted({*masked, *(single if self.single_sender == "unmasked" else ())})
        return await self._agree_on_coordinates(node, allowed, round)

    def _protocol_round(self, node: Node, receiver: NodeId, round: int) -> ProtocolRound:
        known = self._protocol_rounds.get(receiver)
        if known is None or known.round != round:
            senders = self._sender_groups.of(node, receiver, round).senders
            known = ProtocolRound(receiver, round, senders, self.partners, self.threshold, node.seed)
            self._protocol_rounds[receiver] = known
        return known

    async def _agree_on_coordinates(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        """Return the receivers whose requested coordinates are known.

        All senders of a receiver must send the same coordinates.
        """
        if not isinstance(self.inner, CoordinateSelector):
            return to
        if self._coordinates is None:
            self._positions = dict.fromkeys(to, self.inner.select(self._params, round))
            return to
        senders = self._sender_groups.of(node, node.id, round).senders if self._may_receive(node, round) else ()
        self._positions = await self._coordinates.run(node, self._params, to, senders, round)
        return [receiver for receiver in self._positions if receiver != node.id]

    # The masked update

    def _update(self, receiver: NodeId, params: Params, round: int) -> Payload:
        node = self._node
        if node is None:
            # Before a run, Setup checks that the sharings of all nodes accept each other's payloads. No nodes exist at
            # that time. Raising this error makes the check fail if the sharings of the nodes differ.
            raise MessageError("masks cancel only if all nodes use secure aggregation with the same options")
        if self._last_round.get(receiver, -1) >= round:
            raise PrivacyError(
                f"node {node.id} would send to node {receiver} twice in round {round}: two updates under the same "
                "masks reveal their difference; an algorithm may send once per round"
            )
        self._last_round[receiver] = round
        protocol_round = self._protocol_round(node, receiver, round)
        positions = self._positions[receiver] if isinstance(self.inner, CoordinateSelector) else None
        group = self._sender_groups.of(node, receiver, round)
        encoded = self._codec.encode(params if positions is None else params[positions], group.weights[node.id])
        if not protocol_round.masked:
            if self.single_sender != "unmasked":
                raise PrivacyError(f"node {node.id} would send to node {receiver} unmasked in round {round}")
            return Payload({VALUES: encoded}, {UNMASKED: True})
        # A client of a server knows no weight but its own, so these weights are not part of the terms.
        weights = group.weights if len(group.weights) == len(group.senders) else {}
        protocol_round = replace(protocol_round, content=describe_content(self._codec, weights, positions))
        partners_with_key = self.key_exchange.with_key(node, protocol_round.partners[node.id])
        self.responder.remember(protocol_round, partners_with_key)
        return mask_update(encoded, node.id, protocol_round, self.key_exchange.keys(node), partners_with_key).payload()

    # After the updates: unmasking

    def expected_senders(self, node: Node, senders: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        if self._may_receive(node, round):
            return senders
        if senders:
            node.record_event(
                "receive skipped", f"round {round}: fewer than two nodes send to this node, so none may send"
            )
        return ()

    def _may_receive(self, node: Node, round: int) -> bool:
        return self.single_sender == "unmasked" or self._protocol_round(node, node.id, round).masked

    async def after_receive(self, node: Node, received: Received, round: int) -> Received:
        if self._coordinates is not None:
            for sender in received:
                self._coordinates.mark_responsive(sender)
        protocol_round = self._protocol_round(node, node.id, round)
        masked = {sender: payload for sender, payload in received.items() if UNMASKED not in payload.fields}
        unmasked = Received(received.peers)
        if protocol_round.masked:
            self._past_senders.update(protocol_round.senders)
            for sender in received.keys() - masked.keys():
                node.reject(sender, "its update is not masked")
            try:
                found = await Unmasking(node, protocol_round, masked).run()
            except UnmaskingError as reason:
                node.record_event("sum not unmasked", f"round {round}: {reason}; the model stays unchanged")
                return unmasked
            senders, total = found.senders, found.values
        else:
            for sender in masked:
                node.reject(sender, "its update is masked, and there is no other update that cancels the mask")
            senders = tuple(sender for sender in received if sender not in masked)
            total = sum(
                (received[s].arrays[VALUES] for s in senders), np.zeros(self._coordinate_count, self._codec.dtype)
            )
        arrays: dict[str, NDArray[Any]] = {SUM: self._codec.decode(total)}
        if isinstance(self.inner, CoordinateSelector):
            common = self._coordinates is None
            arrays[POSITIONS] = self.inner.select(node.params, round) if common else self._positions[node.id]
        weights = self._sender_groups.of(node, node.id, round).weights
        for sender in senders:
            unmasked[sender] = Payload(arrays, {WEIGHT: weights[sender]})
        return unmasked

    # Requests of other nodes

    async def serve_peers(self, node: Node) -> None:
        await self.responder.serve(node, self.key_exchange.keys(node))

    async def drain(self, node: Node) -> None:
        failed = set(node.failed_peers)
        await node.send(sorted(self._past_senders - failed), Payload({}), round=0, kind=FINISHED)
        timeout = None if node.receive_timeout is None else DRAIN_TIMEOUTS * node.receive_timeout
        await node.receive_each(sorted(self.responder.receivers - failed), round=0, kind=FINISHED, timeout=timeout)
