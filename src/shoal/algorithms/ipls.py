"""IPLS: every peer is the server of some parts of the model (Pappas et al., IFIP Networking 2021, arXiv:2101.01901)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload, Scalar
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params

UPDATE = "ipls-update"
PARTIAL = "ipls-partial"
RESULT = "ipls-result"
SAMPLES = "samples"
MOST = 2**53
"""No weight is greater: so much of any float32 is still a float64."""
RETRIES = frozenset(2**k for k in range(2, 32))
"""After so many rounds without it, a peer is waited for once more: it may be back, and only just behind."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class IPLS:
    """Pappas et al. 2021: each peer averages a few partitions of the model for all, and fetches the others.

    The model is cut into `partitions` slices, as many as there are nodes when it is not given. Each peer is responsible
    for `per_node` of them at least. In a round it trains the whole model, then
    - sends each slice to one of those responsible for it, spread evenly over them;
    - averages the slices that it got, and exchanges that and its weight with the other replicas of its partitions;
    - sends the averages to those whose slices it got, and takes up the averages that it gets.
    So everybody ends the round with x ← mean_i train_i(x), or with the mean weighted by sample counts. Slices are those
    of the trained models, not of their changes: nodes that differ after a fault are equal again after the next round.

    The partitions of a peer that died, or kept silent in the last round, are taken over by the least loaded of the
    others. Each works out who from those it holds absent, and says with its slices whom it does: so all know what each
    of the others will do in this round, though they may not agree yet. A slice that nobody averaged stays as its
    trainer has it. A peer that was late is sent the averages, but not waited for in the next rounds; it counts again as
    soon as it is in time. `deadline` is how long to wait for peers in each of the three exchanges, in seconds; the
    engine's patience when it is not given. See docs/decisions/ipls.md.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    partitions: Annotated[int, Bounds(at_least=1)] | None = None
    per_node: Annotated[int, Bounds(at_least=1)] = 1
    weights: Literal["equal", "samples"] = "equal"
    deadline: Annotated[float, Bounds(above=0)] | None = None

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        peer = _Peer(self, node)
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            updates = await peer.exchange_updates(trained, r)
            averages = await peer.exchange_partials(updates, r)
            node.params = await peer.exchange_results(trained, updates, averages, r)


# Who is responsible for what


@dataclass(frozen=True, eq=False)
class Table:
    """Who is responsible for which partitions, and to whom each node sends its slices."""

    holders: tuple[tuple[NodeId, ...], ...]
    """Of each partition: who is responsible for it, in ascending order."""
    homes: NDArray[np.int32]
    """[node, partition]: where the node sends its slice. Itself, if it is responsible."""

    def held(self, node: NodeId) -> list[int]:
        return [p for p, holders in enumerate(self.holders) if node in holders]

    def replicas(self, node: NodeId) -> dict[NodeId, list[int]]:
        """The others that are responsible for a partition of `node`'s, and for which."""
        return _inverse((peer, p) for p in self.held(node) for peer in self.holders[p] if peer != node)

    def sends(self, node: NodeId) -> dict[NodeId, list[int]]:
        """To whom `node` sends which of its slices; itself among them."""
        return _inverse((home, p) for p, home in enumerate(self.homes[node].tolist()))

    def serves(self, node: NodeId) -> dict[NodeId, list[int]]:
        """Who sends which slices to `node`; itself among them. Absent ones too: they may be alive, and late."""
        return _inverse((t, p) for p in self.held(node) for t in np.flatnonzero(self.homes[:, p] == node).tolist())


@lru_cache(maxsize=16)
def table(nodes: int, partitions: int, per_node: int, absent: frozenset[NodeId]) -> Table:
    """The same for everybody who holds the same nodes absent, in whatever order they went; somebody must be left.

    Who is present keeps what it would have if all were; only partitions that nobody is left for change hands.
    """
    present = [node for node in range(nodes) if node not in absent]
    share = min(per_node, partitions)
    holders: list[list[NodeId]] = [[] for _ in range(partitions)]
    for node in range(nodes):
        for k in range(share):  # peers join in turn and take the least replicated: round and round the partitions
            holders[(node * share + k) % partitions].append(node)
    _adopt(holders, range(nodes))
    holders = [sorted(set(those) - absent) for those in holders]
    _adopt(holders, present)

    homes = np.empty((nodes, partitions), np.int32)
    everyone = np.array([*present, *sorted(absent)], np.int32)  # spread those evenly that are sure to send
    for p, those in enumerate(holders):
        others = everyone[~np.isin(everyone, those)]
        homes[others, p] = np.take(those, np.arange(p, p + len(others)), mode="wrap")
        homes[those, p] = those
    return Table(tuple(tuple(those) for those in holders), homes)


def _adopt(holders: list[list[NodeId]], candidates: Iterable[NodeId]) -> None:
    """The least loaded of `candidates` take on the partitions that nobody holds."""
    loads = dict.fromkeys(candidates, 0)
    for those in holders:
        for node in those:
            loads[node] += 1
    least = [(load, node) for node, load in loads.items()]
    heapq.heapify(least)
    for those in holders:
        if not those:
            load, node = least[0]
            those.append(node)
            heapq.heapreplace(least, (load + 1, node))


def _inverse(pairs: Iterable[tuple[NodeId, int]]) -> dict[NodeId, list[int]]:
    found: dict[NodeId, list[int]] = {}
    for peer, partition in pairs:
        found.setdefault(peer, []).append(partition)
    return found


# A round


@dataclass(frozen=True)
class Update:
    """What a node says after training."""

    absent: frozenset[NodeId]
    """Whom it takes to be away: the table that it follows in this round is made without them."""
    weight: float
    slices: Mapping[int, Params]


@dataclass(frozen=True)
class Weighed:
    """Averages of slices, and how much weight is behind each; by partition.

    An average and its weight say what a sum and its weight would, and cannot overflow.
    """

    slices: Mapping[int, Params]
    weights: Mapping[int, float]


class _Peer:
    """One node's part in the rounds.

    Everybody who is not known to be dead is sent an update, if only an empty one: so the first exchange ends when each
    has been heard or has died, whatever anybody's table says. From then on each knows by which table each of the others
    goes, so that in the second and third exchange nobody waits for what will not come.
    """

    def __init__(self, algorithm: IPLS, node: Node) -> None:
        self._node = node
        self._weighted = algorithm.weights == "samples"
        self._deadline = algorithm.deadline
        self._per_node = algorithm.per_node
        partitions = algorithm.partitions or node.nodes
        self._bounds = [p * node.params.size // partitions for p in range(partitions + 1)]
        self._missed: dict[NodeId, int] = dict(node.memory.get("missed", []))
        """Those not heard in the last round, though nobody knew them to be dead: for how many rounds running."""
        self._sent: dict[NodeId, list[int]] = {}
        """Which slices went to whom in this round; to itself too."""

    async def exchange_updates(self, trained: Params, r: int) -> dict[NodeId, Update]:
        """Each slice to one that is responsible for it. Returns what was heard, from this node itself as well."""
        node, me = self._node, self._node.id
        gone = frozenset(node.failed_peers)
        others = [peer for peer in range(node.nodes) if peer != me and peer not in gone]
        absent = gone.intersection(range(node.nodes)).union(self._missed)
        self._sent = self._table(absent).sends(me)
        if not np.isfinite(trained).all():  # the others would refuse it
            node.event("not finite", f"round {r}: training gave values that are no numbers; they are not sent")
            self._sent = {}

        def slices(partitions: Iterable[int]) -> dict[int, Params]:
            return {p: trained[self._bounds[p] : self._bounds[p + 1]] for p in partitions}

        fields: dict[str, Scalar] = {SAMPLES: node.samples} if self._weighted else {}
        away = {"absent": _bits(absent, node.nodes)} if absent else {}
        for partitions, peers in _alike({peer: self._sent.get(peer, ()) for peer in others}).items():
            said = Payload({**_packed(slices(partitions)), **away}, fields)
            await node.send(peers, said, round=r, kind=UPDATE)

        heard = {me: Update(absent, node.samples if self._weighted else 1, slices(self._sent.get(me, ())))}

        async def wait_for(peers: Collection[NodeId]) -> None:
            received = await node.receive_each(peers, round=r, kind=UPDATE, timeout=self._deadline)
            heard.update(self._read(received, self._update))

        await wait_for(set(others) - absent)
        if late := absent.intersection(others):
            views = [update.absent for peer, update in heard.items() if peer != me]
            expected = {p for p in late if self._missed[p] in RETRIES or any(p not in view for view in views)}
            await wait_for(expected)
            for peer in sorted(late - expected):
                message = await node.receive(kind=UPDATE, round=r, sender=peer, timeout=0.0)
                if message is not None:
                    heard.update(self._read({peer: message.payload}, self._update))
        self._missed = {peer: self._missed.get(peer, 0) + 1 for peer in others if peer not in heard}
        node.memory["missed"] = [[peer, rounds] for peer, rounds in self._missed.items()]
        return heard

    async def exchange_partials(self, updates: Mapping[NodeId, Update], r: int) -> Weighed:
        """The averages of the partitions that this node is responsible for, or was taken to be by somebody."""
        node, me = self._node, self._node.id
        own = _average({peer: Weighed(u.slices, dict.fromkeys(u.slices, u.weight)) for peer, u in updates.items()})
        for peer, shared in self._table(updates[me].absent).replicas(me).items():
            if self._counts(updates, peer):
                await node.send([peer], _payload(own, shared), round=r, kind=PARTIAL)

        asked = self._promised(updates, lambda table: table.replicas(me))
        received = await node.receive_each(asked, round=r, kind=PARTIAL, timeout=self._deadline)
        told = self._read(received, lambda peer, payload: self._weighed(payload, asked[peer]))
        return _average({**told, me: own})

    async def exchange_results(
        self, trained: Params, updates: Mapping[NodeId, Update], averages: Weighed, r: int
    ) -> Params:
        """The new model: the averages that this node made and those that it got, in place of what it trained."""
        node, me = self._node, self._node.id
        owed = self._table(updates[me].absent).serves(me)
        for peer, update in updates.items():  # of one who took this node to be responsible, as well
            owed[peer] = sorted({*owed.get(peer, ()), *update.slices})
        del owed[me]
        waiting = {peer: owed[peer] for peer in owed if owed[peer] and self._counts(updates, peer)}
        for partitions, peers in _alike(waiting).items():
            await node.send(peers, _payload(averages, partitions), round=r, kind=RESULT)

        asked = self._promised(updates, lambda table: table.sends(me))
        for home, sent in self._sent.items():
            if home != me and home in updates and self._counts(updates, home):
                asked[home] = sorted({*asked.get(home, ()), *sent})
        received = await node.receive_each(asked, round=r, kind=RESULT, timeout=self._deadline)
        told = self._read(received, lambda peer, payload: self._weighed(payload, asked[peer]))

        homes = self._table(updates[me].absent).homes[me].tolist()
        best: dict[int, tuple[float, bool]] = {}
        model = trained.copy()
        for peer, each in sorted({**told, me: averages}.items()):
            for p, values in each.slices.items():
                standing = (each.weights[p], peer == homes[p])  # while tables differ, several may tell of a slice
                if standing > best.get(p, (0.0, False)):
                    best[p] = standing
                    model[self._bounds[p] : self._bounds[p + 1]] = values
        if kept := [str(p) for p in range(len(homes)) if p not in best]:
            node.event("not averaged", f"round {r}: nobody gave partitions {', '.join(kept)}")
        return model

    def _table(self, absent: frozenset[NodeId]) -> Table:
        return table(self._node.nodes, len(self._bounds) - 1, self._per_node, absent)

    def _counts(self, updates: Mapping[NodeId, Update], peer: NodeId) -> bool:
        """Whether `peer` takes this node to be present. One that was not heard in this round is thought to."""
        return peer not in updates or self._node.id not in updates[peer].absent

    def _promised(
        self, updates: Mapping[NodeId, Update], told: Callable[[Table], dict[NodeId, list[int]]]
    ) -> dict[NodeId, list[int]]:
        """Which partitions each of the others will tell this node of, by the table that it follows."""
        me = self._node.id
        promises = {absent: told(self._table(absent)) for absent in {update.absent for update in updates.values()}}
        return {
            peer: promises[update.absent][peer]
            for peer, update in updates.items()
            if peer != me and peer not in updates[me].absent and peer in promises[update.absent]
        }

    # What others say is checked.

    def _read(self, received: Mapping[NodeId, Payload], read: Callable[[NodeId, Payload], Read]) -> dict[NodeId, Read]:
        """What was said, without what makes no sense: that is counted."""
        found: dict[NodeId, Read] = {}
        for peer, payload in received.items():
            try:
                found[peer] = read(peer, payload)
            except MessageError as error:
                self._node.refuse(peer, str(error))
        return found

    def _update(self, peer: NodeId, payload: Payload) -> Update:
        weight = payload.fields.get(SAMPLES) if self._weighted else 1
        if type(weight) is not int or not 1 <= weight <= MOST:
            raise MessageError(f"samples = {weight!r}: expected a number, at least 1")
        absent = _absent(payload, self._node.nodes)
        if peer in absent:
            raise MessageError("it holds itself absent")
        expected = np.flatnonzero(self._table(absent).homes[peer] == self._node.id).tolist()
        return Update(absent, weight, self._slices(payload, expected))

    def _weighed(self, payload: Payload, expected: Collection[int]) -> Weighed:
        slices = self._slices(payload, expected)
        weights = payload.arrays.get("weights", np.empty(0))
        if weights.dtype != np.float64 or weights.shape != (len(slices),):
            raise MessageError(f"expected {len(slices)} float64 weights")
        if not ((weights > 0) & (weights <= MOST)).all():
            raise MessageError("expected weights above 0")
        return Weighed(slices, dict(zip(slices, weights.tolist(), strict=True)))

    def _slices(self, payload: Payload, expected: Collection[int]) -> dict[int, Params]:
        """The slices by partition, in ascending order: all of those `expected`, or some, or none."""
        if "partitions" not in payload.arrays:
            return {}
        numbers, values = payload.arrays["partitions"], payload.arrays.get("values")
        if numbers.dtype != np.int32 or numbers.ndim != 1:
            raise MessageError("expected partitions as an int32 vector")
        partitions: list[int] = numbers.tolist()  # they are few: faster than NumPy
        if any(p >= after for p, after in pairwise(partitions)):
            raise MessageError("expected partitions in ascending order")
        if unexpected := set(partitions).difference(expected):
            raise MessageError(f"partition {min(unexpected)} was not to be sent here")
        ends = [*accumulate((self._bounds[p + 1] - self._bounds[p] for p in partitions), initial=0)]
        if values is None or values.dtype != np.float32 or values.shape != (ends[-1],):
            raise MessageError(f"expected {ends[-1]} float32 values for {len(partitions)} partitions")
        if not np.isfinite(values).all():
            raise MessageError("some values are not finite")
        return {p: values[start:end] for p, (start, end) in zip(partitions, pairwise(ends), strict=True)}


def _average(told: Mapping[NodeId, Weighed]) -> Weighed:
    """Of what several say; in ascending order of nodes, so that all replicas of a partition get the same to the bit."""
    totals: dict[int, NDArray[np.float64]] = {}
    weights: dict[int, float] = {}
    for _, each in sorted(told.items()):
        for p, values in each.slices.items():
            weighted = values.astype(np.float64) * each.weights[p]
            totals[p] = totals[p] + weighted if p in totals else weighted
            weights[p] = weights.get(p, 0.0) + each.weights[p]
    return Weighed({p: (total / weights[p]).astype(np.float32) for p, total in totals.items()}, weights)


def _packed(slices: Mapping[int, Params]) -> dict[str, NDArray[Any]]:
    """Slices as they go into a message, in ascending order; nothing for none."""
    if not slices:
        return {}
    partitions = sorted(slices)
    return {"partitions": np.array(partitions, np.int32), "values": np.concatenate([slices[p] for p in partitions])}


def _payload(weighed: Weighed, partitions: Iterable[int]) -> Payload:
    """As much of these partitions as there is."""
    slices = {p: weighed.slices[p] for p in sorted(partitions) if p in weighed.slices}
    weights = np.array([weighed.weights[p] for p in slices])
    return Payload({**_packed(slices), "weights": weights} if slices else {})


def _alike(said: Mapping[NodeId, Collection[int]]) -> dict[tuple[int, ...], list[NodeId]]:
    """Those that are told of the same partitions together: what they are told is encoded once."""
    together: dict[tuple[int, ...], list[NodeId]] = {}
    for peer, partitions in sorted(said.items()):
        together.setdefault(tuple(partitions), []).append(peer)
    return together


def _bits(absent: frozenset[NodeId], nodes: int) -> NDArray[np.uint8]:
    """One bit for each node."""
    marked = np.zeros(nodes, np.bool_)
    marked[list(absent)] = True
    return np.packbits(marked)


def _absent(payload: Payload, nodes: int) -> frozenset[NodeId]:
    bits = payload.arrays.get("absent")
    if bits is None:
        return frozenset()
    if bits.dtype != np.uint8 or bits.shape != ((nodes + 7) // 8,):
        raise MessageError(f"expected one bit of 'absent' for each of {nodes} nodes")
    return frozenset(np.flatnonzero(np.unpackbits(bits, count=nodes)).tolist())
