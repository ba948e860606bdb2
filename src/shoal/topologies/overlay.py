"""Measures of partial views: how close their links are to those of a random graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.special

from shoal.randomness import generator
from shoal.types import NodeId

MAX_PATH_SOURCES = 500
"""The number of nodes from which path lengths are measured; all nodes, if there are no more."""


@dataclass(frozen=True)
class Overlay:
    """Measures of the graph of partial views, compared with a random graph (Jelasity et al. 2007).

    The fields `random_…` are those of a graph in which nodes choose the same mean number of links uniformly. All
    measures except `dead_links` count only links to running nodes.
    """

    nodes: int
    """The number of running nodes."""
    dead_links: float
    """The share of links to nodes that have failed."""
    in_degree_mean: float
    in_degree_std: float
    in_degree_max: int
    random_in_degree_std: float
    random_in_degree_max: float
    """The expected maximum."""
    clustering: float
    """The mean share of pairs of a node's neighbours, in either direction, that are linked to each other."""
    random_clustering: float
    path_length: float
    """The mean shortest path between nodes that reach each other; links count in both directions."""
    components: tuple[int, ...]
    """The sizes of the components, the largest first; links count in both directions."""

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
    """Measure the views of all running nodes; a node without a view counts as failed."""
    index = {node: i for i, node in enumerate(views)}
    count = len(index)
    links = [(i, index.get(peer)) for i, known in enumerate(views.values()) for peer in known]
    live = np.array([link for link in links if link[1] is not None], dtype=np.int64).reshape(-1, 2)
    in_degrees = np.bincount(live[:, 1], minlength=count)
    mean = len(live) / count
    probability = min(1.0, mean / max(1, count - 1))
    below = scipy.special.bdtr(np.arange(count), max(1, count - 1), probability)  # P(in-degree ≤ k) of one node

    directed = scipy.sparse.csr_matrix((np.ones(len(live)), (live[:, 0], live[:, 1])), shape=(count, count))
    undirected = ((directed + directed.T) > 0).astype(np.float64).tocsr()
    degrees = np.asarray(undirected.sum(axis=1)).ravel()
    closed = np.asarray((undirected @ undirected).multiply(undirected).sum(axis=1)).ravel()
    _, member_of = scipy.sparse.csgraph.connected_components(undirected, directed=False)
    return Overlay(
        nodes=count,
        dead_links=1.0 - len(live) / len(links) if links else 0.0,
        in_degree_mean=mean,
        in_degree_std=float(in_degrees.std()),
        in_degree_max=int(in_degrees.max()),
        random_in_degree_std=math.sqrt(mean * (1.0 - probability)),
        random_in_degree_max=float((1.0 - below**count).sum()),
        clustering=float(np.mean(closed / np.maximum(1.0, degrees * (degrees - 1.0)))),
        random_clustering=1.0 - (1.0 - probability) ** 2,
        path_length=_mean_path(undirected),
        components=tuple(sorted(np.bincount(member_of).tolist(), reverse=True)),
    )


def _mean_path(undirected: scipy.sparse.csr_matrix) -> float:
    count = undirected.shape[0]
    sources = np.arange(count)
    if count > MAX_PATH_SOURCES:
        sources = generator(0, "paths").choice(count, MAX_PATH_SOURCES, replace=False)
    hops = scipy.sparse.csgraph.dijkstra(undirected, directed=False, indices=sources, unweighted=True)
    reached = hops[np.isfinite(hops) & (hops > 0)]
    return float(reached.mean()) if len(reached) else 0.0
