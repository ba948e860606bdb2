"""Positions of nodes in the drawing of a graph. Equal graphs have equal positions."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.results.frames import Integers

Points: TypeAlias = NDArray[np.float64]
"""One row per node: x and y."""

MAX_CIRCLE = 64
"""Up to this number of nodes, a graph without fixed edges is drawn as a circle, else as a disc."""
MAX_EXACT = 120
"""Up to this number of nodes, the distances in the drawing are those in the graph, as far as possible."""
MAX_FORCED = 3_000
"""Up to this number of nodes, edges determine the positions."""
ITERATIONS = 60


def positions(count: int, edges: Integers) -> Points:
    """Return the position of each node. `edges` has one row per edge, with two indices of nodes; it may be empty."""
    edges = np.unique(np.sort(edges, axis=1), axis=0)
    complete = len(edges) == count * (count - 1) // 2
    if not len(edges) or complete or count > MAX_FORCED:
        return _circle(count) if count <= MAX_CIRCLE else _disc(count)
    if count <= MAX_EXACT and (exact := _by_distance(count, edges)) is not None:
        return exact
    return _by_force(count, edges)


def _circle(count: int) -> Points:
    angles = math.pi / 2 - 2 * math.pi * np.arange(count) / max(1, count)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _disc(count: int) -> Points:
    """Return points with about equal distances, as the seeds of a sunflower."""
    order = np.arange(count) + 0.5
    radius, angles = np.sqrt(order / count), order * math.pi * (3 - math.sqrt(5))
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _by_distance(count: int, edges: Integers) -> Points | None:
    """Return positions by Kamada and Kawai (1989); None if the graph is not connected."""
    import networkx

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges.tolist())
    if not networkx.is_connected(graph):
        return None
    placed = networkx.kamada_kawai_layout(graph, pos=dict(enumerate(_circle(count))))
    return np.array([placed[node] for node in range(count)])


def _by_force(count: int, edges: Integers) -> Points:
    """Return positions by Fruchterman and Reingold (1991): all nodes repel each other, edges attract."""
    x, y = (_spectral(count, edges) + 0.05 * _disc(count)).astype(np.float32).T
    one, other = edges.T
    ideal = 1.6 / math.sqrt(count)
    for temperature in np.linspace(0.1, 0.002, ITERATIONS):
        to_x, to_y = x[:, None] - x, y[:, None] - y
        push = ideal**2 / np.maximum(to_x**2 + to_y**2, 1e-6)
        force = np.stack([(to_x * push).sum(axis=1), (to_y * push).sum(axis=1)])
        along = np.stack([x[one] - x[other], y[one] - y[other]])
        along *= np.sqrt((along**2).sum(axis=0)) / ideal
        for axis in (0, 1):
            force[axis] += np.bincount(other, along[axis], count) - np.bincount(one, along[axis], count)
        length = np.maximum(np.sqrt((force**2).sum(axis=0)), 1e-9)
        step = force / length * np.minimum(length, temperature)
        x, y = x + step[0], y + step[1]
    return np.stack([x, y], axis=1).astype(np.float64)


def _spectral(count: int, edges: Integers) -> Points:
    """Return the eigenvectors of the graph's Laplacian with the smallest eigenvalues: neighbours are near."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import laplacian
    from scipy.sparse.linalg import eigsh

    links = coo_array((np.ones(len(edges)), tuple(edges.T)), shape=(count, count))
    matrix = laplacian((links + links.T).tocsc()).tocsc()
    _, vectors = eigsh(matrix, k=3, sigma=-0.01, v0=np.linspace(1.0, 2.0, count))
    found = vectors[:, 1:]
    return np.asarray(found / np.maximum(np.abs(found).max(axis=0), 1e-9))
