"""AD-PSGD: nodes train on, and average in pairs when two of them meet (Lian et al., ICML 2018, arXiv:1710.06952)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.topologies.graph import Graph, Mixing, TopologyWarning, once
from shoal.topologies.inspection import changes, directed, graph_of
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId

REQUEST, ANSWER, DONE = "average", "half the difference", "done"
ASK, HERE = "are you there", "here"
SINCE = "since"
HALF = np.float32(0.5)


@dataclass(frozen=True)
class ADPSGD:
    """Lian et al. 2018: compute a gradient on a copy of the model, average with one random neighbour, then step.

    In an iteration, with x̂ = x as it is at the beginning and u = train(x̂) − x̂: x_i and x_j ← (x_i + x_j)/2 at one
    stroke, with a random neighbour j, while i trains; then x_i ← x_i + u. What others make of x_i meanwhile stays.

    So that no two nodes wait for each other, links are those of a bipartite graph. The nodes on one side are active:
    each begins one exchange an iteration, and waits for its end when it is not over as soon as the training is. Those
    on the other are passive: they answer at once, while they train on, and never wait. The larger side is active, so
    that passive nodes are averaged about as often; of equal ones, that of the lowest node. With `bipartite` = "make",
    links within a side are left out of another graph, with a warning; with "require", such a graph is refused. Pairs
    average evenly: the weights of the experiment are not used.

    The active node i sends s = x_i; the passive j answers with h = (s − x_j)/2, and x_j ← x_j + h; when i hears that,
    x_i ← x_i − h. Steps made meanwhile commute with both, so all is as if it had happened at one stroke, and the mean
    of all models is kept but for rounding. A request that is heard twice is answered twice and counts once; an answer
    that comes when it was given up on counts all the same. Nodes that are done answer for as long as others ask.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    bipartite: Literal["make", "require"] = "make"
    patience: Annotated[float, Bounds(above=0)] | None = None
    """Seconds to wait for an answer before asking again; when not given, as long as the experiment or the engine has
    patience."""
    attempts: Annotated[int, Bounds(at_least=1)] = 3
    """How often to ask before going on without an answer."""

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        sides = sides_of(node.mixing)
        if node.id == 0 and sides.dropped:
            node.event("links left out", f"{sides.dropped} of {sides.links} links are within a side, and not used")
        if node.id in sides.active:
            await self._initiate(node, sides.neighbours[node.id])
        else:
            await self._respond(node, sides.neighbours[node.id])

    async def _initiate(self, node: Node, passive: tuple[NodeId, ...]) -> None:
        exchanges = _Exchanges(node, passive)
        node.background(_say_here(node))
        async for r in node.rounds(self.rounds):
            exchanges.settle_late()
            before = node.params
            peer = await exchanges.begin(r)
            step = await node.train(before) - before
            if peer is not None:
                await self._finish(node, exchanges, peer, r)
            node.params = node.params + step
        exchanges.settle_late()
        await node.send(passive, Payload({}), round=self.rounds - 1, kind=DONE)

    async def _finish(self, node: Node, exchanges: _Exchanges, peer: NodeId, number: int) -> None:
        """Wait for the answer. Who kept silent the last time is asked once."""
        attempts = 1 if exchanges.missed[peer] else self.attempts
        for attempt in range(1, attempts + 1):
            if await exchanges.answered(peer, number, self.patience) or peer in node.failed_peers:
                return
            if attempt < attempts:
                await exchanges.ask(peer, number)
        exchanges.missed[peer] += 1
        node.event("no answer", f"round {number}: gave up on node {peer} after asking {attempts} times")

    async def _respond(self, node: Node, active: tuple[NodeId, ...]) -> None:
        waiting = dict.fromkeys(active, 0)
        node.background(_answer(node, frozenset(active)))
        async for r in node.rounds(self.rounds):
            before = node.params
            step = await node.train(before) - before
            node.params = node.params + step
            if r == self.rounds - 1:
                await self._outlast(node, waiting)  # in the last round: what is evaluated after it is the last model
        await self._outlast(node, waiting)  # for one that came back too late to have a round

    async def _outlast(self, node: Node, in_vain: dict[NodeId, int]) -> None:
        """Wait until all active neighbours are done, or dead, or do not even say that they are there.

        `in_vain` is how often running each was asked whether it is; those that are done are taken out.
        """
        asked = 0
        while waiting := [p for p, times in in_vain.items() if times < self.attempts and p not in node.failed_peers]:
            done = await node.receive_first(waiting, kind=DONE, timeout=self.patience)
            if done is not None:
                del in_vain[done.sender]
                continue
            await node.send(waiting, Payload({}), round=asked, kind=ASK)
            here = await node.receive_each(waiting, round=asked, kind=HERE, timeout=self.patience)
            in_vain.update({peer: 0 if peer in here else in_vain[peer] + 1 for peer in waiting})
            asked += 1

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        if changes(experiment) or (graph is not None and directed(graph)):
            return [
                f"topology = {experiment.topology.name!r}: 'adpsgd' averages in pairs over links that stay as they are "
                "and go both ways; use a graph like { name = 'ring' } or { name = 'regular' } without dynamic"
            ]
        sides = None if graph is None else bipartition(graph)
        if sides is None or not sides.dropped:
            return []
        if self.bipartite == "require":
            return [
                f"topology = {experiment.topology.name!r}: the graph is not bipartite, {sides.dropped} of "
                f"{sides.links} links stand in the way; use algorithm.bipartite = 'make' to leave them out, or a "
                "bipartite graph such as a ring of an even number of nodes, a grid or a tree"
            ]
        warnings.warn(
            f"'adpsgd' needs a bipartite graph, which topology {experiment.topology.name!r} is not: {sides.dropped} of "
            f"its {sides.links} links are left out",
            TopologyWarning,
            stacklevel=2,
        )
        return []


# The active side


class _Exchanges:
    """What an active node has under way. An exchange is numbered by its round: there is one in each.

    A node that died and came back counts anew: `since` tells its exchanges from those that it had before.
    """

    def __init__(self, node: Node, passive: tuple[NodeId, ...]) -> None:
        self._node = node
        self._passive = passive
        self._open: set[tuple[NodeId, int]] = set()
        """Who was asked in which exchange, and has not answered yet."""
        self._said = Payload({})
        self._since = node.now()
        self.missed = dict.fromkeys(passive, 0)
        """How often running each was asked in vain."""

    async def begin(self, number: int) -> NodeId | None:
        """Ask a random neighbour, rarely one that has kept silent; None when nobody is left."""
        node, gone = self._node, self._node.failed_peers
        left = [peer for peer in self._passive if peer not in gone]
        if not left:
            return None
        likely = np.array([1 / (1 + self.missed[peer]) for peer in left])
        peer = left[int(node.rng("neighbours").choice(len(left), p=likely / likely.sum()))]
        self._open.add((peer, number))
        self._said = Payload({"params": node.params}, {SINCE: self._since})
        await self.ask(peer, number)
        return peer

    async def ask(self, peer: NodeId, number: int) -> None:
        """Ask for an average with the model as it was when the exchange began."""
        await self._node.send([peer], self._said, round=number, kind=REQUEST)

    async def answered(self, peer: NodeId, number: int, patience: float | None) -> bool:
        """Wait until this exchange is over; False when it is not in time."""
        node = self._node
        until = None if patience is None else node.now() + patience
        while (peer, number) in self._open:
            left = None if until is None else max(0.0, until - node.now())
            message = await node.receive(kind=ANSWER, sender=peer, timeout=left)
            if message is None:
                return False
            self._settle(message)
        return True

    def settle_late(self) -> None:
        """Take the answers that came after they were given up on: their other half is done."""
        for message in self._node.collect(kind=ANSWER):
            self._settle(message)

    def _settle(self, message: Message) -> None:
        node = self._node
        if (message.sender, message.round) not in self._open or message.payload.fields.get(SINCE) != self._since:
            return  # the answer to a request that was repeated, to one of an earlier life, or to none
        self._open.remove((message.sender, message.round))
        self.missed[message.sender] = 0
        if message.payload.fields.get("refused") is True:
            node.event("exchange refused", f"round {message.round}: node {message.sender} could not use the model")
            return
        try:
            check_vectors(message.payload, node.params.size, ("half",))
        except MessageError as error:
            node.reject(message, str(error))
        else:
            node.params = node.params - message.payload.arrays["half"]


async def _say_here(node: Node) -> None:
    while (asked := await node.receive(kind=ASK)) is not None:
        await node.send([asked.sender], Payload({}), round=asked.round, kind=HERE)


# The passive side


async def _answer(node: Node, active: frozenset[NodeId]) -> None:
    """Answer each request once, and say the same again to whoever asks again."""
    last: dict[NodeId, tuple[object, int, Payload]] = {}
    while (request := await node.receive(kind=REQUEST)) is not None:
        peer, number, since = request.sender, request.round, request.payload.fields.get(SINCE)
        if peer not in active:
            node.reject(request, "not an active neighbour")
            continue
        before, known, answer = last.get(peer, (since, -1, Payload({})))
        if since == before and number < known:
            continue  # a copy that was long under way: the peer has gone on
        if since != before or number > known:
            answer = _average(node, request)
            if since is not None:
                answer = Payload(answer.arrays, {**answer.fields, SINCE: since})
            last[peer] = since, number, answer
        await node.send([peer], answer, round=number, kind=ANSWER)


def _average(node: Node, request: Message) -> Payload:
    """Move the model half of the way; returns the half, for the other to move by as far."""
    try:
        check_vectors(request.payload, node.params.size, ("params",))
    except MessageError as error:
        node.reject(request, str(error))
        return Payload({}, {"refused": True})
    half = request.payload.arrays["params"] * HALF - node.params * HALF  # in this order nothing overflows
    if not np.isfinite(half).all():
        return Payload({}, {"refused": True})  # the own model has diverged: others are spared it
    node.params = node.params + half
    return Payload({"half": half})


# Two sides


@dataclass(frozen=True)
class Sides:
    """A graph without the links that would keep it from being bipartite."""

    active: frozenset[NodeId]
    neighbours: Mapping[NodeId, tuple[NodeId, ...]]
    links: int
    """How many the graph has,"""
    dropped: int
    """and how many of them are left out."""


@once
def sides_of(mixing: Mixing) -> Sides:
    """The two sides of its graph."""
    return bipartition(mixing.graph)


def bipartition(graph: Graph) -> Sides:
    """The two sides of a static undirected graph. What is connected stays so.

    Nodes take sides in turn along a depth-first tree, all of whose links are kept; links within a side are left out. Of
    a bipartite graph that is none. Of others about half of those that are not in the tree: depth first, since a tree of
    few levels would make a full graph a star.
    """
    neighbours = [graph.links(node, 0).of for node in range(graph.nodes)]
    side: dict[NodeId, int] = {}
    active: set[NodeId] = set()
    for root in range(graph.nodes):
        if root not in side:
            component = _take_sides(root, neighbours, side)
            first = {node for node in component if side[node] == 0}
            active |= first if 2 * len(first) >= len(component) else component - first
    kept = {node: tuple(p for p in peers if (p in active) != (node in active)) for node, peers in enumerate(neighbours)}
    links = sum(map(len, neighbours)) // 2
    return Sides(frozenset(active), kept, links, links - sum(map(len, kept.values())) // 2)


def _take_sides(root: NodeId, neighbours: list[tuple[NodeId, ...]], side: dict[NodeId, int]) -> set[NodeId]:
    """Walk depth first from `root`, sides 0 and 1 in turn; returns all that is reached."""
    side[root] = 0
    reached, path = {root}, [(root, iter(neighbours[root]))]
    while path:
        at, others = path[-1]
        peer = next((peer for peer in others if peer not in side), None)
        if peer is None:
            path.pop()
        else:
            side[peer] = 1 - side[at]
            reached.add(peer)
            path.append((peer, iter(neighbours[peer])))
    return reached
