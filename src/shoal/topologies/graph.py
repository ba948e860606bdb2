"""What a graph is to the nodes on it, and how links become the weights of an average.

A topology is a recipe with one method, `build(nodes, seed) -> Graph`. A graph answers, for any node and
round, whom the node sends to and whom it hears from. It answers alike in every process that builds it from
the same seed: nobody coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from shoal.types import NodeId

WeightScheme: TypeAlias = Literal["metropolis-hastings", "uniform"]
Found = TypeVar("Found")

REMEMBERED_DEGREE = 1024
"""Static rows up to this long are kept: those of a full graph of 10,000 nodes would be n² weights."""


@dataclass(frozen=True, slots=True)
class Links:
    """A node's links in one round, each list in ascending order. Equal lists on an undirected graph."""

    to: tuple[NodeId, ...]
    of: tuple[NodeId, ...]


class TopologyWarning(UserWarning):
    """A graph that can be used, but hardly means what its author meant: a disconnected one, say."""


class Graph(Protocol):
    """Who is linked to whom, round by round."""

    nodes: int
    static: bool
    """Whether every round has the links of round 0."""

    def links(self, node: NodeId, round: int) -> Links: ...

    def degree(self, node: NodeId, round: int) -> int:
        """How many nodes `node` hears from in this round."""
        ...


class Topology(Protocol):
    """A recipe for a graph; its parameters are those of its constructor."""

    def build(self, nodes: int, seed: int) -> Graph: ...


@runtime_checkable
class TopologyWrapper(Protocol):
    """A topology that uses the graph of another one, such as a peer sampler."""

    @property
    def inner(self) -> Topology: ...


@runtime_checkable
class FromLabels(Protocol):
    """A topology that is made from who holds what. Optional: whoever knows the labels asks for this first.

    Its `build` raises `TopologyError`, for it cannot know the data.
    """

    def build_from(self, labels: NDArray[np.int64], seed: int) -> Graph:
        """The graph for nodes of which node i holds `labels[i, c]` samples of class c. Equal wherever these are."""
        ...


@dataclass(frozen=True, slots=True)
class Peers:
    """What a node knows of its neighbours in a round: whom to tell, whom to hear, how much each counts."""

    to: tuple[NodeId, ...]
    weights: Mapping[NodeId, float]
    """The mixing weight of each this node hears from, in ascending order of id; its own is the rest to 1."""

    def weights_of(self, answered: Sequence[NodeId] | Mapping[NodeId, object]) -> dict[NodeId, float]:
        """The weights of those that answered, renormalised so that they and the own weight sum to 1."""
        if len(answered) == len(self.weights):
            return dict(self.weights)
        present = {peer: self.weights[peer] for peer in answered}
        own = 1.0 - sum(self.weights.values())
        total = own + sum(present.values())
        if total <= 0.0:  # the own weight is 0 and nobody answered: keep the own model
            return {}
        return {peer: weight / total for peer, weight in present.items()}


class Mixing:
    """A graph with weights: row `node` of the mixing matrix W of each round.

    Metropolis-Hastings weights, 1/(1 + max(d_i, d_j)), make W doubly stochastic on every undirected graph and
    on directed graphs where all degrees are equal. Uniform weights, 1/(1 + d_i), make its rows sum to 1.
    """

    def __init__(self, graph: Graph, scheme: WeightScheme = "metropolis-hastings") -> None:
        self.graph = graph
        self.scheme = scheme
        self._known: dict[NodeId, Peers] = {}

    def peers(self, node: NodeId, round: int) -> Peers:
        if not self.graph.static:
            return self._peers(node, round)
        known = self._known.get(node)
        if known is None:
            known = self._peers(node, 0)
            if len(known.weights) <= REMEMBERED_DEGREE:
                self._known[node] = known
        return known

    def _peers(self, node: NodeId, round: int) -> Peers:
        graph = self.graph
        links = graph.links(node, round)
        own = len(links.of)
        if self.scheme == "uniform":
            weights = dict.fromkeys(links.of, 1.0 / (1 + own))
        else:
            weights = {peer: 1.0 / (1 + max(own, graph.degree(peer, round))) for peer in links.of}
        return Peers(links.to, weights)


def cached_per_mixing(find: Callable[[Mixing], Found]) -> Callable[[Mixing], Found]:
    """`find`, worked out once for all nodes that share a mixing, and kept for as long as that is."""
    known: WeakKeyDictionary[Mixing, Found] = WeakKeyDictionary()

    @wraps(find)
    def found(mixing: Mixing) -> Found:
        if mixing not in known:
            known[mixing] = find(mixing)
        return known[mixing]

    return found
