"""Random graphs of equal degrees: one for all rounds, or a new one each round."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shoal.errors import TopologyError
from shoal.randomness import derived_seed, generator
from shoal.topologies.graph import Links
from shoal.topologies.permutation import Permutation
from shoal.topologies.static import Edge, Layout, StaticGraph, undirected
from shoal.types import Bounds, NodeId

REMEMBERED_ROUNDS = 3
SHUFFLED = 256
"""Up to so many nodes a round is a plain shuffle: exactly uniform, and as cheap as one keyed look-up."""
TABULATED_SHARE = 64
"""A round is tabulated once 1/64 of its nodes were asked for: what a table costs, in single look-ups."""


@dataclass(frozen=True)
class Regular:
    """A random graph of equal degrees, connected; with `dynamic`, a new one each round.

    The dynamic form is EL-Oracle of Epidemic Learning (de Vos et al. 2023) without the oracle: every node
    computes its own links of a round from the seed alone.
    """

    degree: Annotated[int, Bounds(at_least=1)] = 5
    dynamic: bool = False

    def build(self, nodes: int, seed: int) -> StaticGraph | RegularRounds:
        self._refuse_the_impossible(nodes)
        if self.dynamic:
            return RegularRounds(nodes, self.degree, seed)
        return undirected(nodes, regular_edges(nodes, self.degree, derived_seed(seed, "topology")))

    def _refuse_the_impossible(self, nodes: int) -> None:
        asked = f"{self.degree}-regular on {nodes} node{'s' if nodes != 1 else ''}"
        if nodes < 2:
            raise TopologyError(f"{asked}: a regular graph needs at least 2 nodes")
        if self.degree >= nodes:
            raise TopologyError(f"{asked}: the degree must be below the number of nodes; try degree = {nodes - 1}")
        if nodes * self.degree % 2:
            near = [d for d in (self.degree - 1, self.degree + 1) if 0 < d < nodes]
            raise TopologyError(
                f"{asked}: an odd number of nodes needs an even degree, as every link has two ends;"
                f" try degree = {' or '.join(map(str, near))}, or {nodes + 1} nodes"
            )


def regular_edges(nodes: int, degree: int, seed: int) -> list[Edge]:
    """A random regular graph, connected when the degree is at least 2."""
    import networkx

    if degree == 2:  # the connected ones are the cycles through all nodes, and nearly no other draw is one
        order = generator(seed, "topology").permutation(nodes).tolist()
        return list(zip(order, order[1:] + order[:1], strict=True))
    if 2 * degree >= nodes:  # always connected; drawn as the links that it lacks, for a dense draw would stall
        lacking = networkx.random_regular_graph(nodes - 1 - degree, nodes, seed=seed)
        return list(networkx.complement(lacking).edges)
    draws = 0
    while True:  # a random graph of degree 3 or more is connected with probability 1 - O(n^-2)
        graph = networkx.random_regular_graph(degree, nodes, seed=seed + draws)
        if degree == 1 or networkx.is_connected(graph):
            return list(graph.edges)
        draws += 1


class RegularRounds:
    """A new random regular graph each round, which every node finds from the seed alone, in O(degree).

    A circle with a few random chords, its places dealt to the nodes by a random permutation: regular, simple
    and, from degree 2 on, connected in every round. Why it mixes as fast as a uniformly random regular graph:
    docs/decisions/dynamic-regular-graphs.md.
    """

    static = False
    layout: Layout = "circle"

    def __init__(self, nodes: int, degree: int, seed: int) -> None:
        self.nodes = nodes
        self._degree = degree
        self._seed = seed
        self._rounds: dict[int, _Round] = {}

    def links(self, node: NodeId, round: int) -> Links:
        found = self._rounds.get(round)
        if found is None:
            found = self._rounds[round] = _Round(self.nodes, self._degree, self._seed, round)
            if len(self._rounds) > REMEMBERED_ROUNDS:
                del self._rounds[next(iter(self._rounds))]
        peers = found.neighbours(node)
        return Links(peers, peers)

    def degree(self, node: NodeId, round: int) -> int:
        return self._degree


class _Round:
    """One round: which node sits at which place of the circle, and how far its links reach from there."""

    def __init__(self, nodes: int, degree: int, seed: int, round: int) -> None:
        random = generator(seed, "topology", round)
        words = random.integers(1 << 32, size=4 + degree // 2, dtype=np.uint64).tolist()
        self._nodes = nodes
        self._reach = reaches(nodes, degree, words[4:])
        self._asked = 0
        self._permutation = Permutation(nodes, (words[0], words[1], words[2], words[3]))
        self._node_at: Callable[[int], NodeId] = self._permutation.forward
        self._place_of: Callable[[NodeId], int] = self._permutation.inverse
        self._tabulated = nodes <= SHUFFLED
        if self._tabulated:
            self._use(random.permutation(nodes))

    def neighbours(self, node: NodeId) -> tuple[NodeId, ...]:
        if not self._tabulated:
            self._asked += 1
            # Having spent on single look-ups what a table costs, make one: at most twice the price of knowing
            # beforehand whether this process serves one node or all of them.
            if self._asked * TABULATED_SHARE > self._nodes:
                self._use(self._permutation.to_table())
        nodes, node_at, place = self._nodes, self._node_at, self._place_of(node)
        return tuple(sorted([node_at((place + reach) % nodes) for reach in self._reach]))

    def _use(self, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._node_at = array("q", order.tobytes()).__getitem__
        self._place_of = array("q", places.tobytes()).__getitem__
        self._tabulated = True


def reaches(nodes: int, degree: int, words: list[int]) -> list[int]:
    """How far links go around the circle: 1, random others, all of them backwards, n/2 for an odd degree."""
    first = [1] if degree > 1 else []
    others = degree // 2 - len(first)
    choices = (nodes + 1) // 2 - 2  # 2, 3, …, below half of the circle
    chosen: set[int] = set()
    for last, word in zip(range(choices - others, choices), words, strict=False):  # Floyd's sampling
        drawn = word % (last + 1)
        chosen.add(last if drawn in chosen else drawn)
    forwards = first + [2 + drawn for drawn in sorted(chosen)]
    return forwards + [nodes - reach for reach in forwards] + ([nodes // 2] if degree % 2 else [])
