"""A picture of a graph, for a paper or a slide: PNG, SVG or PDF, by the ending of the file's name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.static import StaticGraph

Points: TypeAlias = npt.NDArray[np.float64]
"""One row a node: x and y."""

INK, PAPER, WATER, LINE = "#12303f", "#ffffff", "#2a7f9e", "#5b7f8f"
LABELLED = 64
"""Nodes up to which each shows its id."""
ARROWS = 32
"""Nodes up to which links that go one way show which."""


def draw(mixing: Mixing, path: str | Path, round: int = 0) -> None:
    """Draw the links of a round; the wider a line, the larger its weight."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

    graph = mixing.graph
    points = positions(graph, round)
    weights = {
        (peer, node): weight
        for node in range(graph.nodes)
        for peer, weight in mixing.peers(node, round).weights.items()
    }
    both_ways = {(a, b): w for (a, b), w in weights.items() if a < b and (b, a) in weights}
    one_way = {(a, b): w for (a, b), w in weights.items() if (b, a) not in weights}

    inches = 6.0
    figure = Figure(figsize=(inches, inches + 0.3), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.05, 1.0, 0.95))
    axes.set_axis_off()
    axes.set_aspect("equal")

    # Sizes are in points. A node covers a part of the gap to the next; lines fade as they fill the paper.
    span = float(np.ptp(points, axis=0).max()) or 1.0
    scale = 0.86 * inches * 72 / span
    smallest = 5.5 if graph.nodes <= LABELLED else 1.6
    radius = min(15.0, max(smallest, 0.30 * scale * _typical_gap(points)))
    width = min(1.8, max(0.5, 0.16 * radius))
    drawn = [*both_ways, *one_way]
    length = scale * sum(float(np.linalg.norm(points[a] - points[b])) for a, b in drawn if not _wraps(graph, a, b))
    alpha = min(0.85, max(0.15, 0.06 * (scale * span) ** 2 / max(1.0, length * width)))
    heaviest = max(weights.values(), default=1.0)

    on_circle = bool(np.allclose(np.linalg.norm(points, axis=1), 1.0))
    segments, widths, dashed = [], [], []
    for (a, b), weight in both_ways.items():
        if _wraps(graph, a, b):
            for start, stop in ((a, b), (b, a)):
                outward = (points[start] - points[stop]) / np.linalg.norm(points[start] - points[stop])
                dashed.append([points[start], points[start] + 0.55 * outward])
        else:
            passes_others = on_circle and (b - a) not in (1, graph.nodes - 1)
            segments.append(_line(points[a], points[b], 2.2 * radius / scale if passes_others else 0.0))
            widths.append(width * (0.5 + 0.5 * weight / heaviest))
    axes.add_collection(
        LineCollection(segments, colors=LINE, linewidths=widths, alpha=alpha, capstyle="round", zorder=1)
    )
    axes.add_collection(
        LineCollection(dashed, colors=LINE, linewidths=width, alpha=alpha, linestyles=(0, (2, 1.5)), zorder=1)
    )
    if graph.nodes <= ARROWS:
        for a, b in one_way:
            axes.add_patch(
                FancyArrowPatch(
                    (points[a][0], points[a][1]),
                    (points[b][0], points[b][1]),
                    connectionstyle="arc3,rad=0.12",
                    arrowstyle=f"-|>,head_length={0.32 * radius},head_width={0.14 * radius}",
                    shrinkA=radius,
                    shrinkB=radius + 0.5,
                    color=LINE,
                    linewidth=0.8 * width,
                    alpha=alpha,
                    zorder=1,
                )
            )
    else:
        axes.add_collection(
            LineCollection(
                [[points[a], points[b]] for a, b in one_way],
                colors=LINE,
                linewidths=width,
                alpha=alpha,
                zorder=1,
            )
        )

    axes.scatter(
        points[:, 0],
        points[:, 1],
        s=(2 * radius) ** 2,
        c=WATER,
        edgecolors=PAPER,
        linewidths=min(1.5, 0.18 * radius),
        zorder=2,
    )
    if graph.nodes <= LABELLED:
        for node, (x, y) in enumerate(points):
            axes.text(
                x,
                y,
                str(node),
                color=PAPER,
                fontsize=min(11.0, 0.82 * radius),
                ha="center",
                va="center_baseline",
            )
    margin = (0.75 if dashed else 0.0) + (radius + 10) / scale
    for limit, values in ((axes.set_xlim, points[:, 0]), (axes.set_ylim, points[:, 1])):
        middle = (float(values.min()) + float(values.max())) / 2
        limit(middle - span / 2 - margin, middle + span / 2 + margin)
    figure.text(0.5, 0.022, _caption(graph, len(both_ways), len(one_way), round), color=INK, fontsize=10, ha="center")
    figure.savefig(path, dpi=200)


def positions(graph: Graph, round: int = 0) -> Points:
    """Where each node is drawn. The nodes of a changing graph stay where they are in every round."""
    layout = getattr(graph, "layout", "spring" if graph.static else "circle")
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
    """Node 0 in the middle, its neighbours around it, theirs around them; each subtree in its own sector."""
    children: list[list[int]] = [[] for _ in range(graph.nodes)]
    order, seen = [0], {0}
    for node in order:  # grows while we walk it
        for peer in graph.links(node, round).to:
            if peer not in seen:
                seen.add(peer)
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
    """As springs would settle: by all distances for small graphs, by forces for large ones."""
    import networkx

    drawn: networkx.Graph[int] = networkx.Graph()
    drawn.add_nodes_from(range(graph.nodes))
    drawn.add_edges_from((i, j) for i in range(graph.nodes) for j in graph.links(i, round).to)
    if graph.nodes <= 120 and networkx.is_connected(drawn):
        placed = networkx.kamada_kawai_layout(drawn)
    else:
        placed = networkx.spring_layout(drawn, seed=0, k=1.6 / math.sqrt(graph.nodes), iterations=120)
    return np.array([placed[node] for node in range(graph.nodes)])


def _typical_gap(points: Points) -> float:
    """The distance to the nearest other node, small but not the smallest."""
    from scipy.spatial import cKDTree

    if len(points) < 2:
        return 1.0
    distances, _ = cKDTree(points).query(points, k=2)
    return float(np.quantile(distances[:, 1], 0.1))


def _line(start: Points, stop: Points, clearance: float) -> Points:
    """A straight line; or, if it stays this near to the unit circle and the nodes on it, one bent inwards."""
    middle = (start + stop) / 2
    depth = 1.0 - float(np.linalg.norm(middle))
    if depth >= clearance:
        return np.stack([start, stop])
    t = np.linspace(0.0, 1.0, 15)[:, None]
    pulled = middle * (1.0 - 2 * clearance)
    return np.asarray((1 - t) ** 2 * start + 2 * t * (1 - t) * pulled + t**2 * stop)


def _wraps(graph: Graph, a: int, b: int) -> bool:
    """Whether a link of a grid joins two opposite sides."""
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
