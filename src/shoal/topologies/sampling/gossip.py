"""Peers found by gossip: every node knows a few others, and exchanges its view with one of them in each round.

The views are those of gossip-based peer sampling (Jelasity et al. 2007, `shoal.topologies.views`), with a round as
the paper's cycle. A view gives the peers that a node may send to, not the peers that will send to it. So that both ends
of a link know of it in time, a node requests its links two rounds ahead, and the peer answers at once:

    round r      i chooses peers from its view and requests a link in round r + 2 from each
                 j grants it, unless it has fixed round r + 2 already or has granted enough other requests
    round r + 2  i and j are peers

The first two rounds use the initial links of the nodes, a ring. A node has at most `degree` links that it requested and
as many that it granted. With the weight 1/(1 + 2 · degree) for each, the mixing matrix is symmetric, so the mean of all
models is kept, and no node has to know how many links its peers have.

A node does not wait for a peer that timed out, with an answer or a model, until it receives from that peer again. A
restored node repeats its requests for links whose answers it has not used; peers grant them again. A node that rejoins
has no links: the others drop their links with it, and in its first two rounds it has links to the nodes that request
them in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.state import State
from shoal.topologies.graph import Graph, Peers
from shoal.topologies.static import Ring
from shoal.topologies.views import Descriptors, View, ViewPolicy
from shoal.traits import Traits
from shoal.types import Bounds, NodeId

REQUEST_AHEAD = 2
"""Rounds between the request for a link and its use: the answer travels while both ends train."""

MAX_LEAD = 256
"""Rounds that the sender of a request may be ahead; requests beyond are not granted."""

PUSH, PULL = "view push", "view pull"
REQUEST, ANSWER = "link asked", "link answered"
GRANTED = "yes"


@dataclass(frozen=True)
class GossipSampler:
    """Jelasity et al. 2007: nodes know a few others and find new ones by gossip; links change every round."""

    traits: ClassVar[Traits] = Traits(discovers_peers=True)

    degree: Annotated[int, Bounds(at_least=1)] = 3
    """The number of links that a node requests in a round; it grants as many to others."""
    view: Annotated[int, Bounds(at_least=2)] = 30
    """The size of a view: the paper's c."""
    healer: Annotated[int, Bounds(at_least=0)] = 1
    """H: the number of oldest entries that are dropped first, so that failed nodes disappear."""
    swapper: Annotated[int, Bounds(at_least=0)] = 14
    """S: the number of just sent entries that are dropped first, so that every node is in about as many views."""
    select: Literal["random", "oldest"] = "random"
    """The peer to exchange views with."""
    patience: Annotated[float, Bounds(above=0)] = 10.0
    """Seconds to wait for the answer to a request, if no `receive_timeout` is shorter. A finished node does not
    answer."""

    def __post_init__(self) -> None:
        self.policy()

    def policy(self) -> ViewPolicy:
        return ViewPolicy(self.view, self.healer, self.swapper, self.select)

    def build(self, nodes: int, seed: int) -> Graph:
        """Return the initial links of the nodes."""
        return Ring().build(nodes, seed)

    def discovery(self) -> GossipDiscovery:
        return GossipDiscovery(self)


class GossipDiscovery:
    """Exchanges views, and requests and grants links."""

    def __init__(self, sampler: GossipSampler) -> None:
        self._sampler = sampler
        self._weight = 1.0 / (1 + 2 * sampler.degree)
        self._view: View | None = None
        self._links: dict[int, set[NodeId]] = {}
        self._granted: dict[int, int] = {}
        self._requested: dict[int, tuple[NodeId, ...]] = {}
        self._timed_out: set[NodeId] = set()
        """The peers that timed out, and have sent nothing since."""
        self._rejoin_counts: dict[NodeId, int] = {}
        self._fixed_round = -1
        self._current = Peers((), {})
        self._started = False
        self._restored = False

    @property
    def known(self) -> tuple[NodeId, ...]:
        """The nodes in the view."""
        return () if self._view is None else self._view.peers

    async def peers(self, node: Node, round: int) -> Peers:
        """Return the links of this round. Rounds must be requested in ascending order."""
        if round == self._fixed_round:
            return self._current
        await self._start(node, round)
        self._drop_rejoined(node)
        self._timed_out |= node.timed_out_peers
        granted = await self._receive_answers(node, round)
        links = self._links.setdefault(round, set())
        links |= granted
        self._fix_round(round)
        if round < REQUEST_AHEAD:
            self._current = node.mixing.peers(node.id, round)
        else:
            senders = sorted(links - self._timed_out)
            self._current = Peers(tuple(sorted(links)), dict.fromkeys(senders, self._weight))
        await self._gossip(node, round)
        return self._current

    def state(self) -> State:
        return {
            "view": None if self._view is None else self._view.state(),
            "links": {str(round): sorted(links) for round, links in self._links.items()},
            "granted": {str(round): count for round, count in self._granted.items()},
            "requested": {str(round): list(peers) for round, peers in self._requested.items()},
            "fixed_round": self._fixed_round,
            "timed_out": sorted(self._timed_out),
            "to": list(self._current.receivers),
            "of": list(self._current.weights),
            "weights": list(self._current.weights.values()),
        }

    def restore(self, state: State) -> None:
        if state["view"] is not None:
            self._view = View(0, self._sampler.policy())
            self._view.restore(state["view"])
        self._links = {int(round): set(links) for round, links in state["links"].items()}
        self._granted = {int(round): count for round, count in state["granted"].items()}
        self._requested = {int(round): tuple(peers) for round, peers in state["requested"].items()}
        self._fixed_round = state["fixed_round"]
        self._timed_out = set(state["timed_out"])
        self._current = Peers(tuple(state["to"]), dict(zip(state["of"], state["weights"], strict=True)))
        self._restored = True

    async def _start(self, node: Node, round: int) -> None:
        if self._view is None:
            self._rejoin_counts = dict(node.rejoin_counts)
            self._view = View(node.id, self._sampler.policy(), node.mixing.peers(node.id, round).receivers)
        self._view.node = node.id
        if not self._started:
            self._started = True
            node.background(self._receive_pushes(node))
            node.background(self._receive_pulls(node))
            node.background(self._answer_requests(node))
        if self._restored:
            self._restored = False
            for wanted, peers in self._requested.items():
                await node.send(peers, Payload({}), round=wanted, kind=REQUEST)

    async def _receive_answers(self, node: Node, round: int) -> set[NodeId]:
        """Return the peers that granted a link in this round."""
        requested = self._requested.pop(round, ())
        awaited = [peer for peer in requested if peer not in self._timed_out]
        timeout = min(self._sampler.patience, node.receive_timeout or math.inf)
        received = await node.receive_each(awaited, round=round, kind=ANSWER, timeout=timeout)
        self._timed_out |= node.timed_out_peers
        answers = dict(received)
        for peer in sorted(set(requested).difference(awaited)):
            late = await node.receive(kind=ANSWER, round=round, sender=peer, timeout=0.0)
            if late is not None:
                answers[peer] = late.payload
        self._timed_out -= answers.keys()
        return {peer for peer, payload in answers.items() if payload.fields.get(GRANTED) is True}

    def _drop_rejoined(self, node: Node) -> None:
        """Drop requests to and links with nodes that have failed and rejoined since."""
        for peer, times in node.rejoin_counts.items():
            if times == self._rejoin_counts.get(peer):
                continue
            self._rejoin_counts[peer] = times
            self._requested = {r: tuple(p for p in peers if p != peer) for r, peers in self._requested.items()}
            for links in self._links.values():
                links.discard(peer)

    def _fix_round(self, round: int) -> None:
        """Fix the links of `round`, and drop those of earlier rounds."""
        self._fixed_round = round
        for table in (self._links, self._granted):
            for past in [r for r in table if r < round]:
                del table[past]

    async def _gossip(self, node: Node, round: int) -> None:
        """Exchange views with one known node, and request links from some."""
        assert self._view is not None
        rng = node.rng("peer sampling")
        for unreachable in self._timed_out.union(node.failed_peers):
            self._view.drop(unreachable)
        peer = self._view.select_peer(rng)
        if peer is not None:
            await node.send([peer], _payload(self._view.to_send(rng)), round=round, kind=PUSH)
        wanted = round + REQUEST_AHEAD
        known = sorted(self._view.peers)
        chosen = rng.choice(known, min(self._sampler.degree, len(known)), replace=False).tolist() if known else []
        self._requested[wanted] = tuple(sorted(chosen))
        await node.send(self._requested[wanted], Payload({}), round=wanted, kind=REQUEST)

    async def _receive_pushes(self, node: Node) -> None:
        assert self._view is not None
        rng = node.rng("peer sampling")
        while (message := await node.receive(kind=PUSH)) is not None:
            self._timed_out.discard(message.sender)
            answer = self._view.to_send(rng)
            if self._absorb(node, message):
                await node.send([message.sender], _payload(answer), round=message.round, kind=PULL)

    async def _receive_pulls(self, node: Node) -> None:
        while (message := await node.receive(kind=PULL)) is not None:
            self._timed_out.discard(message.sender)
            self._absorb(node, message)

    async def _answer_requests(self, node: Node) -> None:
        while (message := await node.receive(kind=REQUEST)) is not None:
            if message.sender >= node.nodes or message.sender == node.id:
                node.reject(message.sender, "links are for training nodes only")
                continue
            self._drop_rejoined(node)
            self._timed_out.discard(message.sender)
            wanted = message.round
            linked = message.sender in self._links.get(wanted, ())
            in_time = self._fixed_round < wanted <= self._fixed_round + REQUEST_AHEAD + MAX_LEAD
            grants = linked or (in_time and self._granted.get(wanted, 0) < self._sampler.degree)
            if grants and not linked:
                self._granted[wanted] = self._granted.get(wanted, 0) + 1
                self._links.setdefault(wanted, set()).add(message.sender)
            await node.send([message.sender], Payload({}, {GRANTED: grants}), round=wanted, kind=ANSWER)

    def _absorb(self, node: Node, message: Message) -> bool:
        assert self._view is not None
        try:
            self._view.absorb(_descriptors(message.payload, node.nodes), node.rng("peer sampling"))
        except MessageError as error:
            node.reject(message.sender, str(error))
            return False
        self._view.increase_age()
        return True


def _payload(descriptors: Descriptors) -> Payload:
    return Payload({"ids": descriptors.ids, "ages": descriptors.ages})


def _descriptors(payload: Payload, nodes: int) -> Descriptors:
    """Return the entries of a peer's view, if all nodes exist; the view checks the rest. Raises `MessageError`."""
    try:
        ids, ages = payload.arrays["ids"], payload.arrays["ages"]
    except KeyError as error:
        raise MessageError(f"a view without {error}") from error
    if ids.dtype.kind in "iu" and ids.size and int(ids.max()) >= nodes:
        raise MessageError(f"a view with node {int(ids.max())}; expected ids below {nodes}")
    return Descriptors(ids, ages)
