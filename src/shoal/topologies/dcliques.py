"""Cliques that together hold what everyone holds together, with few links between them.

Bellet, Kermarrec, Lavoie: D-Cliques: Compensating for Data Heterogeneity with Topology in Decentralized Federated
Learning, SRDS 2022 (arXiv:2104.07365). Where each node holds few classes, a node's neighbours in any other sparse
graph hold few as well, and pull its model towards these; the average over a clique does not.
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
"""One row a node, one column a class: how many samples."""

NEAREST = 2
"""Cliques that a clique is linked to at each scale of a small world, on either side."""
EQUAL = 1e-9
"""A swap has to gain more than rounding could."""


@dataclass(frozen=True)
class DCliques:
    """Cliques with the label mix of all nodes together, linked sparsely (D-Cliques, Bellet et al. 2022).

    `size` is the most members a clique has; `steps` is how often a swap between two random cliques is tried:
    1000 settle some 25 cliques, 100 cliques want 10,000. It is made from the labels that nodes hold: `build_from`.
    """

    traits: ClassVar[Traits] = Traits(needs_labels=True)

    size: Annotated[int, Bounds(at_least=2)] = 10
    between: Between = "small-world"
    steps: Annotated[int, Bounds(at_least=0)] = 1000

    def build(self, nodes: int, seed: int) -> CliqueGraph:
        """Refuses: see `build_from`."""
        raise TopologyError(
            f"d-cliques on {nodes} nodes: the topology needs the labels that nodes hold; use it with a data set that"
            " has classes, or call build_from(labels, seed) with the number of samples of each class on each node"
        )

    def build_from(self, labels: Counts, seed: int) -> CliqueGraph:
        """The graph for nodes of which node i holds `labels[i, c]` samples of class c."""
        found = cliques(labels, self.size, generator(seed, "topology"), self.steps)
        return CliqueGraph(found, links_between(found, self.between, self.size))


class CliqueGraph(StaticGraph):
    """A static, undirected graph that knows its cliques: all members of one are linked."""

    def __init__(self, cliques: Sequence[Clique], between: Sequence[Edge]) -> None:
        self.cliques = tuple(tuple(sorted(members)) for members in cliques)
        self._clique = {node: members for members in self.cliques for node in members}
        peers = {node: {*members} - {node} for node, members in self._clique.items()}
        for a, b in between:
            peers[a].add(b)
            peers[b].add(a)
        ordered = [tuple(sorted(peers[node])) for node in range(len(peers))]
        super().__init__([Links(to, to) for to in ordered])

    def clique(self, node: NodeId) -> Clique:
        """All members of the clique that `node` is in, itself among them, in ascending order."""
        return self._clique[node]


def cliques(counts: Counts, size: int, rng: np.random.Generator, steps: int = 1000) -> list[Clique]:
    """Part the nodes into cliques of at most `size` whose label mixes are near to that of all: greedy swap.

    From random cliques on, `steps` times: two random cliques swap two members, a random pair among those that lower
    the sum of both skews; if there is none, nothing happens. Where `size` does not divide the nodes, the sizes of
    cliques differ by at most one, so that no node is left over in a clique of its own.
    """
    if size < 2:
        raise TopologyError(f"cliques of at most {size}: a clique has at least 2 members; the paper takes size = 10")
    mixes = _mixes(counts)
    target = mixes.mean(axis=0)
    nodes = len(mixes)
    parted = np.array_split(rng.permutation(nodes), -(-nodes // size))
    sums = np.array([mixes[members].sum(axis=0) for members in parted])
    for _ in range(steps if len(parted) > 1 else 0):
        a, b = rng.choice(len(parted), 2, replace=False).tolist()
        one, other = parted[a], parted[b]
        moved = mixes[other][None, :, :] - mixes[one][:, None, :]  # what one gains, and the other loses, by each swap
        before = _skew(sums[a] / len(one), target) + _skew(sums[b] / len(other), target)
        after = _skew((sums[a] + moved) / len(one), target) + _skew((sums[b] - moved) / len(other), target)
        better = np.argwhere(after < before - EQUAL)
        if len(better):
            i, j = better[rng.integers(len(better))]
            one[i], other[j] = other[j], one[i]
            sums[a], sums[b] = mixes[one].sum(axis=0), mixes[other].sum(axis=0)
    return [tuple(sorted(members.tolist())) for members in parted]


def skews(counts: Counts, cliques: Sequence[Clique]) -> NDArray[np.float64]:
    """How far each clique's label mix is from that of all nodes, from 0 to 2: the sum over classes of |p_C - p|.

    The mix of some nodes is the mean of theirs, as in the average of their models: each node counts alike, however
    many samples it holds.
    """
    mixes = _mixes(counts)
    target = mixes.mean(axis=0)
    return np.array([_skew(mixes[list(members)].mean(axis=0), target) for members in cliques])


def _skew(mix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance of one mix, or of each in an array of them, from the target."""
    return np.asarray(np.abs(mix - target).sum(axis=-1))


def _mixes(counts: Counts) -> NDArray[np.float64]:
    """Each node's share of each class. A node without samples takes no side: it has the mean of the others."""
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
        raise TopologyError(f"labels of {len(counts)} nodes: nobody holds a sample, so there is no mix to come near to")
    mixes: NDArray[np.float64] = counts / np.maximum(totals, 1)
    mixes[~holds] = mixes[holds].mean(axis=0)
    return mixes


def links_between(cliques: Sequence[Clique], between: Between, size: int) -> list[Edge]:
    """Links between members of different cliques, spread evenly: each end is the member with the fewest so far.

    ring: each clique with the next one. full: each with each. fractal: `size` cliques, each linked with each, form a
    group; `size` groups, each linked with each by one link, form a larger group, and so on. small-world: on a circle
    of cliques, each is linked with the nearest 2 cliques that are at least 1, 2, 4, … places away, on either side.
    """
    external = dict.fromkeys(itertools.chain.from_iterable(cliques), 0)
    links = []
    for one, other in _pairs(cliques, between, size):
        a, b = min(one, key=external.__getitem__), min(other, key=external.__getitem__)
        external[a] += 1
        external[b] += 1
        links.append((a, b))
    return links


def _pairs(cliques: Sequence[Clique], between: Between, size: int) -> Iterator[tuple[Clique, Clique]]:
    """The cliques, or groups of cliques, that get a link: no pair twice, none with itself."""
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
        for place, away in itertools.product(range(count), strides(count)[: 1 if between == "ring" else None]):
            if away * 2 != count or place < away:  # from the opposite side, the link is there already
                yield cliques[place], cliques[(place + away) % count]


def strides(cliques: int) -> list[int]:
    """How far links of a small world go around the circle, up to the half of it: 1, 2, 3, 4, 5, 8, 9, 16, 17, …"""
    scales = (1 << x for x in range(cliques.bit_length()))
    return sorted({scale + k for scale in scales for k in range(NEAREST) if 2 * (scale + k) <= cliques})
