"""Positions of nodes in the drawing of a graph. They are computed once, so that nodes do not move."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.dashboard.feed import RunFeed

MAX_CIRCLE = 64
"""Up to this number of nodes, a graph without fixed edges is drawn as a circle, else as a disc."""
MAX_FORCED = 2_500
"""Up to this number of nodes, edges determine the positions."""
ITERATIONS = 60

Points = NDArray[np.float64]
"""One row per node: x and y, between -1 and 1."""


def positions(feed: RunFeed) -> Points:
    """Return the positions of all nodes of a run, in the order of `feed.ids`."""
    count = len(feed.ids)
    if not feed.sends.size or count > MAX_FORCED or _changes_edges(feed):
        return circle(count) if count <= MAX_CIRCLE else disc(count)
    return force_layout(count, first_edges(feed))


def first_edges(feed: RunFeed) -> NDArray[np.int64]:
    """Return the edges that the nodes used first, as pairs of indices."""
    nodes = feed.sends["node"]
    _, rows = np.unique(nodes, return_index=True)
    counts, receivers = feed.edges_of(rows)
    order = np.argsort(feed.ids)
    ids = np.array(feed.ids)[order]
    places = np.minimum(np.searchsorted(ids, receivers), len(ids) - 1)
    known = ids[places] == receivers
    return np.column_stack([np.repeat(nodes[rows], counts), order[places]])[known]


def _changes_edges(feed: RunFeed) -> bool:
    """Whether most nodes send to other nodes in every round."""
    per_node = np.bincount(feed.sends["node"], minlength=len(feed.ids))
    return bool(np.median(per_node) > 1)


def circle(count: int) -> Points:
    angles = np.arange(count) * 2 * math.pi / max(count, 1) - math.pi / 2
    return np.column_stack([np.cos(angles), np.sin(angles)])


def disc(count: int) -> Points:
    """Return points with about equal distances, as the seeds of a sunflower."""
    order = np.arange(count) + 0.5
    radius, angles = np.sqrt(order / max(count, 1)), order * math.pi * (3 - math.sqrt(5))
    return np.column_stack([radius * np.cos(angles), radius * np.sin(angles)])


def force_layout(count: int, edges: NDArray[np.int64]) -> Points:
    """Return positions where neighbours are near (Fruchterman and Reingold 1991), from a spectral layout."""
    linked = np.zeros((count, count), np.float32)
    linked[edges[:, 0], edges[:, 1]] = linked[edges[:, 1], edges[:, 0]] = 1
    np.fill_diagonal(linked, 0)
    points = _spectral(linked).astype(np.float32)
    ideal = 1.0 / math.sqrt(max(count, 1))
    for temperature in np.linspace(0.1, 0.002, ITERATIONS):
        difference = points[:, None] - points[None]
        distance = np.sqrt((difference**2).sum(axis=2))
        np.maximum(distance, 1e-3, out=distance)
        strength = ideal**2 / distance**2 - linked * distance / ideal
        move = np.einsum("ijk,ij->ik", difference, strength)
        length = np.maximum(np.sqrt((move**2).sum(axis=1, keepdims=True)), 1e-9)
        points += move / length * np.minimum(length, temperature)
    points -= (points.max(axis=0) + points.min(axis=0)) / 2
    largest = float(np.abs(points).max()) if count else 1.0
    return points.astype(np.float64) / (largest or 1.0)


def _spectral(linked: NDArray[np.float32]) -> Points:
    """Return the eigenvectors of the graph Laplacian with the smallest eigenvalues: a ring becomes a circle."""
    from scipy.linalg import eigh

    count = len(linked)
    start = disc(count) * 0.05
    if count < 4:
        return circle(count)
    laplacian = np.diag(linked.sum(axis=1)) - linked
    _, vectors = eigh(laplacian.astype(np.float64), subset_by_index=[1, 2])
    return vectors / np.maximum(np.abs(vectors).max(axis=0), 1e-9) + start
