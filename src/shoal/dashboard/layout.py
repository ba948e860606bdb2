"""Positions of nodes in the graph of a run. They are computed once, so that nodes do not move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.dashboard.feed import RunFeed
from shoal.results import graph_layout

FEW = 5
"""Fewer nodes are drawn as a circle."""

Points = NDArray[np.float64]
"""One row per node: x from left to right and y from top to bottom, between -1 and 1."""


def positions(feed: RunFeed) -> Points:
    """Return the positions of all nodes of a run, in the order of `feed.ids`."""
    count = len(feed.ids)
    is_fixed = feed.sends.size > 0 and count >= FEW and not _changes_edges(feed)
    points = graph_layout.positions(count, first_edges(feed) if is_fixed else np.empty((0, 2), np.int64))
    if not count:
        return points
    centred: Points = (points - (points.max(axis=0) + points.min(axis=0)) / 2) * np.array([1.0, -1.0])
    largest = max(float(np.abs(centred).max()), 1e-9)
    return centred / largest


def first_edges(feed: RunFeed) -> NDArray[np.int64]:
    """Return the edges that the nodes used first, as pairs of indices."""
    nodes = feed.sends["node"]
    _, rows = np.unique(nodes, return_index=True)
    counts, receivers = feed.edges_of(rows)
    order = np.argsort(feed.ids)
    ids = np.array(feed.ids)[order]
    places = np.minimum(np.searchsorted(ids, receivers), len(ids) - 1)
    known = ids[places] == receivers
    pairs: NDArray[np.int64] = np.column_stack([np.repeat(nodes[rows], counts), order[places]])[known]
    return pairs


def _changes_edges(feed: RunFeed) -> bool:
    """Whether most nodes send to other nodes in every round."""
    per_node = np.bincount(feed.sends["node"], minlength=len(feed.ids))
    return bool(np.median(per_node) > 1)
