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
them that a node is among them, and others that it is not, gets all its seeds. Of sparse models, a receiver learns which
coordinates each neighbour votes for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.components import Whole
from shoal.compression.indices import GolombRice, Positions
from shoal.errors import MessageError, PrivacyError
from shoal.message import Message, Params, Payload
from shoal.node import Node, Received
from shoal.privacy import masks, shamir
from shoal.privacy.demands import misfits
from shoal.privacy.masks import KEY_BYTES, SEED_BYTES, TAG_BYTES, Keys, commitment
from shoal.privacy.opening import ClosedError, Opening
from shoal.privacy.ring import Ring
from shoal.privacy.words import (
    BYE,
    HELP,
    HELPED,
    KEY,
    NO_SEAL,
    OF,
    OPEN,
    OPENED,
    OWN,
    PAIRS,
    PLAIN,
    REFUSED,
    SEALS,
    SHARES,
    SPEAKERS,
    SUPPORT,
    VOTE,
    WORDS,
    Gathering,
    Statement,
    ids,
    naming,
    rows,
    strings,
)
from shoal.randomness import generator
from shoal.schema import Bounds, Nested
from shoal.sharing.full import Full
from shoal.sharing.sharing import Joins, Member, Selects, Sharing
from shoal.state import State, Stateful
from shoal.topologies.graph import NodeId

SUM, WEIGHT, POSITIONS = "sum", "weight", "positions"
STAY = 4
"""For how many receives a node waits at its end for a receiver that says nothing: for so many the receiver may wait in
vain for others, for a key, for words, for what takes off masks, and for help."""
_CODE = GolombRice()


@dataclass(frozen=True)
class _Said:
    """What a node remembers of its words to a receiver, until it is asked about a later round."""

    gathering: Gathering
    partners: tuple[NodeId, ...]
    """Those that it masked with."""
    speakers: tuple[NodeId, ...] | None = None
    """Whose words were in the sum that it has helped to open."""


@dataclass
class Secure:
    """Bonawitz et al. 2017: each node learns the weighted sum of its neighbours' models exactly, and none of them.

    Models are numbers of `bits` bits for values within ±`range`; a model that leaves it ends its node. `inner` says
    which coordinates: "full" all, "random" those of its seed, "topk" those that most of a receiver's neighbours name.

    Each of a receiver's neighbours masks with up to `partners` others. A sum is opened if at least `threshold` of the
    neighbours are in it, and never fewer than two; so many of the shares of a secret recover it. Otherwise the receiver
    keeps its own model, and says so. A receiver with fewer than two neighbours makes an experiment invalid, or in a
    graph that changes hears nothing for that round; with `few` = "plain" it is told models unmasked.
    """

    inner: Annotated[Sharing, Nested("sharing")] = field(default_factory=Full)
    bits: Literal[32, 64] = 32
    range: Annotated[float, Bounds(above=0)] = 64.0
    threshold: Annotated[float, Bounds(above=0, at_most=1)] = 0.5
    partners: Annotated[int, Bounds(at_least=2, at_most=64)] = 8
    few: Literal["refuse", "plain"] = "refuse"

    def __post_init__(self) -> None:
        self._ring = Ring(self.bits, self.range)
        self._keys: Keys | None = None
        self._node: Node | None = None
        self._told: set[NodeId] = set()
        """Those that know this node's key."""
        self._keyless: set[NodeId] = set()
        """Those whose key was refused."""
        self._silent: set[NodeId] = set()
        """Those whose key was waited for in vain."""
        self._said: dict[NodeId, dict[int, _Said]] = {}
        self._latest: dict[NodeId, int] = {}
        """The last round in which each receiver was spoken to."""
        self._asked: set[NodeId] = set()
        """Those who may wait for this node to ask them for something."""
        self._params: Params = np.empty(0, np.float32)
        self._supports: dict[NodeId, Positions] = {}
        """In the present round: the coordinates to say to each receiver, and those that this node hears."""

    # The sharing.

    def join(self, member: Member) -> None:
        self._member = member
        if isinstance(self.inner, Joins):
            self.inner.join(member)

    def start(self, params: Params) -> None:
        self.inner.start(params)
        self._size = params.size
        self._count = self.inner.select(params, 0).size if isinstance(self.inner, Selects) else params.size

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        if (value := self._ring.outside(params)) is not None:
            limit = "a finite number" if not np.isfinite(value) else f"within ±{self.range:g}"
            raise PrivacyError(
                f"node {self._member.id}, round {round}: a parameter is {value:g}, expected {limit}: it would garble "
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
        return merged

    def state(self) -> State:
        """Keys are not in it: nodes that go on from a checkpoint agree upon new ones."""
        return {"inner": self.inner.state()} if isinstance(self.inner, Stateful) else {}

    def restore(self, state: State) -> None:
        if isinstance(self.inner, Stateful):
            self.inner.restore(state["inner"])

    def misfits(self, whole: Whole) -> list[str]:
        return misfits(self.inner, self.few, whole)

    # Before the words.

    async def prepare(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        self._node = node
        gatherings = {receiver: self._gathering(node, receiver, round) for receiver in to}
        masked = [receiver for receiver, gathering in gatherings.items() if gathering.masked]
        alone = [receiver for receiver in to if receiver not in masked]
        if alone:
            how = "spoken to unmasked" if self.few == "plain" else "not spoken to"
            node.event(how, f"round {round}: nobody else speaks to {', '.join(map(str, alone))}")
        await self._exchange_keys(node, {p for receiver in masked for p in gatherings[receiver].partners[node.id]})
        allowed: Sequence[NodeId] = sorted({*masked, *(alone if self.few == "plain" else ())})
        if isinstance(self.inner, Selects):
            allowed = await self._agree_on_coordinates(node, self.inner, allowed, round)
        return allowed

    def _gathering(self, node: Node, receiver: NodeId, round: int) -> Gathering:
        company = node.company(receiver, round)
        return Gathering(receiver, round, company, self.partners, self.threshold, node.seed)

    def _own_keys(self, node: Node) -> Keys:
        if self._keys is None:
            self._keys = Keys(node.run)
        return self._keys

    async def _exchange_keys(self, node: Node, partners: set[NodeId]) -> None:
        """Agree upon a key with each of `partners`, who do the same: they speak to the same receiver."""
        keys = self._own_keys(node)
        if untold := sorted(partners - self._told):
            self._told.update(untold)
            public = np.frombuffer(keys.public, np.uint8)
            await node.send(untold, Payload({KEY: public}), round=0, kind=KEY)
        patience = math.inf if node.receive_timeout is None else node.receive_timeout
        until = node.now() + patience
        for peer in sorted(p for p in partners if p not in keys and p not in self._keyless):
            # Who has kept silent once is not waited for again: this node's own words would be late every time.
            timeout = 0.0 if peer in self._silent else max(0.0, until - node.now())
            # Of any round: of two that meet, each tells the other its key when it comes to that.
            message = await node.receive(kind=KEY, sender=peer, timeout=timeout)
            if message is not None:
                self._agree(node, message)
            elif peer not in self._silent and peer not in node.runtime.gone():
                self._silent.add(peer)
                node.event("no key", f"gave up waiting for that of node {peer}: this node does not mask with it")

    def _agree(self, node: Node, message: Message) -> None:
        keys, peer = self._own_keys(node), message.sender
        try:
            public = _key(message.payload)
            if (owner := keys.owner(public)) is not None:
                self._refuse_key(node, owner, f"its key is that of node {peer}: nobody knows whose it is")
            keys.agree(peer, public)
        except MessageError as error:
            self._refuse_key(node, peer, str(error))

    def _refuse_key(self, node: Node, peer: NodeId, why: str) -> None:
        self._keyless.add(peer)
        node.refuse(peer, why)

    async def _agree_on_coordinates(
        self, node: Node, inner: Selects, to: Sequence[NodeId], round: int
    ) -> Sequence[NodeId]:
        """All who speak to a receiver say the same coordinates to it: those that most of them name."""
        own = inner.select(self._params, round)
        if inner.common:
            self._supports = dict.fromkeys(to, own)
            return to
        await node.send(to, Payload({VOTE: _CODE.encode(own, self._size)}), round=round, kind=VOTE)
        company = list(node.company(node.id, round)) if self._hears(node, round) else []
        votes = await node.receive_each(company, round=round, kind=VOTE, check=lambda said: self._read(said, VOTE))
        elected = self._elected([self._read(said, VOTE) for said in votes.values()], own, node.id, round)
        await node.send(list(votes), Payload({SUPPORT: _CODE.encode(elected, self._size)}), round=round, kind=SUPPORT)
        answers = await node.receive_each(to, round=round, kind=SUPPORT, check=lambda said: self._read(said, SUPPORT))
        self._supports = {receiver: self._read(said, SUPPORT) for receiver, said in answers.items()}
        if self._supports:
            inner.said(self._params, np.unique(np.concatenate(list(self._supports.values()))))
        allowed = [receiver for receiver in to if receiver in self._supports]
        self._supports[node.id] = elected
        return allowed

    def _elected(self, votes: list[Positions], own: Positions, receiver: NodeId, round: int) -> Positions:
        """As many coordinates as a node names: those with most votes, and by lot among equals."""
        if not votes:
            return own
        named, count = np.unique(np.concatenate(votes), return_counts=True)
        lots = generator(self._member.seed, "votes for coordinates", receiver, round).random(named.size)
        return np.sort(named[np.lexsort((lots, -count))[: self._count]])

    def _read(self, said: Payload, what: str) -> Positions:
        code = said.arrays.get(what)
        if code is None:
            raise MessageError(f"no array {what!r}")
        return _CODE.decode(code, self._count, self._size)

    # The words.

    def _words(self, receiver: NodeId, params: Params, round: int) -> Payload:
        node = self._node
        if node is None:
            raise MessageError("masks cancel only where all nodes use secure aggregation, and alike")
        if self._latest.get(receiver, -1) >= round:
            raise PrivacyError(
                f"node {node.id} was to speak to node {receiver} in round {round} once more: two messages under the "
                "same masks show their difference; an algorithm may send once per round"
            )
        self._latest[receiver] = round
        gathering = self._gathering(node, receiver, round)
        values = params[self._supports[receiver]] if isinstance(self.inner, Selects) else params
        words = self._ring.encode(values, gathering.weights[node.id])
        if not gathering.masked:
            if self.few != "plain":
                raise PrivacyError(f"node {node.id} was to speak to node {receiver} unmasked in round {round}")
            return Payload({WORDS: words}, {PLAIN: True})
        keys = self._own_keys(node)
        # Those that have died since are among them: their own words may have come, masked with this node.
        partners = gathering.partners[node.id]
        maskers = tuple(p for p in partners if p in keys and p not in self._keyless)
        own_seed = keys.own_seed(receiver, round)
        masks.add(words, own_seed)
        secrets, seals = [own_seed], [commitment(own_seed, receiver, round)]
        pairs = {}
        for partner in gathering.partners[node.id]:
            if partner not in maskers:
                secrets.append(NO_SEAL)
                seals.append(NO_SEAL)
                continue
            pair = pairs[partner] = keys.with_peer(partner, receiver, round)
            (masks.add if node.id < partner else masks.subtract)(words, pair.seed)
            secrets.append(pair.seed)
            seals.append(commitment(pair.seed, receiver, round))
        holders = gathering.partners[node.id]
        shares = shamir.split(rows(secrets), len(holders), gathering.shares_needed(node.id))
        empty = bytes(len(secrets) * SEED_BYTES + TAG_BYTES)
        sealed = [
            pairs[holder].seal(share.tobytes(), from_lower=node.id < holder) if holder in pairs else empty
            for holder, share in zip(holders, shares, strict=True)
        ]
        self._said.setdefault(receiver, {})[round] = _Said(gathering, maskers)
        return Statement(words, seals, sealed).payload()

    # After the words.

    def expected(self, node: Node, senders: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        if self._hears(node, round):
            return senders
        if senders:
            node.event("hears nobody", f"round {round}: fewer than two speak to this node, so none may")
        return ()

    def _hears(self, node: Node, round: int) -> bool:
        return self.few == "plain" or self._gathering(node, node.id, round).masked

    async def open(self, node: Node, received: Received, round: int) -> Received:
        gathering = self._gathering(node, node.id, round)
        masked = {sender: said for sender, said in received.items() if PLAIN not in said.fields}
        opened = Received(received.peers)
        if gathering.masked:
            self._asked.update(gathering.weights)
            for sender in received.keys() - masked.keys():
                node.refuse(sender, "its words are not masked")
            try:
                found = await Opening(node, gathering, masked).open()
            except ClosedError as reason:
                node.event("sum not opened", f"round {round}: {reason}; the model stays as it is")
                return opened
            speakers, words = found.speakers, found.words
        else:
            for sender in masked:
                node.refuse(sender, "its words are masked, and nobody else's are there to cancel that")
            speakers = tuple(sender for sender in received if sender not in masked)
            words = sum((received[s].arrays[WORDS] for s in speakers), np.zeros(self._count, self._ring.dtype))
        arrays: dict[str, NDArray[Any]] = {SUM: self._ring.decode(words)}
        if isinstance(self.inner, Selects):
            common = self.inner.common  # then nobody had to agree upon anything
            arrays[POSITIONS] = self.inner.select(node.params, round) if common else self._supports[node.id]
        for speaker in speakers:
            opened[speaker] = Payload(arrays, {WEIGHT: gathering.weights[speaker]})
        return opened

    # What others ask for.

    async def attend(self, node: Node) -> None:
        self._own_keys(node)
        node.background(self._help(node))
        while True:
            asked = await node.receive(kind=OPEN)
            if asked is not None:
                await node.send([asked.sender], self._opened(node, asked), round=asked.round, kind=OPENED)

    def _opened(self, node: Node, asked: Message) -> Payload:
        """The seeds that take the masks off this node's words, and off the sum those of the absent."""
        try:
            speakers = self._agreed(node, asked)
        except MessageError as error:
            node.reject(asked, str(error))
            return Payload({}, {REFUSED: str(error)})
        receiver, round = asked.sender, asked.round
        keys, said = self._own_keys(node), self._said[receiver][round]
        absent = [p for p in said.partners if p not in speakers]
        pairs = [keys.with_peer(partner, receiver, round).seed for partner in absent]
        return Payload({OWN: rows([keys.own_seed(receiver, round)]), PAIRS: rows(pairs)})

    def _agreed(self, node: Node, asked: Message) -> tuple[NodeId, ...]:
        """Whose words are in the sum. Raises `MessageError` where a sum of these must not be opened."""
        said = self._said.get(asked.sender, {}).get(asked.round)
        if said is None:
            raise MessageError(f"nothing was said to it in round {asked.round}, or a later round was opened since")
        speakers = ids(asked.payload, SPEAKERS)
        if node.id not in speakers:
            raise MessageError("this node's words are not in the sum: it has nothing to take off")
        if (why := said.gathering.why_not(speakers)) is not None:
            raise MessageError(why)
        if len(set(said.partners) & set(speakers)) < (needed := said.gathering.links_needed(node.id)):
            raise MessageError(f"this node has masked with fewer than {needed} of them: its words would show")
        if said.speakers not in (None, speakers):
            raise MessageError("another sum of this round was opened before: their difference would show")
        # What was said in earlier rounds is not asked for any more.
        earlier = self._said[asked.sender]
        self._said[asked.sender] = {r: kept for r, kept in earlier.items() if r > asked.round}
        self._said[asked.sender][asked.round] = _Said(said.gathering, said.partners, speakers)
        return speakers

    async def _help(self, node: Node) -> None:
        while True:
            asked = await node.receive(kind=HELP)
            if asked is not None:
                await node.send([asked.sender], self._helped(node, asked), round=asked.round, kind=HELPED)

    def _helped(self, node: Node, asked: Message) -> Payload:
        """This node's shares of what others, who have died since they spoke, would have handed out."""
        of: list[NodeId] = []
        handed: list[bytes] = []
        try:
            receiver, round = asked.sender, asked.round
            said = self._said.get(receiver, {}).get(round)
            if said is None or said.speakers is None:
                raise MessageError(f"no sum was opened to it in round {round}, or a later one since")
            partners = said.gathering.partners
            length = (1 + len(partners[node.id])) * SEED_BYTES + TAG_BYTES
            dealers = ids(asked.payload, OF)
            for dealer, sealed in zip(dealers, strings(asked.payload, SHARES, length), strict=False):
                if dealer not in said.partners or dealer not in said.speakers:
                    raise MessageError(f"there is no share here of what node {dealer} said to it")
                pair = self._own_keys(node).with_peer(dealer, receiver, round)
                plain = pair.unseal(sealed, from_lower=dealer < node.id)
                share = [plain[i : i + SEED_BYTES] for i in range(0, len(plain), SEED_BYTES)]
                absent = [1 + place for place, other in enumerate(partners[dealer]) if other not in said.speakers]
                of.append(dealer)
                handed.extend(share[place] for place in (0, *absent))
        except MessageError as error:
            node.reject(asked, str(error))
        return Payload({OF: naming(of), SHARES: rows(handed)})

    async def part(self, node: Node) -> None:
        gone = node.runtime.gone()
        await node.send(sorted(self._asked - set(gone)), Payload({}), round=0, kind=BYE)
        patience = None if node.receive_timeout is None else STAY * node.receive_timeout
        await node.receive_each(sorted(self._said.keys() - set(gone)), round=0, kind=BYE, timeout=patience)


def _key(said: Payload) -> bytes:
    key = said.arrays.get(KEY)
    if key is None or key.dtype != np.uint8 or key.shape != (KEY_BYTES,):
        raise MessageError(f"expected a public key, {KEY_BYTES} bytes")
    return key.tobytes()
