"""The figure of samples by class and node that papers show. The file's suffix selects PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError

TEXT_COLOUR, BACKGROUND, MARK_COLOUR, GRID_COLOUR = "#12303f", "#ffffff", "#2a7f9e", "#dde5e9"
MAX_BUBBLES = (40, 26)
"""Nodes and classes up to which each pair has a bubble. More are drawn as a heat map."""
MAX_ORDERED = 64
"""Nodes up to which they are ordered by id. More are grouped by their most frequent class."""
MAX_COLUMNS = 1500
"""The most nodes that a heat map shows; of more nodes, this many are chosen at even distances."""

Counts = npt.NDArray[np.int64]
"""The number of samples by node and class: nodes × classes."""


def draw_partition(counts: Counts, path: str | Path, title: str = "") -> None:
    """Draw the number of samples by node and class: nodes from left to right, classes from bottom to top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if counts.ndim != 2 or not counts.any():
        raise DataError("nothing to draw: no node holds a sample with a class")
    nodes, classes = counts.shape
    bubbles = nodes <= MAX_BUBBLES[0] and classes <= MAX_BUBBLES[1]
    width = min(11.0, max(4.8, 1.9 + 0.27 * nodes)) if bubbles else 9.0
    height = min(9.0, max(2.9, 1.2 + 0.27 * classes)) if bubbles else min(9.0, max(3.4, 1.6 + 0.12 * classes))
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if bubbles:
        _bubbles(figure, axes, counts)
    else:
        _heat_map(figure, axes, counts)
    axes.set_ylabel("class", color=TEXT_COLOUR)
    axes.tick_params(colors=TEXT_COLOUR, length=0 if bubbles else 3, labelsize=8)
    if title:
        axes.set_title(title, color=TEXT_COLOUR, fontsize=10, loc="left")
    figure.savefig(path, dpi=200)


def _bubbles(figure: Any, axes: Any, counts: Counts) -> None:
    """Draw bubbles whose area is the count. The largest just touches its neighbour."""
    nodes, classes = counts.shape
    axes.set(xlim=(-0.7, nodes - 0.3), ylim=(-0.7, classes - 0.3), xlabel="node")
    axes.xaxis.label.set_color(TEXT_COLOUR)
    axes.set_aspect("equal")
    axes.set_axisbelow(True)
    axes.grid(color=GRID_COLOUR, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks(range(0, nodes, 1 if nodes <= 26 else 2))
    axes.set_yticks(range(classes))
    figure.draw_without_rendering()  # computes the size of the axes
    box = axes.get_window_extent()
    cell = min(box.width / (nodes + 0.4), box.height / (classes + 0.4)) * 72 / figure.dpi
    largest = int(counts.max())
    area = (0.94 * cell) ** 2 / largest
    x, y = np.nonzero(counts)
    axes.scatter(x, y, s=np.maximum(counts[x, y] * area, 0.8), c=MARK_COLOUR, alpha=0.9, linewidths=0)
    shown = sorted({_rounded(largest), _rounded(largest / 4), 1 if largest < 12 else _rounded(largest / 16)})
    dots = [axes.scatter([], [], s=count * area, c=MARK_COLOUR, alpha=0.9, linewidths=0) for count in shown]
    axes.legend(
        dots, [f"{count:,}" for count in shown], title="samples", loc="center left", bbox_to_anchor=(1.01, 0.5),
        frameon=False, fontsize=8, title_fontsize=8, labelcolor=TEXT_COLOUR, labelspacing=1.6, borderpad=0.2,
    )  # fmt: skip


def _heat_map(figure: Any, axes: Any, counts: Counts) -> None:
    """Draw a column for each node; darker means more samples. The scale is a square root, so that small counts show."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.ticker import MaxNLocator

    nodes, classes = counts.shape
    label = "node"
    if nodes > MAX_ORDERED:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
        label = f"{nodes:,} nodes, grouped by most frequent class"
    if nodes > MAX_COLUMNS:
        counts = counts[np.linspace(0, nodes - 1, MAX_COLUMNS).round().astype(np.int64)]
        label = f"{MAX_COLUMNS:,} of {nodes:,} nodes, grouped by most frequent class"
    colours = LinearSegmentedColormap.from_list("samples", [BACKGROUND, "#8fc3d5", MARK_COLOUR, TEXT_COLOUR])
    drawn = axes.imshow(
        counts.T, origin="lower", aspect="auto", interpolation="nearest", cmap=colours,
        norm=PowerNorm(0.5, vmin=0, vmax=int(counts.max())),
    )  # fmt: skip
    axes.set_xlabel(label, color=TEXT_COLOUR)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 20), integer=True, min_n_ticks=1))
    if nodes > MAX_ORDERED:
        axes.set_xticks([])  # positions do not correspond to ids
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    bar = figure.colorbar(drawn, ax=axes, pad=0.015, fraction=0.04)
    bar.ax.tick_params(colors=TEXT_COLOUR, labelsize=8)
    bar.set_label("samples", color=TEXT_COLOUR, fontsize=8)


def _rounded(count: float) -> int:
    """Return a round number near `count`, at least 1."""
    digits = max(0, len(str(int(count))) - 2)
    unit = int(10**digits)
    return max(1, round(count / unit) * unit)
