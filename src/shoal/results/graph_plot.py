"""The graph of a run: an edge for each model that was sent in a round, nodes coloured by their score or their data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.activity import Edges, failed_nodes, read_edges
from shoal.results.frames import Floats, Integers, RunRecords, read_records
from shoal.results.graph_layout import Points, positions
from shoal.results.node_data import read_node_data
from shoal.results.plot_style import WIDTHS, Columns, add_legend, new_figure, plain_text, styled
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder
from shoal.results.timing import higher_is_better, split_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLASS = "class"
"""Colour nodes by their most frequent class."""
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB",
)  # fmt: skip
"""The scheme "muted" of Paul Tol (2021, "Colour Schemes"), which people who are colour-blind can distinguish."""
EDGE_COLOUR, WITHOUT_VALUE, FAILED_COLOUR = "#5b7f8f", "#FFFFFF", "#000000"
MAX_LABELLED = 64
"""Up to this number of nodes, each shows its id."""
MAX_ARROWS = 32
"""Up to this number of nodes, an edge in one direction is an arrow."""


def topology_figure(
    folder: RunFolder, round: int | None = None, colour: str | None = None, columns: Columns = 1
) -> Figure:
    """Draw the graph of one round; default: the last round that all nodes have finished, except failed ones.

    `colour` is a metric, whose latest score up to the round colours each node, or "class": the most frequent class of
    the node's training samples. The default is the accuracy, or the main metric of the task.

    Raises `DataError` if the run does not have this, or an earlier version wrote it without the edges.
    """
    edges, records = read_edges(folder), read_records(folder)
    if round is None:
        round = edges.common_round(failed_nodes(records, math.inf))
    if not 0 <= round <= edges.last_round:
        raise DataError(f"{folder.path}: round = {round}; the run has rounds 0 to {edges.last_round}")
    graph = _Graph.at_round(edges, round)
    colouring = _by_class(folder, graph) if colour == CLASS else _by_score(folder, records, graph, colour, round)
    time = float(edges.time[edges.round <= round].max(initial=0.0))
    failed = np.isin(graph.nodes, list(failed_nodes(records, time)))
    with styled():
        figure = new_figure(columns, WIDTHS[columns] + (0.0 if colouring.labels else 0.25))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_aspect("equal")
        _draw(figure, axes, graph, colouring, failed)
        axes.set_title(plain_text(graph.caption(round)), fontsize=7, y=-0.04)
    return figure


@dataclass(frozen=True)
class _Graph:
    nodes: tuple[int, ...]
    """The nodes that have records."""
    edges: Integers
    """The indices of the sender and the receiver of each edge."""
    points: Points

    @classmethod
    def at_round(cls, edges: Edges, round: int) -> _Graph:
        nodes = np.unique(edges.node)
        found = _indices(nodes, edges.at_round(round))
        # A graph that changes has the same positions in all rounds.
        points = positions(len(nodes), _indices(nodes, edges.at_round(0)) if edges.static else found[:0])
        return cls(tuple(nodes.tolist()), found, points)

    def caption(self, round: int) -> str:
        edges = {(a, b) for a, b in self.edges.tolist()}
        both_ways = sum((b, a) in edges for a, b in edges) // 2
        one_way = len(edges) - 2 * both_ways
        parts = [_count(len(self.nodes), "node"), _count(both_ways, "link") if both_ways else ""]
        parts += [_count(one_way, "one-way link") if one_way else "", f"round {round}"]
        return "  ·  ".join(part for part in parts if part)


def _indices(nodes: Integers, edges: Integers) -> Integers:
    """Return edges between indices of `nodes`, without edges to nodes that have no records."""
    places = np.minimum(np.searchsorted(nodes, edges), len(nodes) - 1)
    return np.asarray(places[(nodes[places] == edges).all(axis=1) & (edges[:, 0] != edges[:, 1])])


@dataclass(frozen=True)
class _Colouring:
    """The colour of each node: a number of a scale or, with `labels`, the index of a label."""

    values: Floats
    """NaN: the node has none."""
    title: str
    labels: tuple[str, ...] = ()
    limits: tuple[float, float] = (0.0, 1.0)
    rising: bool = True
    """Whether bright is a high value."""


def _by_class(folder: RunFolder, graph: _Graph) -> _Colouring:
    counts = read_node_data(folder).class_counts
    if counts is None:
        raise DataError(f"{folder.path}: colour = {CLASS!r}: the samples of this run have no classes, or too many")
    frequent = [int(np.argmax(row)) if any(row) else -1 for row in counts]
    values = [frequent[node] if node < len(frequent) and frequent[node] >= 0 else math.nan for node in graph.nodes]
    classes = len(counts[0]) if counts else 0
    labels = tuple(map(str, range(classes))) if classes <= len(CLASS_COLOURS) else ()
    return _Colouring(np.array(values), "most frequent class", labels, (0.0, max(1.0, classes - 1.0)))


def _by_score(folder: RunFolder, records: RunRecords, graph: _Graph, metric: str | None, round: int) -> _Colouring:
    known = records.evaluations.metrics
    chosen = main_metric(known) if metric is None else metric
    if chosen is None or chosen not in known:
        problem = "no scores were recorded" if chosen is None else f"{chosen!r} was not measured"
        use = ", ".join([*sorted(known), CLASS])
        raise DataError(f"{folder.path}: colour: {problem}; use one of {use}")
    scores = records.evaluations.scores(chosen)
    latest = {
        node: score
        for node, at, score in zip(scores.node.tolist(), scores.round.tolist(), scores.score.tolist(), strict=True)
        if at <= round
    }
    values = np.array([latest.get(node, math.nan) for node in graph.nodes])
    finite = values[np.isfinite(values)]
    limits = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if limits[0] == limits[1]:
        limits = (limits[0] - 0.5, limits[1] + 0.5)
    return _Colouring(values, f"{split_of(folder)} {chosen}", (), limits, higher_is_better(chosen))


def _draw(figure: Figure, axes: Axes, graph: _Graph, colouring: _Colouring, failed: NDArray[np.bool_]) -> None:
    from matplotlib.lines import Line2D

    radius = _radius(graph.points, figure.get_figwidth())
    _draw_edges(axes, graph, radius)
    colours, scale = _node_colours(colouring)
    has_value = np.isfinite(colouring.values)
    x, y = graph.points[:, 0], graph.points[:, 1]
    style: dict[str, Any] = {"s": (2 * radius) ** 2, "linewidths": min(0.8, 0.18 * radius), "zorder": 2}
    axes.scatter(x[has_value], y[has_value], c=colours[has_value], edgecolors="white", **style)
    missing = ~has_value
    axes.scatter(x[missing], y[missing], c=WITHOUT_VALUE, edgecolors=EDGE_COLOUR, **style)
    cross: dict[str, Any] = {
        "marker": "x",
        "c": FAILED_COLOUR,
        "s": (1.6 * radius) ** 2,
        "linewidths": max(0.6, 0.22 * radius),
    }
    axes.scatter(x[failed], y[failed], zorder=4, **cross)
    if len(graph.nodes) <= MAX_LABELLED:
        _draw_labels(axes, graph, colours, has_value, radius)
    axes.margins(0.06)
    axes.autoscale_view()
    handles: list[Any] = []
    labels: list[str] = []
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 5}
    for i, label in enumerate(colouring.labels):
        handles.append(Line2D([], [], markerfacecolor=CLASS_COLOURS[i], markeredgecolor="none", **dot))
        labels.append(label)
    if missing.any():
        handles.append(Line2D([], [], markerfacecolor=WITHOUT_VALUE, markeredgecolor=EDGE_COLOUR, **dot))
        labels.append(f"no {colouring.title}")
    if failed.any():
        handles.append(Line2D([], [], color=FAILED_COLOUR, marker="x", linestyle="", markersize=5))
        labels.append("failed")
    if scale is not None:
        bar = figure.colorbar(scale, ax=axes, orientation="horizontal", pad=0.06, fraction=0.045, aspect=40, shrink=0.7)
        bar.set_label(plain_text(colouring.title))
    if handles:
        add_legend(figure, handles, labels, colouring.title if colouring.labels else None)


def _node_colours(colouring: _Colouring) -> tuple[NDArray[np.float64], Any]:
    """Return the colour of each node and, without labels, the scale for a colour bar."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgba

    values = np.nan_to_num(colouring.values)
    if colouring.labels:
        return np.array([to_rgba(CLASS_COLOURS[int(value)]) for value in values]), None
    scale = ScalarMappable(Normalize(*colouring.limits), colormaps["viridis" if colouring.rising else "viridis_r"])
    return np.asarray(scale.to_rgba(values)), scale


def _radius(points: Points, inches: float) -> float:
    """Return the radius of a node in points of 1/72 inch: a part of the usual distance to the next node."""
    from scipy.spatial import cKDTree

    if len(points) < 2:
        return 10.0
    distances, _ = cKDTree(points).query(points, k=2)
    span = float(np.ptp(points, axis=0).max()) or 1.0
    side = 0.85 * inches * 72
    gap = float(np.quantile(distances[:, 1], 0.1)) * side / span
    smallest = 3.6 if len(points) <= MAX_LABELLED else 0.16 * side / math.sqrt(len(points))
    return min(10.0, max(smallest, 0.32 * gap))


def _draw_edges(axes: Axes, graph: _Graph, radius: float) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    pairs = {(a, b) for a, b in graph.edges.tolist()}
    lines = [(a, b) for a, b in pairs if a < b and (b, a) in pairs]
    one_way = [(a, b) for a, b in pairs if (b, a) not in pairs]
    arrows = len(graph.nodes) <= MAX_ARROWS
    lines += [] if arrows else one_way
    alpha = min(0.85, max(0.06, 25.0 * math.sqrt(len(graph.nodes)) / max(1, len(lines))))
    width = min(1.0, max(0.4, 0.16 * radius))
    ends = graph.points[np.array(sorted(lines), np.int64).reshape(-1, 2)]
    axes.add_collection(LineCollection(list(ends), colors=EDGE_COLOUR, linewidths=width, alpha=alpha, zorder=1))
    for a, b in sorted(one_way) if arrows else ():
        axes.add_patch(
            FancyArrowPatch(
                tuple(graph.points[a]), tuple(graph.points[b]), connectionstyle="arc3,rad=0.1",
                arrowstyle=f"-|>,head_length={0.4 * radius},head_width={0.18 * radius}", shrinkA=radius,
                shrinkB=radius, color=EDGE_COLOUR, linewidth=width, alpha=0.8, zorder=1,
            )
        )  # fmt: skip


def _draw_labels(
    axes: Axes, graph: _Graph, colours: NDArray[np.float64], has_value: NDArray[np.bool_], radius: float
) -> None:
    """Write the id of each node into it, in black or white, whichever is easier to read."""
    light = colours[:, :3] @ (0.299, 0.587, 0.114) > 0.55
    for node, (x, y), is_light in zip(graph.nodes, graph.points, light | ~has_value, strict=True):
        axes.text(
            x, y, str(node), color="black" if is_light else "white", fontsize=min(7.0, 0.95 * radius), ha="center",
            va="center_baseline", zorder=3,
        )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
