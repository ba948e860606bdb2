"""Who holds what: the label-by-node picture that papers print. PNG, SVG or PDF, by the ending of the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError

INK, PAPER, WATER, LINE = "#12303f", "#ffffff", "#2a7f9e", "#dde5e9"
BUBBLES = (40, 26)
"""Nodes and classes up to which there is a bubble for each pair; more are drawn as a map."""
IN_ORDER = 64
"""Nodes up to which they stand in the order of their ids; more are put together by the class they hold most of."""
COLUMNS = 1500
"""Nodes that a map has room for; of more, as many are drawn, evenly chosen."""

Counts = npt.NDArray[np.int64]
"""How many samples of each class each node holds: nodes × classes."""


def draw_partition(counts: Counts, path: str | Path, title: str = "") -> None:
    """Draw how many samples of each class each node holds: nodes from left to right, classes from bottom to top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if counts.ndim != 2 or not counts.any():
        raise DataError("nothing to draw: no node holds a sample with a class")
    nodes, classes = counts.shape
    bubbles = nodes <= BUBBLES[0] and classes <= BUBBLES[1]
    width = min(11.0, max(4.8, 1.9 + 0.27 * nodes)) if bubbles else 9.0
    height = min(9.0, max(2.9, 1.2 + 0.27 * classes)) if bubbles else min(9.0, max(3.4, 1.6 + 0.12 * classes))
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if bubbles:
        _bubbles(figure, axes, counts)
    else:
        _map(figure, axes, counts)
    axes.set_ylabel("class", color=INK)
    axes.tick_params(colors=INK, length=0 if bubbles else 3, labelsize=8)
    if title:
        axes.set_title(title, color=INK, fontsize=10, loc="left")
    figure.savefig(path, dpi=200)


def _bubbles(figure: Any, axes: Any, counts: Counts) -> None:
    """The area of a bubble is the count; the largest just touches the next."""
    nodes, classes = counts.shape
    axes.set(xlim=(-0.7, nodes - 0.3), ylim=(-0.7, classes - 0.3), xlabel="node")
    axes.xaxis.label.set_color(INK)
    axes.set_aspect("equal")
    axes.set_axisbelow(True)
    axes.grid(color=LINE, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks(range(0, nodes, 1 if nodes <= 26 else 2))
    axes.set_yticks(range(classes))
    figure.draw_without_rendering()  # so that the axes know their size
    box = axes.get_window_extent()
    cell = min(box.width / (nodes + 0.4), box.height / (classes + 0.4)) * 72 / figure.dpi
    largest = int(counts.max())
    area = (0.94 * cell) ** 2 / largest
    x, y = np.nonzero(counts)
    axes.scatter(x, y, s=np.maximum(counts[x, y] * area, 0.8), c=WATER, alpha=0.9, linewidths=0)
    shown = sorted({_rounded(largest), _rounded(largest / 4), 1 if largest < 12 else _rounded(largest / 16)})
    dots = [axes.scatter([], [], s=count * area, c=WATER, alpha=0.9, linewidths=0) for count in shown]
    axes.legend(
        dots, [f"{count:,}" for count in shown], title="samples", loc="center left", bbox_to_anchor=(1.01, 0.5),
        frameon=False, fontsize=8, title_fontsize=8, labelcolor=INK, labelspacing=1.6, borderpad=0.2,
    )  # fmt: skip


def _map(figure: Any, axes: Any, counts: Counts) -> None:
    """A column for each node; the darker, the more samples. Few beside many stay to be seen: the scale is a root."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.ticker import MaxNLocator

    nodes, classes = counts.shape
    label = "node"
    if nodes > IN_ORDER:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
        label = f"{nodes:,} nodes, by the class that each holds most of"
    if nodes > COLUMNS:
        counts = counts[np.linspace(0, nodes - 1, COLUMNS).round().astype(np.int64)]
        label = f"{COLUMNS:,} of {nodes:,} nodes, by the class that each holds most of"
    colours = LinearSegmentedColormap.from_list("water", [PAPER, "#8fc3d5", WATER, INK])
    drawn = axes.imshow(
        counts.T, origin="lower", aspect="auto", interpolation="nearest", cmap=colours,
        norm=PowerNorm(0.5, vmin=0, vmax=int(counts.max())),
    )  # fmt: skip
    axes.set_xlabel(label, color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 20), integer=True, min_n_ticks=1))
    if nodes > IN_ORDER:
        axes.set_xticks([])  # a place says nothing about an id
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    bar = figure.colorbar(drawn, ax=axes, pad=0.015, fraction=0.04)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.set_label("samples", color=INK, fontsize=8)


def _rounded(count: float) -> int:
    """A number near `count`, at least 1, that is easily read."""
    digits = max(0, len(str(int(count))) - 2)
    unit = int(10**digits)
    return max(1, round(count / unit) * unit)
