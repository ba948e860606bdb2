"""SWIFT: everybody trains at its own pace, and averages with what it last heard (Bornstein et al., arXiv:2210.14026).

Bornstein, Rabbani, Wang, Bedi, Huang: SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication,
ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from shoal.algorithms.support.vectors import average, check_vectors
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.graph import Graph, Mixing, cached_per_mixing
from shoal.topologies.inspection import changes, directed, graph_of
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

BROADCAST = "broadcast"


@dataclass(frozen=True)
class SWIFT:
    """Bornstein et al. 2022: tell the neighbours the model, train, average with what they said last; never wait.

    In an iteration, with u = train(x_i) − x_i: x_i is sent to all neighbours; then x_i ← w_ii x_i + Σ_j w_ij x̂_j + u,
    where x̂_j is the last model heard of j, at first the one with which all began. With `skipped` = s, the paper's C_s,
    that is done in every (s + 1)-th iteration; in others x_i ← x_i + u.

    The weights are those of the paper's communication coefficient selection, see `coefficients`; the weights of the
    experiment are not used. The weight of a neighbour that has died stays with the node.

    Sending goes on in the background. With `queue` = "latest", a model that has not begun to leave when the next is
    there is replaced by it, for each neighbour by itself: what a slow link carries is never old. With "all", every
    model is handed to the network at once, and waits there for those before it. A node that is done says its last
    model.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    skipped: Annotated[int, Bounds(at_least=0)] = 0
    queue: Literal["latest", "all"] = "latest"

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        weights = coefficients_of(node.mixing)[node.id]
        heard = _Heard(node, weights)
        latest = _Latest(node)
        async for r in node.rounds(self.rounds):
            said = Payload({"params": node.params})
            if self.queue == "latest":
                latest.say(weights, said, r)
            else:
                await node.send(weights, said, round=r, kind=BROADCAST)
            step = await node.train(node.params) - node.params
            heard.listen()
            mixed = heard.mixed(node.params) if (r + 1) % (self.skipped + 1) == 0 else node.params
            node.params = mixed + step
        await node.send(weights, Payload({"params": node.params}), round=self.rounds, kind=BROADCAST)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        if not changes(experiment) and (graph is None or not directed(graph)):
            return []
        return [
            f"topology = {experiment.topology.name!r}: 'swift' averages with what lasting neighbours said, over links "
            "that go both ways; use a graph like topology = { name = 'ring' } or { name = 'regular' } without dynamic"
        ]


class _Heard:
    """The last model of each neighbour."""

    def __init__(self, node: Node, weights: Mapping[NodeId, float]) -> None:
        self._node = node
        self._weights = weights
        first: Params = node.memory.setdefault("first", node.params)
        known: dict[str, Any] = node.memory.setdefault("heard", {})
        self._known = known
        """By neighbour, as text for checkpoints: the round in which it said so, and the model."""
        for peer in weights:
            known.setdefault(str(peer), [-1, first])

    def listen(self) -> None:
        """Take all that has come."""
        node = self._node
        for message in node.collect(kind=BROADCAST, check=partial(_check, size=node.params.size)):
            if message.sender not in self._weights:
                node.reject(message.sender, "not a neighbour")
            elif message.round > self._known[str(message.sender)][0]:  # messages may overtake each other
                self._known[str(message.sender)] = [message.round, message.payload.arrays["params"]]

    def mixed(self, own: Params) -> Params:
        gone = self._node.failed_peers
        return average(own, {p: self._known[str(p)][1] for p in self._weights if p not in gone}, self._weights)


class _Latest:
    """Says to each peer the latest there is to say, in the background, one message at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._unsent: dict[NodeId, tuple[Payload, int]] = {}
        self._sending: set[NodeId] = set()

    def say(self, peers: Iterable[NodeId], payload: Payload, round: int) -> None:
        for peer in peers:
            self._unsent[peer] = payload, round
            if peer not in self._sending:
                self._sending.add(peer)
                self._node.background(self._send(peer))

    async def _send(self, peer: NodeId) -> None:
        while peer in self._unsent:
            payload, round = self._unsent.pop(peer)
            await self._node.transmit(peer, payload, round=round, kind=BROADCAST)
        self._sending.discard(peer)


def _check(payload: Payload, size: int) -> None:
    check_vectors(payload, size, ("params",))


# Weights


@cached_per_mixing
def coefficients_of(mixing: Mixing) -> list[dict[NodeId, float]]:
    """The coefficients of its graph."""
    return coefficients(mixing.graph)


def coefficients(graph: Graph) -> list[dict[NodeId, float]]:
    """What each node of a static undirected graph gives to the models of its neighbours; the rest is its own.

    The paper's communication coefficient selection for nodes of equal influence: in descending order of degree, a node
    takes what its neighbours of higher degree offer, and offers each of the others an equal share of what is left,
    keeping one for itself. Between nodes of equal degree, the smaller of the two offers holds. So the weights are
    symmetric, those of a node sum to 1 with its own, and its own is 1/n at least, as the paper demands.

    On some graphs the offers of nodes of higher degree come to more than a node has: three neighbours that offer half,
    say. Then it takes 1/(1 + its degree) of each that offers more, and these keep the difference: the weights still
    have those properties, which the rule by itself would break.
    """
    neighbours = [graph.links(node, 0).of for node in range(graph.nodes)]
    degrees = [len(peers) for peers in neighbours]
    weights: list[dict[NodeId, float]] = [{} for _ in neighbours]
    offers = [0.0] * graph.nodes
    for node in sorted(range(graph.nodes), key=lambda node: -degrees[node]):
        higher = [peer for peer in neighbours[node] if degrees[peer] > degrees[node]]
        lower = degrees[node] - len(higher)
        taken = {peer: offers[peer] for peer in higher}
        if (1.0 - sum(taken.values())) / (lower + 1) < 1.0 / graph.nodes:
            taken = {peer: min(offer, 1.0 / (1 + degrees[node])) for peer, offer in taken.items()}
        offers[node] = (1.0 - sum(taken.values())) / (lower + 1)
        for peer, weight in taken.items():
            weights[node][peer] = weights[peer][node] = weight
    for node, peers in enumerate(neighbours):
        for peer in peers:
            if degrees[peer] == degrees[node]:
                weights[node][peer] = min(offers[node], offers[peer])
    return [dict(sorted(of_node.items())) for of_node in weights]
