"""What a graph is worth to an average: degrees, components, diameter, spectral gap and contraction.

And of links that nodes keep by themselves, how near they come to those of a random graph: `measure_overlay`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg
import scipy.special

from shoal.randomness import generator
from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.static import components
from shoal.types import NodeId

EXACT_DIAMETER = 5_000
"""Nodes up to which every pair is looked at."""
DENSE = 400
"""Nodes up to which all eigenvalues are computed: beyond, the few that matter are found faster."""
PATHS_FROM = 500
"""Nodes from which paths are measured; all, if there are no more."""


@dataclass(frozen=True)
class Measures:
    """Figures of a graph with its weights. Degrees, components and diameter are those of one round."""

    nodes: int
    degree_min: int
    degree_mean: float
    degree_max: int
    components: tuple[int, ...]
    """Their sizes, the largest first."""
    diameter: int | None
    """The longest of the shortest paths; None when some node cannot reach another."""
    diameter_exact: bool
    """False when the diameter is a lower bound."""
    spectral_gap: float
    """1 - |λ2| of the mixing matrix; the mean over rounds when the graph changes."""
    contraction: float
    """What a round leaves of the distance between a random vector and its average: less is faster."""

    def __str__(self) -> str:
        diameter = "infinite" if self.diameter is None else str(self.diameter)
        bound = "" if self.diameter_exact else "at least "
        return (
            f"{self.nodes} nodes,"
            f" degree {self.degree_min} to {self.degree_max} (mean {self.degree_mean:.3g}),"
            f" {len(self.components)} component{'s' if len(self.components) > 1 else ''},"
            f" diameter {bound}{diameter},"
            f" spectral gap {self.spectral_gap:.3g}, contraction {self.contraction:.3g}"
        )


def measure(mixing: Mixing, round: int = 0, rounds: int = 10) -> Measures:
    """All figures, from `round` on; those of a changing graph over `rounds` rounds."""
    graph = mixing.graph
    degrees = [graph.degree(node, round) for node in range(graph.nodes)]
    length, exact = diameter(graph, round)
    looked_at = range(round, round + (1 if graph.static else rounds))
    return Measures(
        nodes=graph.nodes,
        degree_min=min(degrees),
        degree_mean=sum(degrees) / len(degrees),
        degree_max=max(degrees),
        components=tuple(len(component) for component in components(graph, round)),
        diameter=length,
        diameter_exact=exact,
        spectral_gap=float(np.mean([spectral_gap(matrix(mixing, r)) for r in looked_at])),
        contraction=contraction(mixing, round, rounds),
    )


def matrix(mixing: Mixing, round: int) -> scipy.sparse.csr_matrix:
    """W of this round: row i holds the weights with which node i averages, its own on the diagonal."""
    starts, columns, values = [0], [], []
    for node in range(mixing.graph.nodes):
        weights = mixing.peers(node, round).weights
        columns += [node, *weights]
        values += [1.0 - sum(weights.values()), *weights.values()]
        starts.append(len(columns))
    built = scipy.sparse.csr_matrix((values, columns, starts), shape=(mixing.graph.nodes,) * 2)
    built.sort_indices()
    return built


def spectral_gap(w: scipy.sparse.csr_matrix) -> float:
    """1 - |λ2|, where 1 = |λ1| ≥ |λ2| ≥ …: 0 when the graph is disconnected, 1 when a round averages all."""
    if w.shape[0] == 1:
        return 1.0
    if w.shape[0] > DENSE:
        values = _extreme_eigenvalues(w)
    elif _symmetric(w):
        values = np.linalg.eigvalsh(w.toarray())
    else:
        values = np.linalg.eigvals(w.toarray())
    second = float(np.sort(np.abs(values))[-2])
    return 1.0 - second if second < 1.0 - 1e-12 else 0.0


def smallest_eigenvalue(w: scipy.sparse.csr_matrix) -> float:
    """The least real part among the eigenvalues of W, to five digits. All are real where links go both ways."""
    if w.shape[0] <= DENSE:
        return float(np.linalg.eigvals(w.toarray()).real.min())
    start = generator(0, "smallest eigenvalue").standard_normal(w.shape[0])
    solve, least = (scipy.sparse.linalg.eigsh, "SA") if _symmetric(w) else (scipy.sparse.linalg.eigs, "SR")
    return float(np.real(solve(w, k=1, which=least, v0=start, tol=1e-4, return_eigenvectors=False)).min())


def _symmetric(w: scipy.sparse.csr_matrix) -> bool:
    return bool(abs(w - w.T).max() < 1e-12)


def _extreme_eigenvalues(w: scipy.sparse.csr_matrix) -> npt.NDArray[np.complex128]:
    """The eigenvalues of a large W that are largest in modulus.

    Arnoldi's iteration is quick where the gap is wide. Where it is narrow, on rings and grids, it does not
    arrive; but there W is cheap to factorise, and the eigenvalues sought are those next to 1: each lies in a
    circle around some own weight w with radius 1 - w (Gershgorin), which touches the unit circle at 1 alone.
    """
    options: dict[str, Any] = {
        "v0": generator(0, "spectral gap").standard_normal(w.shape[0]),
        "return_eigenvectors": False,
    }
    solve = scipy.sparse.linalg.eigsh if _symmetric(w) else scipy.sparse.linalg.eigs
    try:
        return np.asarray(solve(w, k=2, maxiter=200, tol=1e-9, **options))
    except scipy.sparse.linalg.ArpackNoConvergence:
        return np.asarray(solve(w.tocsc(), k=2, sigma=1.0 + 1e-7, **options))


def contraction(mixing: Mixing, round: int = 0, rounds: int = 10) -> float:
    """What a round leaves of the distance between a random vector and its average, as a geometric mean."""
    nodes = mixing.graph.nodes
    x = generator(0, "contraction").standard_normal(nodes)
    x -= x.mean()
    w = matrix(mixing, round)
    log_sum = 0.0
    for r in range(round, round + rounds):
        before = float(np.linalg.norm(x))
        if before == 0.0:
            return 0.0
        x /= before
        if r > round and not mixing.graph.static:
            w = matrix(mixing, r)
        x = w @ x
        x -= x.mean()
        after = float(np.linalg.norm(x))
        if after < 1e-12:  # nothing left but rounding
            return 0.0
        log_sum += math.log(after)
    return math.exp(log_sum / rounds)


def diameter(graph: Graph, round: int = 0) -> tuple[int | None, bool]:
    """The diameter of a round, and whether it is exact: above 5,000 nodes it is a lower bound."""
    if graph.nodes > EXACT_DIAMETER:
        return _double_sweep(graph, round), False
    return _exact_diameter(graph, round), True


def _exact_diameter(graph: Graph, round: int) -> int | None:
    """All nodes at once: bit j of reached[i] says that j reaches i in so many steps."""
    heard = [graph.links(node, round).of for node in range(graph.nodes)]
    everyone = (1 << graph.nodes) - 1
    reached = [1 << node for node in range(graph.nodes)]
    steps = 0
    while any(known != everyone for known in reached):
        grown = reached.copy()
        for node, known in enumerate(reached):
            if known != everyone:
                for peer in heard[node]:
                    known |= reached[peer]
                grown[node] = known
        if grown == reached:
            return None
        reached = grown
        steps += 1
    return steps


def _double_sweep(graph: Graph, round: int) -> int | None:
    """How far the farthest node from node 0 is from its own farthest: often the diameter, never more."""
    distances = _distances(graph, 0, round)
    if len(distances) < graph.nodes:
        return None
    farthest = max(distances, key=distances.__getitem__)
    return max(max(distances.values()), max(_distances(graph, farthest, round).values()))


def _distances(graph: Graph, start: NodeId, round: int) -> dict[NodeId, int]:
    distances = {start: 0}
    frontier = [start]
    for node in frontier:  # grows while we walk it
        for peer in graph.links(node, round).to:
            if peer not in distances:
                distances[peer] = distances[node] + 1
                frontier.append(peer)
    return distances


@dataclass(frozen=True)
class Overlay:
    """How near the links of partial views come to a random graph (Jelasity et al. 2007).

    The figures that begin with `random` are those of a graph in which nodes of as many links as these have on
    average choose them uniformly. Degrees and the rest are those of the links to living nodes.
    """

    nodes: int
    """The living ones."""
    dead_links: float
    """The share of links that lead to nodes that are gone."""
    in_degree_mean: float
    in_degree_std: float
    in_degree_max: int
    random_in_degree_std: float
    random_in_degree_max: float
    """Its expectation."""
    clustering: float
    """The mean share of a node's neighbours, in either direction, that are neighbours themselves."""
    random_clustering: float
    path_length: float
    """The mean of shortest paths, links taken in both directions, between nodes that reach each other."""
    components: tuple[int, ...]
    """Their sizes, the largest first, links taken in both directions."""

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes,"
            f" in-degree {self.in_degree_mean:.3g} ± {self.in_degree_std:.3g}, at most {self.in_degree_max}"
            f" (random: ± {self.random_in_degree_std:.3g}, at most {self.random_in_degree_max:.3g}),"
            f" clustering {self.clustering:.3g} (random: {self.random_clustering:.3g}),"
            f" paths of {self.path_length:.3g} hops,"
            f" {len(self.components)} component{'s' if len(self.components) > 1 else ''},"
            f" {self.dead_links:.1%} dead links"
        )


def measure_overlay(views: Mapping[NodeId, Sequence[NodeId]]) -> Overlay:
    """All figures, from whom each living node knows; who has no view is dead."""
    place = {node: i for i, node in enumerate(views)}
    count = len(place)
    links = [(i, place.get(peer)) for i, known in enumerate(views.values()) for peer in known]
    living = np.array([link for link in links if link[1] is not None], dtype=np.int64).reshape(-1, 2)
    ins = np.bincount(living[:, 1], minlength=count)
    mean = len(living) / count
    chance = min(1.0, mean / max(1, count - 1))
    below = scipy.special.bdtr(np.arange(count), max(1, count - 1), chance)  # P(in-degree ≤ k) of one node

    directed = scipy.sparse.csr_matrix((np.ones(len(living)), (living[:, 0], living[:, 1])), shape=(count, count))
    linked = ((directed + directed.T) > 0).astype(np.float64).tocsr()
    degrees = np.asarray(linked.sum(axis=1)).ravel()
    closed = np.asarray((linked @ linked).multiply(linked).sum(axis=1)).ravel()
    _, member_of = scipy.sparse.csgraph.connected_components(linked, directed=False)
    return Overlay(
        nodes=count,
        dead_links=1.0 - len(living) / len(links) if links else 0.0,
        in_degree_mean=mean,
        in_degree_std=float(ins.std()),
        in_degree_max=int(ins.max()),
        random_in_degree_std=math.sqrt(mean * (1.0 - chance)),
        random_in_degree_max=float((1.0 - below**count).sum()),
        clustering=float(np.mean(closed / np.maximum(1.0, degrees * (degrees - 1.0)))),
        random_clustering=1.0 - (1.0 - chance) ** 2,
        path_length=_mean_path(linked),
        components=tuple(sorted(np.bincount(member_of).tolist(), reverse=True)),
    )


def _mean_path(linked: scipy.sparse.csr_matrix) -> float:
    count = linked.shape[0]
    sources = np.arange(count)
    if count > PATHS_FROM:
        sources = generator(0, "paths").choice(count, PATHS_FROM, replace=False)
    hops = scipy.sparse.csgraph.dijkstra(linked, directed=False, indices=sources, unweighted=True)
    reached = hops[np.isfinite(hops) & (hops > 0)]
    return float(reached.mean()) if len(reached) else 0.0
