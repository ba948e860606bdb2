"""Drawings of graphs for papers and slides: PNG, SVG or PDF, by the ending of the file's name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.static import LaidOut, StaticGraph

Points: TypeAlias = npt.NDArray[np.float64]
"""One row per node: x and y."""

TEXT_COLOUR, BACKGROUND, MARK_COLOUR, LINK_COLOUR = "#12303f", "#ffffff", "#2a7f9e", "#5b7f8f"
FIGURE_INCHES = 6.0
MAX_LABELLED_NODES = 64
"""Up to this number of nodes each shows its id."""
MAX_ARROW_NODES = 32
"""Up to this number of nodes one-way links are arrows."""


def draw(mixing: Mixing, path: str | Path, round: int = 0) -> None:
    """Draw the links of a round; the width of a line grows with its weight."""
    _Drawing(mixing, round).save(path)


class _Drawing:
    """One drawing. Sizes are in points; `_scale` is points per unit of the layout."""

    def __init__(self, mixing: Mixing, round: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._graph, self._round = mixing.graph, round
        self._points = positions(mixing.graph, round)
        weights = {
            (peer, node): weight
            for node in range(mixing.graph.nodes)
            for peer, weight in mixing.peers(node, round).weights.items()
        }
        self._both_ways = {(a, b): w for (a, b), w in weights.items() if a < b and (b, a) in weights}
        self._one_way = [(a, b) for a, b in weights if (b, a) not in weights]
        self._heaviest = max(weights.values(), default=1.0)
        self._set_sizes()
        self._figure = Figure(figsize=(FIGURE_INCHES, FIGURE_INCHES + 0.3), facecolor=BACKGROUND)
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.add_axes((0.0, 0.05, 1.0, 0.95))
        self._axes.set_axis_off()
        self._axes.set_aspect("equal")

    def save(self, path: str | Path) -> None:
        wraps = self._draw_both_ways()
        self._draw_one_way()
        self._draw_nodes()
        margin = (0.75 if wraps else 0.0) + (self._radius + 10) / self._scale
        limits = ((self._axes.set_xlim, self._points[:, 0]), (self._axes.set_ylim, self._points[:, 1]))
        for set_limits, values in limits:
            middle = (float(values.min()) + float(values.max())) / 2
            set_limits(middle - self._span / 2 - margin, middle + self._span / 2 + margin)
        caption = _caption(self._graph, len(self._both_ways), len(self._one_way), self._round)
        self._figure.text(0.5, 0.022, caption, color=TEXT_COLOUR, fontsize=10, ha="center")
        self._figure.savefig(path, dpi=200)

    def _set_sizes(self) -> None:
        """Choose sizes: a node covers a part of the gap to the next; lines are more transparent if they are many."""
        points, graph = self._points, self._graph
        self._span = float(np.ptp(points, axis=0).max()) or 1.0
        self._scale = scale = 0.86 * FIGURE_INCHES * 72 / self._span
        smallest = 5.5 if graph.nodes <= MAX_LABELLED_NODES else 1.6
        self._radius = min(15.0, max(smallest, 0.30 * scale * _typical_gap(points)))
        self._width = min(1.8, max(0.5, 0.16 * self._radius))
        straight = [(a, b) for a, b in (*self._both_ways, *self._one_way) if not _wraps(graph, a, b)]
        length = scale * sum(float(np.linalg.norm(points[a] - points[b])) for a, b in straight)
        area = max(1.0, length * self._width)
        self._alpha = min(0.85, max(0.15, 0.06 * (scale * self._span) ** 2 / area))

    def _draw_both_ways(self) -> bool:
        """Draw undirected links. Returns whether some of them wrap around a grid; these are dashed stubs."""
        from matplotlib.collections import LineCollection

        points, graph = self._points, self._graph
        on_circle = bool(np.allclose(np.linalg.norm(points, axis=1), 1.0))
        segments, widths, dashed = [], [], []
        for (a, b), weight in self._both_ways.items():
            if _wraps(graph, a, b):
                for start, stop in ((a, b), (b, a)):
                    outward = (points[start] - points[stop]) / np.linalg.norm(points[start] - points[stop])
                    dashed.append([points[start], points[start] + 0.55 * outward])
            else:
                passes_others = on_circle and (b - a) not in (1, graph.nodes - 1)
                clearance = 2.2 * self._radius / self._scale if passes_others else 0.0
                segments.append(_line(points[a], points[b], clearance))
                widths.append(self._width * (0.5 + 0.5 * weight / self._heaviest))
        style: dict[str, Any] = {"colors": LINK_COLOUR, "alpha": self._alpha, "zorder": 1}
        self._axes.add_collection(LineCollection(segments, linewidths=widths, capstyle="round", **style))
        self._axes.add_collection(LineCollection(dashed, linewidths=self._width, linestyles=(0, (2, 1.5)), **style))
        return bool(dashed)

    def _draw_one_way(self) -> None:
        """Draw directed links: as arrows in a small graph, as lines in a large one."""
        from matplotlib.collections import LineCollection
        from matplotlib.patches import FancyArrowPatch

        points, radius = self._points, self._radius
        if self._graph.nodes > MAX_ARROW_NODES:
            lines = [[points[a], points[b]] for a, b in self._one_way]
            self._axes.add_collection(
                LineCollection(lines, colors=LINK_COLOUR, linewidths=self._width, alpha=self._alpha, zorder=1)
            )
            return
        for a, b in self._one_way:
            self._axes.add_patch(
                FancyArrowPatch(
                    (points[a][0], points[a][1]),
                    (points[b][0], points[b][1]),
                    connectionstyle="arc3,rad=0.12",
                    arrowstyle=f"-|>,head_length={0.32 * radius},head_width={0.14 * radius}",
                    shrinkA=radius,
                    shrinkB=radius + 0.5,
                    color=LINK_COLOUR,
                    linewidth=0.8 * self._width,
                    alpha=self._alpha,
                    zorder=1,
                )
            )

    def _draw_nodes(self) -> None:
        x, y = self._points[:, 0], self._points[:, 1]
        edge = min(1.5, 0.18 * self._radius)
        self._axes.scatter(
            x, y, s=(2 * self._radius) ** 2, c=MARK_COLOUR, edgecolors=BACKGROUND, linewidths=edge, zorder=2
        )
        if self._graph.nodes <= MAX_LABELLED_NODES:
            size = min(11.0, 0.82 * self._radius)
            for node, (at_x, at_y) in enumerate(self._points):
                self._axes.text(
                    at_x, at_y, str(node), color=BACKGROUND, fontsize=size, ha="center", va="center_baseline"
                )


def positions(graph: Graph, round: int = 0) -> Points:
    """Return the position of each node. The nodes of a changing graph have the same positions in all rounds."""
    layout = graph.layout if isinstance(graph, LaidOut) else "spring" if graph.static else "circle"
    if layout == "grid" and isinstance(graph, StaticGraph):
        ids = np.arange(graph.nodes)
        return np.stack([ids % graph.columns, -(ids // graph.columns)], axis=1).astype(np.float64)
    if layout == "radial":
        return _radial(graph, round)
    if layout == "spring" and graph.nodes > 2:
        return _spring(graph, round)
    angles = math.pi / 2 - 2 * math.pi * np.arange(graph.nodes) / graph.nodes
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _radial(graph: Graph, round: int) -> Points:
    """Place node 0 in the middle, its neighbours around it, theirs around them; each subtree has its own sector."""
    children: list[list[int]] = [[] for _ in range(graph.nodes)]
    order, visited = [0], {0}
    for node in order:  # the list grows during the loop
        for peer in graph.links(node, round).receivers:
            if peer not in visited:
                visited.add(peer)
                order.append(peer)
                children[node].append(peer)
    leaves = [1] * graph.nodes
    for node in reversed(order):
        leaves[node] = sum(leaves[child] for child in children[node]) or 1
    points = np.zeros((graph.nodes, 2))
    sector = {0: (math.pi / 2, math.pi / 2 - 2 * math.pi, 0)}
    for node in order:
        start, stop, depth = sector[node]
        middle = (start + stop) / 2
        points[node] = depth * math.cos(middle), depth * math.sin(middle)
        share = (stop - start) / leaves[node]
        for child in children[node]:
            end = start + share * leaves[child]
            sector[child] = (start, end, depth + 1)
            start = end
    return points


def _spring(graph: Graph, round: int) -> Points:
    """Place nodes by a spring model: by all distances for small graphs, by forces for large ones."""
    import networkx

    drawn: networkx.Graph[int] = networkx.Graph()
    drawn.add_nodes_from(range(graph.nodes))
    drawn.add_edges_from((i, j) for i in range(graph.nodes) for j in graph.links(i, round).receivers)
    if graph.nodes <= 120 and networkx.is_connected(drawn):
        placed = networkx.kamada_kawai_layout(drawn)
    else:
        placed = networkx.spring_layout(drawn, seed=0, k=1.6 / math.sqrt(graph.nodes), iterations=120)
    return np.array([placed[node] for node in range(graph.nodes)])


def _typical_gap(points: Points) -> float:
    """Return the 10 % quantile of the distances to the nearest other node."""
    from scipy.spatial import cKDTree

    if len(points) < 2:
        return 1.0
    distances, _ = cKDTree(points).query(points, k=2)
    return float(np.quantile(distances[:, 1], 0.1))


def _line(start: Points, stop: Points, clearance: float) -> Points:
    """Return a straight line, bent inwards if it is closer than `clearance` to the unit circle and its nodes."""
    middle = (start + stop) / 2
    depth = 1.0 - float(np.linalg.norm(middle))
    if depth >= clearance:
        return np.stack([start, stop])
    t = np.linspace(0.0, 1.0, 15)[:, None]
    pulled = middle * (1.0 - 2 * clearance)
    return np.asarray((1 - t) ** 2 * start + 2 * t * (1 - t) * pulled + t**2 * stop)


def _wraps(graph: Graph, a: int, b: int) -> bool:
    """Whether the link joins two opposite sides of a grid."""
    if not isinstance(graph, StaticGraph) or graph.layout != "grid":
        return False
    columns = graph.columns
    return max(abs(a % columns - b % columns), abs(a // columns - b // columns)) > 1


def _caption(graph: Graph, both_ways: int, one_way: int, round: int) -> str:
    degrees = [graph.degree(node, round) for node in range(graph.nodes)]
    low, high = min(degrees), max(degrees)
    parts = [_count(graph.nodes, "node")]
    parts += [_count(both_ways, "link")] if both_ways or not one_way else []
    parts += [_count(one_way, "one-way link")] if one_way else []
    parts += [f"degree {low}" if low == high else f"degree {low} to {high}"]
    parts += [] if graph.static else [f"round {round}"]
    return "  ·  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
