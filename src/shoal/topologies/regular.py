"""Random regular graphs: one for all rounds, or a new one in each round."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from shoal.errors import TopologyError
from shoal.randomness import derived_seed, generator
from shoal.topologies.graph import Links
from shoal.topologies.permutation import Permutation
from shoal.topologies.recent_rounds import RecentRounds
from shoal.topologies.static import Edge, Layout, StaticGraph, undirected
from shoal.types import Bounds, NodeId

SHUFFLE_LIMIT = 256
"""Up to this number of nodes a round is a plain shuffle: exactly uniform, and as cheap as one keyed look-up."""
NODES_PER_LOOKUP = 64
"""One look-up costs as much as 64 entries of a table, so a table is built after nodes/64 look-ups."""


@dataclass(frozen=True)
class Regular:
    """A random connected graph of equal degrees; with `dynamic`, a new one in each round.

    The dynamic form is EL-Oracle of Epidemic Learning (de Vos et al. 2023) without the oracle: every node computes its
    own links of a round from the seed alone.
    """

    degree: Annotated[int, Bounds(at_least=1)] = 5
    dynamic: bool = False

    def build(self, nodes: int, seed: int) -> StaticGraph | RegularRounds:
        self._check_degree(nodes)
        if self.dynamic:
            return RegularRounds(nodes, self.degree, seed)
        return undirected(nodes, regular_edges(nodes, self.degree, derived_seed(seed, "topology")))

    def _check_degree(self, nodes: int) -> None:
        graph = f"{self.degree}-regular on {nodes} node{'s' if nodes != 1 else ''}"
        if nodes < 2:
            raise TopologyError(f"{graph}: a regular graph needs at least 2 nodes")
        if self.degree >= nodes:
            raise TopologyError(f"{graph}: the degree must be below the number of nodes; try degree = {nodes - 1}")
        if nodes * self.degree % 2:
            near = [d for d in (self.degree - 1, self.degree + 1) if 0 < d < nodes]
            raise TopologyError(
                f"{graph}: an odd number of nodes needs an even degree, as every link has two ends;"
                f" try degree = {' or '.join(map(str, near))}, or {nodes + 1} nodes"
            )


def regular_edges(nodes: int, degree: int, seed: int) -> list[Edge]:
    """Draw a random regular graph, connected if the degree is at least 2."""
    import networkx

    if degree == 2:  # connected only if it is one cycle through all nodes, which few draws are
        order = generator(seed, "topology").permutation(nodes).tolist()
        return list(zip(order, order[1:] + order[:1], strict=True))
    if 2 * degree >= nodes:  # always connected; its complement is drawn, because a dense draw would stall
        complement = networkx.random_regular_graph(nodes - 1 - degree, nodes, seed=seed)
        return list(networkx.complement(complement).edges)
    draws = 0
    while True:  # a random graph of degree 3 or more is connected with probability 1 - O(n^-2)
        graph = networkx.random_regular_graph(degree, nodes, seed=seed + draws)
        if degree == 1 or networkx.is_connected(graph):
            return list(graph.edges)
        draws += 1


class RegularRounds:
    """A new random regular graph in each round. Every node computes its links from the seed alone, in O(degree).

    The graph is a circle with a few random chords; a random permutation assigns its places to nodes. It is regular,
    simple and, from degree 2 on, connected in every round. It mixes as fast as a uniformly random regular graph: see
    docs/decisions/dynamic-regular-graphs.md.
    """

    static = False
    layout: Layout = "circle"

    def __init__(self, nodes: int, degree: int, seed: int) -> None:
        self.nodes = nodes
        self._degree = degree
        self.recent = RecentRounds(partial(_Round, nodes, degree, seed))

    def links(self, node: NodeId, round: int) -> Links:
        peers = self.recent.get(round).neighbours(node)
        return Links(peers, peers)

    def degree(self, node: NodeId, round: int) -> int:
        return self._degree


class _Round:
    """One round: the node at each place of the circle, and the lengths of its links."""

    def __init__(self, nodes: int, degree: int, seed: int, round: int) -> None:
        random = generator(seed, "topology", round)
        numbers = random.integers(1 << 32, size=4 + degree // 2, dtype=np.uint64).tolist()
        self._nodes = nodes
        self._lengths = link_lengths(nodes, degree, numbers[4:])
        self._lookups = 0
        self._permutation = Permutation(nodes, (numbers[0], numbers[1], numbers[2], numbers[3]))
        self._node_at: Callable[[int], NodeId] = self._permutation.forward
        self._place_of: Callable[[NodeId], int] = self._permutation.inverse
        self._tabulated = nodes <= SHUFFLE_LIMIT
        if self._tabulated:
            self._use_table(random.permutation(nodes))

    def neighbours(self, node: NodeId) -> tuple[NodeId, ...]:
        if not self._tabulated:
            self._lookups += 1
            # Build a table once single look-ups have cost as much. This costs at most twice as much as knowing
            # beforehand whether this process runs one node or all of them.
            if self._lookups * NODES_PER_LOOKUP > self._nodes:
                self._use_table(self._permutation.all_values())
        nodes, node_at, place = self._nodes, self._node_at, self._place_of(node)
        return tuple(sorted([node_at((place + length) % nodes) for length in self._lengths]))

    def _use_table(self, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._node_at = array("q", order.tobytes()).__getitem__
        self._place_of = array("q", places.tobytes()).__getitem__
        self._tabulated = True


def link_lengths(nodes: int, degree: int, numbers: list[int]) -> list[int]:
    """Return the lengths of links on the circle: 1, random others, the same backwards, n/2 for an odd degree."""
    first = [1] if degree > 1 else []
    others = degree // 2 - len(first)
    choices = (nodes + 1) // 2 - 2  # 2, 3, …, below half of the circle
    chosen: set[int] = set()
    for last, number in zip(range(choices - others, choices), numbers, strict=False):  # Floyd's sampling
        drawn = number % (last + 1)
        chosen.add(last if drawn in chosen else drawn)
    forwards = first + [2 + drawn for drawn in sorted(chosen)]
    return forwards + [nodes - length for length in forwards] + ([nodes // 2] if degree % 2 else [])
