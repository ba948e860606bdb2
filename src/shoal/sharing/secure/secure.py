"""Secure aggregation: a receiver learns the weighted sum of its neighbours' models, and none of them.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, for the neighbours of
every node of a graph in place of a server's clients.

In each round, each node j of those that speak to receiver i

1. weights its model with w_ij, which both know, and encodes it in a ring, where sums are exact;
2. adds a mask with each partner k > j and subtracts one with each k < j, so that these cancel in the sum, and adds one
   mask more that is its own;
3. sends that with a commitment to the seed of every mask, and a share of every seed for each partner, sealed for it.

The receiver says whose words have come. Each of those hands out the seed of its own mask, and those that it shares with
nodes whose words have not come. What one that has died since would have handed out, the others' shares give. A node
hands out its own seed only if its words are in the sum, and so are those of enough others that it has masked with; and
a pair's only if the other's are not. So late words stay hidden, and those of one whom nobody masks with. What a node
must remember for this follows from its keys.

This is against receivers and neighbours that want to know more than they are told, also together, and against words
that are wrong or forged. One thing is trusted: that a receiver names the same speakers to all. One that tells some of
them that a node is among them, and others that it is not, gets all its seeds. Of sparse models, a receiver names the
coordinates that it wants to hear, and so its neighbours learn something of where its own have changed most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import GolombRice, Positions
from shoal.errors import MessageError, PrivacyError
from shoal.message import Payload
from shoal.node import Node, Received
from shoal.sharing.full import FullSharing
from shoal.sharing.secure.coordinates import Wanted
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.key_exchange import Exchange
from shoal.sharing.secure.messages import BYE, PLAIN, SEALS, SUPPORT, WORDS, Gathering, masked
from shoal.sharing.secure.requirements import incompatibilities
from shoal.sharing.secure.responder import Answers
from shoal.sharing.secure.sender_groups import SenderGroups
from shoal.sharing.secure.unmasking import ClosedError, Opening
from shoal.sharing.sharing import CoordinateSelector, NodeAware, NodeInfo, SenderGroup, Sharing
from shoal.state import State, Stateful
from shoal.traits import ExperimentView
from shoal.types import Bounds, Nested, NodeId, Params

SUM, WEIGHT, POSITIONS = "sum", "weight", "positions"
STAY = 5
"""For how many receives a node waits at its end for a receiver that says nothing: for so many the receiver may wait in
vain for others, for a key, for coordinates, for words, for what takes off masks, and for help. To one that is slower
still nobody hands out anything any more: its last sums stay closed."""
_CODE = GolombRice()


@dataclass
class Secure:
    """Bonawitz et al. 2017: each node learns the weighted sum of its neighbours' models exactly, and none of them.

    Models are numbers of `bits` bits for values within ±`range`; a model that leaves it ends its node. `inner` says
    which coordinates: "full" all, "random" those of its seed, "topk" those that have probably changed most at the
    receiver and its neighbours since it last averaged them. This is not top-k sharing without masks: a receiver hears
    `fraction` of the coordinates from all its neighbours, where without masks it hears of each neighbour those that
    have changed most there.

    Each of a receiver's neighbours masks with up to `partners` others, and `threshold` of the shares that these hold
    recover its secrets. A sum is opened if at least `threshold` of the neighbours are in it, and one more than it takes
    partners to recover a secret: so at least two are not of those who may collude. Otherwise the receiver keeps its own
    model, and says so. A receiver with fewer than two neighbours makes an experiment invalid, or in a graph that
    changes hears nothing for that round; with `few` = "plain" it is told models unmasked.
    """

    inner: Annotated[Sharing, Nested("sharing")] = field(default_factory=FullSharing)
    bits: Literal[32, 64] = 32
    range: Annotated[float, Bounds(at_least=2.0**-64, at_most=2.0**64)] = 64.0
    threshold: Annotated[float, Bounds(above=0, at_most=1)] = 0.5
    partners: Annotated[int, Bounds(at_least=2, at_most=64)] = 8
    few: Literal["refuse", "plain"] = "refuse"

    def __post_init__(self) -> None:
        if self.partners % 2:
            raise ValueError(f"partners = {self.partners}: expected an even number, half of them on each side")
        self._ring = FixedPoint(self.bits, self.range)
        self._exchange = Exchange()
        self._sender_groups = SenderGroups()
        self._node: Node | None = None
        self._answers = Answers()
        self._latest: dict[NodeId, int] = {}
        """The last round in which each receiver was spoken to."""
        self._asked: set[NodeId] = set()
        """Those who may wait for this node to ask them for something."""
        self._params: Params = np.empty(0, np.float32)
        self._supports: dict[NodeId, Positions] = {}
        """In the present round: the coordinates to say to each receiver, and those that this node hears."""
        self._wanted: Wanted | None = None
        """Names the coordinates that this node hears, where nodes do not select alike."""
        self._unnamed: dict[NodeId, tuple[int, int]] = {}
        """Receivers whose coordinates have not come of late: how often they were waited for, and the last round of
        these."""
        self._gatherings: dict[NodeId, Gathering] = {}
        """Of the present round, by receiver: a large circle takes a while to work out."""

    # The sharing.

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        if isinstance(self.inner, NodeAware):
            self.inner.bind(info)

    def start(self, params: Params) -> None:
        self.inner.start(params)
        self._size = params.size
        self._count = self.inner.select(params, 0).size if isinstance(self.inner, CoordinateSelector) else params.size
        if isinstance(self.inner, CoordinateSelector) and not self.inner.common:
            self._wanted = Wanted(params, self._count)

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        if (value := self._ring.outside(params)) is not None:
            limit = "a finite number" if not np.isfinite(value) else f"within ±{self.range:g}"
            raise PrivacyError(
                f"node {self._info.id}, round {round}: a parameter is {value:g}, expected {limit}: it would garble "
                "the sum; set a larger sharing.range, or a smaller training.lr if the model diverges"
            )
        self._params = params
        return partial(self._words, params=params, round=round)

    def check(self, payload: Payload, params: Params) -> None:
        words = payload.arrays.get(WORDS)
        if words is None or words.dtype != self._ring.dtype or words.shape != (self._count,):
            raise MessageError(f"expected an array {WORDS!r} of {self._count} words of {self.bits} bits")
        if (payload.fields.get(PLAIN) is True) != (SEALS not in payload.arrays):
            raise MessageError(f"expected {SEALS!r}, or the field {PLAIN!r} where nothing is masked")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = np.array(params)
        if not received:
            return merged
        peer, opened = next(iter(received.items()))
        # Each counts as much of its weight as the others: what is missing to 1 since some are missing is common to all.
        factor = weights[peer] / float(opened.fields[WEIGHT])
        positions = opened.arrays.get(POSITIONS, slice(None))
        own = params[positions] * np.float64(1.0 - sum(weights.values()))
        merged[positions] = own + factor * opened.arrays[SUM]
        if self._wanted is not None:
            mean = opened.arrays[SUM] / sum(float(said.fields[WEIGHT]) for said in received.values())
            self._wanted.hear(merged, opened.arrays[POSITIONS], mean, len(received))
        return merged

    def state(self) -> State:
        """Keys are not in it: nodes that go on from a checkpoint agree upon new ones."""
        parts = {"inner": self.inner, "wanted": self._wanted}
        return {name: part.state() for name, part in parts.items() if isinstance(part, Stateful)}

    def restore(self, state: State) -> None:
        parts = {"inner": self.inner, "wanted": self._wanted}
        for name, part in parts.items():
            if isinstance(part, Stateful):
                part.restore(state[name])

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return incompatibilities(self.inner, self.few, experiment)

    # Before the words.

    def set_sender_group(self, receiver: NodeId, round: int, group: SenderGroup) -> None:
        self._sender_groups.announce(receiver, round, group)

    async def before_send(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        self._node = node
        self._gatherings = {}
        gatherings = {receiver: self._gathering(node, receiver, round) for receiver in to}
        hidden = [receiver for receiver, gathering in gatherings.items() if gathering.masked]
        alone = [receiver for receiver in to if receiver not in hidden]
        if alone:
            how = "spoken to unmasked" if self.few == "plain" else "not spoken to"
            node.event(how, f"round {round}: nobody else speaks to {', '.join(map(str, alone))}")
        await self._exchange.meet(node, {p for receiver in hidden for p in gatherings[receiver].partners[node.id]})
        allowed: Sequence[NodeId] = sorted({*hidden, *(alone if self.few == "plain" else ())})
        if isinstance(self.inner, CoordinateSelector):
            allowed = await self._agree_on_coordinates(node, self.inner, allowed, round)
        return allowed

    def _gathering(self, node: Node, receiver: NodeId, round: int) -> Gathering:
        kept = self._gatherings.get(receiver)
        if kept is None or kept.round != round:
            company = self._sender_groups.of(node, receiver, round).senders
            kept = Gathering(receiver, round, company, self.partners, self.threshold, node.seed)
            self._gatherings[receiver] = kept
        return kept

    async def _agree_on_coordinates(
        self, node: Node, inner: CoordinateSelector, to: Sequence[NodeId], round: int
    ) -> Sequence[NodeId]:
        """All who speak to a receiver say the same coordinates to it: those that it names."""
        if self._wanted is None:
            self._supports = dict.fromkeys(to, inner.select(self._params, round))
            return to
        own = self._wanted.name(self._params, round)
        company = sorted(self._sender_groups.of(node, node.id, round).senders) if self._hears(node, round) else []
        await node.send(company, Payload({SUPPORT: _CODE.encode(own, self._size)}), round=round, kind=SUPPORT)
        awaited = [receiver for receiver in to if self._is_awaited(receiver, round)]
        named = await self._named(node, awaited, round)
        named |= await self._named(node, [r for r in to if r not in awaited], round, timeout=0.0)
        for receiver in named:
            self._unnamed.pop(receiver, None)
        for receiver in awaited:
            if receiver not in named:
                self._unnamed[receiver] = (self._unnamed.get(receiver, (0, 0))[0] + 1, round)
        # Who has not named any in time is not spoken to in this round.
        self._supports = {receiver: self._positions(said) for receiver, said in sorted(named.items())}
        allowed = list(self._supports)
        self._supports[node.id] = own
        return allowed

    def _is_awaited(self, receiver: NodeId, round: int) -> bool:
        """To wait in every round for one that hangs would make this node's words late for all others. So one that does
        not speak to this node either is waited for in the next round, then after two more, four, eight."""
        times, latest = self._unnamed.get(receiver, (0, 0))
        return not times or round - latest >= 2 ** (times - 1)

    async def _named(
        self, node: Node, by: Sequence[NodeId], round: int, timeout: float | None = None
    ) -> dict[NodeId, Payload]:
        return await node.receive_each(by, round=round, kind=SUPPORT, timeout=timeout, check=self._positions)

    def _positions(self, said: Payload) -> Positions:
        code = said.arrays.get(SUPPORT)
        if code is None:
            raise MessageError(f"no array {SUPPORT!r}")
        return _CODE.decode(code, self._count, self._size)

    # The words.

    def _words(self, receiver: NodeId, params: Params, round: int) -> Payload:
        node = self._node
        if node is None:
            # Where an experiment's sharings are tried on each other, there are no nodes. Two that differ must not go
            # together, and this is what tells.
            raise MessageError("masks cancel only where all nodes use secure aggregation, and alike")
        if self._latest.get(receiver, -1) >= round:
            raise PrivacyError(
                f"node {node.id} was to speak to node {receiver} in round {round} once more: two messages under the "
                "same masks show their difference; an algorithm may send once per round"
            )
        self._latest[receiver] = round
        gathering = self._gathering(node, receiver, round)
        values = params[self._supports[receiver]] if isinstance(self.inner, CoordinateSelector) else params
        words = self._ring.encode(values, self._sender_groups.of(node, receiver, round).weights[node.id])
        if not gathering.masked:
            if self.few != "plain":
                raise PrivacyError(f"node {node.id} was to speak to node {receiver} unmasked in round {round}")
            return Payload({WORDS: words}, {PLAIN: True})
        maskers = self._exchange.agreed(node, gathering.partners[node.id])
        self._answers.remember(gathering, maskers)
        return masked(words, node.id, gathering, self._exchange.keys(node), maskers).payload()

    # After the words.

    def expected_senders(self, node: Node, senders: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        if self._hears(node, round):
            return senders
        if senders:
            node.event("hears nobody", f"round {round}: fewer than two speak to this node, so none may")
        return ()

    def _hears(self, node: Node, round: int) -> bool:
        return self.few == "plain" or self._gathering(node, node.id, round).masked

    async def after_receive(self, node: Node, received: Received, round: int) -> Received:
        for sender in received:
            self._unnamed.pop(sender, None)  # it does not hang
        gathering = self._gathering(node, node.id, round)
        hidden = {sender: said for sender, said in received.items() if PLAIN not in said.fields}
        opened = Received(received.peers)
        if gathering.masked:
            self._asked.update(gathering.company)
            for sender in received.keys() - hidden.keys():
                node.reject(sender, "its words are not masked")
            try:
                found = await Opening(node, gathering, hidden).open()
            except ClosedError as reason:
                node.event("sum not opened", f"round {round}: {reason}; the model stays as it is")
                return opened
            speakers, words = found.speakers, found.words
        else:
            for sender in hidden:
                node.reject(sender, "its words are masked, and nobody else's are there to cancel that")
            speakers = tuple(sender for sender in received if sender not in hidden)
            words = sum((received[s].arrays[WORDS] for s in speakers), np.zeros(self._count, self._ring.dtype))
        arrays: dict[str, NDArray[Any]] = {SUM: self._ring.decode(words)}
        if isinstance(self.inner, CoordinateSelector):
            common = self._wanted is None  # then nobody had to agree upon anything
            arrays[POSITIONS] = self.inner.select(node.params, round) if common else self._supports[node.id]
        counts = self._sender_groups.of(node, node.id, round).weights
        for speaker in speakers:
            opened[speaker] = Payload(arrays, {WEIGHT: counts[speaker]})
        return opened

    # What others ask for.

    async def serve_peers(self, node: Node) -> None:
        await self._answers.attend(node, self._exchange.keys(node))

    async def drain(self, node: Node) -> None:
        gone = node.failed_peers
        await node.send(sorted(self._asked - set(gone)), Payload({}), round=0, kind=BYE)
        patience = None if node.receive_timeout is None else STAY * node.receive_timeout
        await node.receive_each(sorted(self._answers.receivers - set(gone)), round=0, kind=BYE, timeout=patience)
