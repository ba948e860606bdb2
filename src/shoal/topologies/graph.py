"""The graph of a run, and the mixing weights of its links.

A topology has one method, `build(nodes, seed) -> Graph`. A graph gives the receivers and the senders of any node in any
round. It gives the same answers in every process that builds it from the same seed, so no coordination is needed.
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
Result = TypeVar("Result")

MAX_CACHED_DEGREE = 1024
"""Static rows up to this length are cached: those of a full graph of 10,000 nodes would be n² weights."""


@dataclass(frozen=True, slots=True)
class Links:
    """A node's links in one round, in ascending order. On an undirected graph both tuples are equal."""

    receivers: tuple[NodeId, ...]
    senders: tuple[NodeId, ...]


class TopologyWarning(UserWarning):
    """A graph is usable but probably not intended, such as a disconnected one."""


class Graph(Protocol):
    """The links of every node in every round."""

    nodes: int
    static: bool
    """Whether all rounds have the links of round 0."""

    def links(self, node: NodeId, round: int) -> Links: ...

    def degree(self, node: NodeId, round: int) -> int:
        """The number of nodes that send to `node` in this round."""
        ...


class Topology(Protocol):
    """A recipe for a graph. Its options are the parameters of its constructor."""

    def build(self, nodes: int, seed: int) -> Graph: ...


@runtime_checkable
class TopologyWrapper(Protocol):
    """A topology that uses the graph of another one, such as a peer sampler."""

    @property
    def sampled_topology(self) -> Topology:
        """The topology whose graph is built in place of this one's."""
        ...


class FromLabels(Protocol):
    """A topology that is built from the labels that nodes hold (trait `needs_labels`).

    Its `build` raises `TopologyError`, because it does not know the data.
    """

    def build_from(self, labels: NDArray[np.int64], seed: int) -> Graph:
        """Return the graph; node i holds `labels[i, c]` samples of class c. Equal arguments give equal graphs."""
        ...


@dataclass(frozen=True, slots=True)
class Peers:
    """The neighbours of a node in a round: its receivers, and the weights of its senders."""

    receivers: tuple[NodeId, ...]
    weights: Mapping[NodeId, float]
    """The mixing weight of each sender, in ascending order of id. The node's own weight is 1 minus their sum."""

    def weights_of(self, answered: Sequence[NodeId] | Mapping[NodeId, object]) -> dict[NodeId, float]:
        """Return the weights of the peers that answered, renormalised to sum to 1 with the node's own weight."""
        if len(answered) == len(self.weights):
            return dict(self.weights)
        present = {peer: self.weights[peer] for peer in answered}
        own = 1.0 - sum(self.weights.values())
        total = own + sum(present.values())
        if total <= 0.0:  # the own weight is 0 and no peer answered: the node keeps its model
            return {}
        return {peer: weight / total for peer, weight in present.items()}


class Mixing:
    """A graph with weights: row `node` of the mixing matrix W of each round.

    Metropolis-Hastings weights, 1/(1 + max(d_i, d_j)), make W doubly stochastic on every undirected graph, and on
    directed graphs with equal degrees. Uniform weights, 1/(1 + d_i), make its rows sum to 1.
    """

    def __init__(self, graph: Graph, scheme: WeightScheme = "metropolis-hastings") -> None:
        self.graph = graph
        self.scheme = scheme
        self._cached: dict[NodeId, Peers] = {}

    def peers(self, node: NodeId, round: int) -> Peers:
        if not self.graph.static:
            return self._peers(node, round)
        cached = self._cached.get(node)
        if cached is None:
            cached = self._peers(node, 0)
            if len(cached.weights) <= MAX_CACHED_DEGREE:
                self._cached[node] = cached
        return cached

    def _peers(self, node: NodeId, round: int) -> Peers:
        graph = self.graph
        links = graph.links(node, round)
        own = len(links.senders)
        if self.scheme == "uniform":
            weights = dict.fromkeys(links.senders, 1.0 / (1 + own))
        else:
            weights = {peer: 1.0 / (1 + max(own, graph.degree(peer, round))) for peer in links.senders}
        return Peers(links.receivers, weights)


def cached_per_mixing(compute: Callable[[Mixing], Result]) -> Callable[[Mixing], Result]:
    """Decorate a function of a mixing: compute it once for all nodes that share the mixing, and cache the result."""
    results: WeakKeyDictionary[Mixing, Result] = WeakKeyDictionary()

    @wraps(compute)
    def cached(mixing: Mixing) -> Result:
        if mixing not in results:
            results[mixing] = compute(mixing)
        return results[mixing]

    return cached
