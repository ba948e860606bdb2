"""Cliques with the label distribution of all nodes, and few links between them.

Bellet, Kermarrec, Lavoie: D-Cliques: Compensating for Data Heterogeneity with Topology in Decentralized Federated
Learning, SRDS 2022 (arXiv:2104.07365). If each node holds few classes, its neighbours in any other sparse graph
hold few classes as well and bias its model towards them; the average over a clique has no such bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TopologyError
from shoal.randomness import generator
from shoal.topologies.graph import Links
from shoal.topologies.static import Edge, StaticGraph
from shoal.traits import Traits
from shoal.types import Bounds, NodeId

Between: TypeAlias = Literal["ring", "fractal", "small-world", "full"]
Clique: TypeAlias = tuple[NodeId, ...]
Counts: TypeAlias = NDArray[np.int64]
"""The number of samples: one row per node, one column per class."""

MIN_STEPS, STEPS_PER_NODE = 1000, 10
"""The default number of swaps that are attempted."""
MIN_GAIN = 1e-9
"""A swap has to reduce the skew by more than rounding errors could."""


@dataclass(frozen=True)
class DCliques:
    """Cliques with the label distribution of all nodes, linked sparsely (D-Cliques, Bellet et al. 2022).

    `size` is the largest number of members of a clique; `steps` is the number of attempts to swap members of two random
    cliques. By default it is 10 per node, and at least the paper's 1,000: with 1,000 nodes, cliques of 10 and 2 classes
    per node, 1,000 attempts leave a mean skew of 0.073, 10,000 leave 0.007. `between` is the graph of cliques, and
    `links` is the number of cliques that a clique is linked to at each scale of a small world, on either side: see
    `links_between`. The graph is built from the labels that nodes hold: `build_from`.
    """

    traits: ClassVar[Traits] = Traits(needs_labels=True)

    size: Annotated[int, Bounds(at_least=2)] = 10
    between: Between = "small-world"
    steps: Annotated[int, Bounds(at_least=0)] | None = None
    links: Annotated[int, Bounds(at_least=1)] = 2

    def build(self, nodes: int, seed: int) -> CliqueGraph:
        """Raise `TopologyError`: see `build_from`."""
        raise TopologyError(
            f"d-cliques on {nodes} nodes: the topology needs the labels that nodes hold; use it with a data set that"
            " has classes, or call build_from(labels, seed) with the number of samples of each class on each node"
        )

    def build_from(self, labels: Counts, seed: int) -> CliqueGraph:
        """Return the graph; node i holds `labels[i, c]` samples of class c."""
        steps = max(MIN_STEPS, STEPS_PER_NODE * len(labels)) if self.steps is None else self.steps
        found = cliques(labels, self.size, generator(seed, "topology"), steps)
        return CliqueGraph(found, links_between(found, self.between, self.size, self.links))


class CliqueGraph(StaticGraph):
    """A static undirected graph with its cliques: all members of a clique are linked."""

    def __init__(self, cliques: Sequence[Clique], between: Sequence[Edge]) -> None:
        self.cliques = tuple(tuple(sorted(members)) for members in cliques)
        self._clique = {node: members for members in self.cliques for node in members}
        peers = {node: {*members} - {node} for node, members in self._clique.items()}
        for a, b in between:
            peers[a].add(b)
            peers[b].add(a)
        ordered = [tuple(sorted(peers[node])) for node in range(len(peers))]
        super().__init__([Links(neighbours, neighbours) for neighbours in ordered])

    def clique(self, node: NodeId) -> Clique:
        """Return all members of the clique of `node`, itself included, in ascending order."""
        return self._clique[node]


def cliques(counts: Counts, size: int, rng: np.random.Generator, steps: int) -> list[Clique]:
    """Divide the nodes into cliques of at most `size` with label distributions close to the global one: greedy swap.

    Start from random cliques. Then, `steps` times, choose two random cliques and swap two members: a random pair among
    all that reduce the sum of both skews, or none if there is no such pair. If `size` does not divide the number of
    nodes, the sizes of cliques differ by at most one, so that no node is alone in a clique.
    """
    if size < 2:
        raise TopologyError(f"cliques of at most {size}: a clique has at least 2 members; the paper uses size = 10")
    distributions = _distributions(counts)
    target = distributions.mean(axis=0)
    nodes = len(distributions)
    members_of = np.array_split(rng.permutation(nodes), -(-nodes // size))
    sums = np.array([distributions[members].sum(axis=0) for members in members_of])
    for _ in range(steps if len(members_of) > 1 else 0):
        a, b = rng.choice(len(members_of), 2, replace=False).tolist()
        one, other = members_of[a], members_of[b]
        moved = (
            distributions[other][None, :, :] - distributions[one][:, None, :]
        )  # what `one` gains and `other` loses by each swap
        before = _skew(sums[a] / len(one), target) + _skew(sums[b] / len(other), target)
        after = _skew((sums[a] + moved) / len(one), target) + _skew((sums[b] - moved) / len(other), target)
        better = np.argwhere(after < before - MIN_GAIN)
        if len(better):
            i, j = better[rng.integers(len(better))]
            one[i], other[j] = other[j], one[i]
            sums[a], sums[b] = distributions[one].sum(axis=0), distributions[other].sum(axis=0)
    return [tuple(sorted(members.tolist())) for members in members_of]


def skews(counts: Counts, cliques: Sequence[Clique]) -> NDArray[np.float64]:
    """Return the skew of each clique's label distribution, from 0 to 2: the sum over classes of |p_C - p|.

    The distribution of a clique is the mean of those of its members, as in the average of their models: each node has
    the same weight, however many samples it holds.
    """
    distributions = _distributions(counts)
    target = distributions.mean(axis=0)
    return np.array([_skew(distributions[list(members)].mean(axis=0), target) for members in cliques])


def _skew(distribution: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of a distribution, or of each in an array of them, from the target."""
    return np.asarray(np.abs(distribution - target).sum(axis=-1))


def _distributions(counts: Counts) -> NDArray[np.float64]:
    """Return each node's label distribution. A node without samples has the mean of the others."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or 0 in counts.shape:
        raise TopologyError(
            f"labels of shape {counts.shape}: expected a row for each node and a column for each class, at least one"
        )
    if counts.min() < 0:
        node, label = np.argwhere(counts < 0)[0].tolist()
        raise TopologyError(f"labels[{node}, {label}] = {counts[node, label]}: a number of samples is at least 0")
    totals = counts.sum(axis=1, keepdims=True)
    holds = totals[:, 0] > 0
    if not holds.any():
        raise TopologyError(f"labels of {len(counts)} nodes: no node holds a sample, so there is no label distribution")
    distributions: NDArray[np.float64] = counts / np.maximum(totals, 1)
    distributions[~holds] = distributions[holds].mean(axis=0)
    return distributions


def links_between(cliques: Sequence[Clique], between: Between, size: int, links: int = 2) -> list[Edge]:
    """Return links between members of different cliques. Each end is the member with the fewest such links so far.

    ring: each clique is linked to the next. full: all pairs of cliques are linked. fractal: `size` cliques, all pairs
    linked, form a group; `size` groups, all pairs linked by one link, form a larger group, and so on. small-world: on a
    circle of cliques, each is linked to the nearest `links` cliques that are at least 1, 2, 4, … places away, on either
    side.
    """
    external = dict.fromkeys(itertools.chain.from_iterable(cliques), 0)
    edges = []
    for one, other in _pairs(cliques, between, size, links):
        a, b = min(one, key=external.__getitem__), min(other, key=external.__getitem__)
        external[a] += 1
        external[b] += 1
        edges.append((a, b))
    return edges


def _pairs(cliques: Sequence[Clique], between: Between, size: int, links: int) -> Iterator[tuple[Clique, Clique]]:
    """Yield the pairs of cliques, or of groups of cliques, to link: distinct pairs of different cliques."""
    if between == "full":
        yield from itertools.combinations(cliques, 2)
    elif between == "fractal":
        groups = list(cliques)
        while len(groups) > 1:
            larger = [groups[start : start + size] for start in range(0, len(groups), size)]
            for group in larger:
                yield from itertools.combinations(group, 2)
            groups = [tuple(itertools.chain.from_iterable(group)) for group in larger]
    else:
        count = len(cliques)
        for place, away in itertools.product(range(count), strides(count, links)[: 1 if between == "ring" else None]):
            if away * 2 != count or place < away:  # else the opposite clique has this link already
                yield cliques[place], cliques[(place + away) % count]


def strides(cliques: int, links: int = 2) -> list[int]:
    """Return the lengths of small-world links in places on the circle, up to half of it.

    With two `links` per scale: 1, 2, 3, 4, 5, 8, 9, 16, …
    """
    scales = (1 << x for x in range(cliques.bit_length()))
    return sorted({scale + k for scale in scales for k in range(links) if 2 * (scale + k) <= cliques})
