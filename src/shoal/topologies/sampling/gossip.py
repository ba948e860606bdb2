"""Peers found by gossip: every node knows a few others, and exchanges what it knows with one of them each round.

The views are those of gossip-based peer sampling (Jelasity et al. 2007, `shoal.topologies.views`), with a round as
the paper's cycle. A view says whom a node may talk to, not who will talk to it. So that both ends of a link know of
it in time, a node asks for its links two rounds ahead, and whoever is asked says yes or no at once:

    round r      i picks peers from its view and asks each for a link in round r + 2
                 j says yes, unless it has settled round r + 2 already or was asked by enough others
    round r + 2  i and j both count each other among their peers

The first two rounds go over the links by which nodes come to know each other, a ring. A node has at most `degree`
links that it asked for and as many that it granted. With weights of 1/(1 + 2 · degree) for each the mixing matrix
is symmetric, so the mean of all models is kept, and no node has to know how many links its peers have.

A peer that let a node wait in vain, for an answer or for a model, is waited for no more until it is heard from again.
A node made anew from its state asks once more for the links whose answers it has not used: whoever granted one says
yes again. One that died and comes back knows of no links; the others forget those that they had with it, and it has the
links of its first two rounds with those that ask it in time.
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

AHEAD = 2
"""Rounds between asking for a link and using it: the answer travels while both ends train."""

LEAD = 256
"""Rounds that one who asks for a link may be further on; beyond, nobody promises anything."""

PUSH, PULL = "view push", "view pull"
ASK, ANSWER = "link asked", "link answered"


@dataclass(frozen=True)
class GossipSampler:
    """Jelasity et al. 2007: every node knows a few others, and finds new ones by gossip; links change each round."""

    traits: ClassVar[Traits] = Traits(discovers_peers=True)

    degree: Annotated[int, Bounds(at_least=1)] = 3
    """Links that a node asks for in a round; it grants others as many."""
    view: Annotated[int, Bounds(at_least=2)] = 30
    """How many others a node knows: the paper's c."""
    healer: Annotated[int, Bounds(at_least=0)] = 1
    """H: how many of the oldest are dropped first, so that the dead are forgotten."""
    swapper: Annotated[int, Bounds(at_least=0)] = 14
    """S: how many of those just sent are dropped first, so that all are known by about as many."""
    select: Literal["random", "oldest"] = "random"
    """With whom to exchange views."""
    patience: Annotated[float, Bounds(above=0)] = 10.0
    """Seconds to wait for an answer to a link that was asked for, if no `receive_timeout` is shorter; one that has left
    does not answer."""

    def __post_init__(self) -> None:
        self.policy()

    def policy(self) -> ViewPolicy:
        return ViewPolicy(self.view, self.healer, self.swapper, self.select)

    def build(self, nodes: int, seed: int) -> Graph:
        """The links by which nodes come to know each other."""
        return Ring().build(nodes, seed)

    def discovery(self) -> GossipDiscovery:
        return GossipDiscovery(self)


class GossipDiscovery:
    """The finder of nodes that ask around."""

    def __init__(self, sampler: GossipSampler) -> None:
        self._sampler = sampler
        self._weight = 1.0 / (1 + 2 * sampler.degree)
        self._view: View | None = None
        self._links: dict[int, set[NodeId]] = {}
        self._granted: dict[int, int] = {}
        self._asked: dict[int, tuple[NodeId, ...]] = {}
        self._silent: set[NodeId] = set()
        """Those that were waited for in vain, and have not been heard from since."""
        self._returns: dict[NodeId, int] = {}
        self._settled = -1
        self._current = Peers((), {})
        self._listens = False
        self._resumes = False

    @property
    def known(self) -> tuple[NodeId, ...]:
        """Whom the node knows now."""
        return () if self._view is None else self._view.peers

    async def peers(self, node: Node, round: int) -> Peers:
        """The links of this round. Rounds must be asked for in ascending order."""
        if round == self._settled:
            return self._current
        await self._begin(node, round)
        self._forget_returned(node)
        self._silent |= node.timed_out_peers
        granted = await self._granted_to(node, round)
        links = self._links.setdefault(round, set())
        links |= granted
        self._settle(round)
        if round < AHEAD:
            self._current = node.mixing.peers(node.id, round)
        else:
            heard = sorted(links - self._silent)
            self._current = Peers(tuple(sorted(links)), dict.fromkeys(heard, self._weight))
        await self._look_around(node, round)
        return self._current

    def state(self) -> State:
        return {
            "view": None if self._view is None else self._view.state(),
            "links": {str(round): sorted(links) for round, links in self._links.items()},
            "granted": {str(round): count for round, count in self._granted.items()},
            "asked": {str(round): list(peers) for round, peers in self._asked.items()},
            "settled": self._settled,
            "silent": sorted(self._silent),
            "to": list(self._current.to),
            "of": list(self._current.weights),
            "weights": list(self._current.weights.values()),
        }

    def restore(self, state: State) -> None:
        if state["view"] is not None:
            self._view = View(0, self._sampler.policy())
            self._view.restore(state["view"])
        self._links = {int(round): set(links) for round, links in state["links"].items()}
        self._granted = {int(round): count for round, count in state["granted"].items()}
        self._asked = {int(round): tuple(peers) for round, peers in state["asked"].items()}
        self._settled = state["settled"]
        self._silent = set(state["silent"])
        self._current = Peers(tuple(state["to"]), dict(zip(state["of"], state["weights"], strict=True)))
        self._resumes = True

    async def _begin(self, node: Node, round: int) -> None:
        if self._view is None:
            self._returns = dict(node.rejoin_counts)
            self._view = View(node.id, self._sampler.policy(), node.mixing.peers(node.id, round).to)
        self._view.node = node.id
        if not self._listens:
            self._listens = True
            node.background(self._answer_pushes(node))
            node.background(self._take_pulls(node))
            node.background(self._answer_requests(node))
        if self._resumes:
            self._resumes = False
            for wanted, peers in self._asked.items():
                await node.send(peers, Payload({}), round=wanted, kind=ASK)

    async def _granted_to(self, node: Node, round: int) -> set[NodeId]:
        """Those that said yes to a link in this round."""
        asked = self._asked.pop(round, ())
        waited_for = [peer for peer in asked if peer not in self._silent]
        patience = min(self._sampler.patience, node.receive_timeout or math.inf)
        answers = await node.receive_each(waited_for, round=round, kind=ANSWER, timeout=patience)
        self._silent |= node.timed_out_peers
        said = dict(answers)
        for peer in sorted(set(asked).difference(waited_for)):
            late = await node.receive(kind=ANSWER, round=round, sender=peer, timeout=0.0)
            if late is not None:
                said[peer] = late.payload
        self._silent -= said.keys()
        return {peer for peer, payload in said.items() if payload.fields.get("yes") is True}

    def _forget_returned(self, node: Node) -> None:
        """Take back what was agreed with those that died since, and came back."""
        for peer, times in node.rejoin_counts.items():
            if times == self._returns.get(peer):
                continue
            self._returns[peer] = times
            self._asked = {round: tuple(p for p in asked if p != peer) for round, asked in self._asked.items()}
            for links in self._links.values():
                links.discard(peer)

    def _settle(self, round: int) -> None:
        """From now on the links of `round` stay as they are."""
        self._settled = round
        for table in (self._links, self._granted):
            for past in [r for r in table if r < round]:
                del table[past]

    async def _look_around(self, node: Node, round: int) -> None:
        """Exchange views with one that is known, and ask some for links."""
        assert self._view is not None
        rng = node.rng("peer sampling")
        for lost in self._silent.union(node.failed_peers):
            self._view.forget(lost)
        peer = self._view.select_peer(rng)
        if peer is not None:
            await node.send([peer], _payload(self._view.to_send(rng)), round=round, kind=PUSH)
        wanted = round + AHEAD
        known = sorted(self._view.peers)
        some = rng.choice(known, min(self._sampler.degree, len(known)), replace=False).tolist() if known else []
        self._asked[wanted] = tuple(sorted(some))
        await node.send(self._asked[wanted], Payload({}), round=wanted, kind=ASK)

    async def _answer_pushes(self, node: Node) -> None:
        assert self._view is not None
        rng = node.rng("peer sampling")
        while (message := await node.receive(kind=PUSH)) is not None:
            self._silent.discard(message.sender)
            answer = self._view.to_send(rng)
            if self._absorb(node, message):
                await node.send([message.sender], _payload(answer), round=message.round, kind=PULL)

    async def _take_pulls(self, node: Node) -> None:
        while (message := await node.receive(kind=PULL)) is not None:
            self._silent.discard(message.sender)
            self._absorb(node, message)

    async def _answer_requests(self, node: Node) -> None:
        while (message := await node.receive(kind=ASK)) is not None:
            if message.sender >= node.nodes or message.sender == node.id:
                node.reject(message.sender, "a link with one that does not learn")
                continue
            self._forget_returned(node)
            self._silent.discard(message.sender)
            wanted = message.round
            linked = message.sender in self._links.get(wanted, ())
            not_yet = self._settled < wanted <= self._settled + AHEAD + LEAD
            yes = linked or (not_yet and self._granted.get(wanted, 0) < self._sampler.degree)
            if yes and not linked:
                self._granted[wanted] = self._granted.get(wanted, 0) + 1
                self._links.setdefault(wanted, set()).add(message.sender)
            await node.send([message.sender], Payload({}, {"yes": yes}), round=wanted, kind=ANSWER)

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
    """What a peer knows, of nodes that there are; the view checks the rest."""
    try:
        ids, ages = payload.arrays["ids"], payload.arrays["ages"]
    except KeyError as error:
        raise MessageError(f"a view without {error}") from error
    if ids.dtype.kind in "iu" and ids.size and int(ids.max()) >= nodes:
        raise MessageError(f"a view that knows node {int(ids.max())}; expected ids below {nodes}")
    return Descriptors(ids, ages)
