"""Measures of a graph and its weights: degrees, components, diameter, spectral gap and contraction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.linalg

from shoal.randomness import generator
from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.static import components
from shoal.types import NodeId

MAX_EXACT_DIAMETER_NODES = 5_000
"""Up to this number of nodes the diameter is exact."""
MAX_DENSE_NODES = 400
"""Up to this number of nodes all eigenvalues are computed. Above it, computing only the extreme ones is faster."""


@dataclass(frozen=True)
class Measures:
    """Measures of a graph and its weights. Degrees, components and diameter are those of one round."""

    nodes: int
    degree_min: int
    degree_mean: float
    degree_max: int
    components: tuple[int, ...]
    """The sizes of the components, the largest first."""
    diameter: int | None
    """The longest shortest path; None if some node cannot reach another."""
    diameter_exact: bool
    """False if the diameter is a lower bound."""
    spectral_gap: float
    """1 - |λ2| of the mixing matrix; the mean over rounds if the graph changes."""
    contraction: float
    """The factor by which a round reduces the distance of a random vector from its average: smaller is faster."""

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
    """Measure the graph from `round` on; a changing graph over `rounds` rounds."""
    graph = mixing.graph
    degrees = [graph.degree(node, round) for node in range(graph.nodes)]
    length, exact = diameter(graph, round)
    measured = range(round, round + (1 if graph.static else rounds))
    return Measures(
        nodes=graph.nodes,
        degree_min=min(degrees),
        degree_mean=sum(degrees) / len(degrees),
        degree_max=max(degrees),
        components=tuple(len(component) for component in components(graph, round)),
        diameter=length,
        diameter_exact=exact,
        spectral_gap=float(np.mean([spectral_gap(matrix(mixing, r)) for r in measured])),
        contraction=contraction(mixing, round, rounds),
    )


def matrix(mixing: Mixing, round: int) -> scipy.sparse.csr_matrix:
    """Return W of this round: row i holds the weights of node i, its own on the diagonal."""
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
    """Return 1 - |λ2|, where 1 = |λ1| ≥ |λ2| ≥ …: 0 for a disconnected graph, 1 if one round averages exactly."""
    if w.shape[0] == 1:
        return 1.0
    if w.shape[0] > MAX_DENSE_NODES:
        values = _extreme_eigenvalues(w)
    elif _symmetric(w):
        values = np.linalg.eigvalsh(w.toarray())
    else:
        values = np.linalg.eigvals(w.toarray())
    second = float(np.sort(np.abs(values))[-2])
    return 1.0 - second if second < 1.0 - 1e-12 else 0.0


def smallest_eigenvalue(w: scipy.sparse.csr_matrix) -> float:
    """Return the smallest real part of an eigenvalue of W, to five digits. All are real on undirected graphs."""
    if w.shape[0] <= MAX_DENSE_NODES:
        return float(np.linalg.eigvals(w.toarray()).real.min())
    start = generator(0, "smallest eigenvalue").standard_normal(w.shape[0])
    solve, least = (scipy.sparse.linalg.eigsh, "SA") if _symmetric(w) else (scipy.sparse.linalg.eigs, "SR")
    return float(np.real(solve(w, k=1, which=least, v0=start, tol=1e-4, return_eigenvectors=False)).min())


def _symmetric(w: scipy.sparse.csr_matrix) -> bool:
    return bool(abs(w - w.T).max() < 1e-12)


def _extreme_eigenvalues(w: scipy.sparse.csr_matrix) -> npt.NDArray[np.complex128]:
    """Return the eigenvalues of a large W that are largest in modulus.

    Arnoldi's iteration is fast if the gap is wide. If it is narrow, as on rings and grids, it does not converge; but
    then W is cheap to factorise, and the eigenvalues sought are the closest to 1: each lies in a circle around some own
    weight w with radius 1 - w (Gershgorin), which touches the unit circle only at 1.
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
    """Return the factor by which a round reduces the distance of a random vector from its average: a geometric mean."""
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
        if after < 1e-12:  # only rounding errors are left
            return 0.0
        log_sum += math.log(after)
    return math.exp(log_sum / rounds)


def diameter(graph: Graph, round: int = 0) -> tuple[int | None, bool]:
    """Return the diameter of a round, and whether it is exact: above 5,000 nodes it is a lower bound."""
    if graph.nodes > MAX_EXACT_DIAMETER_NODES:
        return _double_sweep(graph, round), False
    return _exact_diameter(graph, round), True


def _exact_diameter(graph: Graph, round: int) -> int | None:
    """Compute all nodes at once: bit j of reached[i] is set if j reaches i in `steps` steps."""
    senders = [graph.links(node, round).senders for node in range(graph.nodes)]
    everyone = (1 << graph.nodes) - 1
    reached = [1 << node for node in range(graph.nodes)]
    steps = 0
    while any(known != everyone for known in reached):
        grown = reached.copy()
        for node, known in enumerate(reached):
            if known != everyone:
                for peer in senders[node]:
                    known |= reached[peer]
                grown[node] = known
        if grown == reached:
            return None
        reached = grown
        steps += 1
    return steps


def _double_sweep(graph: Graph, round: int) -> int | None:
    """Return the eccentricity of the node farthest from node 0: often the diameter, never more."""
    distances = _distances(graph, 0, round)
    if len(distances) < graph.nodes:
        return None
    farthest = max(distances, key=distances.__getitem__)
    return max(max(distances.values()), max(_distances(graph, farthest, round).values()))


def _distances(graph: Graph, start: NodeId, round: int) -> dict[NodeId, int]:
    distances = {start: 0}
    frontier = [start]
    for node in frontier:  # the list grows during the loop
        for peer in graph.links(node, round).receivers:
            if peer not in distances:
                distances[peer] = distances[node] + 1
                frontier.append(peer)
    return distances
