"""A heat map of one run: a row for each node, a column for each evaluation or round, the colour is the score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.frames import Integers, RunRecords, read_records
from shoal.results.plot_curves import FRACTIONS, TRAINING_LOSS, Floats, unknown_quantity
from shoal.results.plot_style import MISSING, Columns, new_figure, plain_text, styled
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder
from shoal.results.timing import clock, higher_is_better, split_of

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

HEIGHTS: dict[Columns, float] = {1: 2.4, 2: 3.2}
"""Inches."""
MAX_CELLS = 2000
"""The number of rows, and of columns. Of more nodes or rounds, evenly spaced ones are drawn."""
EXTREME = 0.02
"""The colours of a quantity without bounds cover all values except this fraction at each end."""


def heatmap_figure(folder: RunFolder, y: str | None = None, columns: Columns = 2) -> Figure:
    """Draw the score of each node at each evaluation, or its training loss in each round.

    Bright is good: a high accuracy or a low loss. White cells have no value: the node was not evaluated.

    Raises `DataError` if the run has no such scores.
    """
    from matplotlib.ticker import MaxNLocator

    records = read_records(folder)
    metrics = records.evaluations.metrics
    known = [*sorted(metrics), *([TRAINING_LOSS] if np.isfinite(records.rounds.loss).any() else [])]
    name = main_metric(metrics) if y is None else y
    if name is None:
        raise DataError(
            f"{folder.path}: nothing to plot: no scores were recorded; see evaluation.every and evaluation.nodes"
        )
    if name not in known:
        raise unknown_quantity(name, known, "of each node")
    x, nodes, cells, by_time = _cells(records, name)
    with styled():
        figure = new_figure(columns, HEIGHTS[columns])
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(True)
        rising = name != TRAINING_LOSS and higher_is_better(name)
        low, high = _colour_range(cells, name.startswith(FRACTIONS))
        drawn = axes.pcolorfast(
            _edges(x), _edges(nodes), cells, cmap=_colours(rising), vmin=low, vmax=high, rasterized=True
        )  # fmt: skip
        axes.set_xlabel(f"{clock(folder)} time [s]" if by_time else "round")
        axes.set_ylabel("node")
        axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        if not by_time:
            axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        title = "training loss" if name == TRAINING_LOSS else f"{split_of(folder)} {name}"
        figure.colorbar(
            drawn, ax=axes, label=plain_text(title), pad=0.015, fraction=0.05, extend=_beyond(cells, low, high)
        )
    return figure


def _cells(records: RunRecords, name: str) -> tuple[Floats, Floats, Floats, bool]:
    """Return the positions of the columns, the nodes, the value of each cell (NaN: none), and whether x is time."""
    if name == TRAINING_LOSS:
        rounds = records.rounds
        node, moment, time, value, by_time = rounds.node, rounds.round, rounds.time, rounds.loss, False
    else:
        scores = records.evaluations.scores(name)
        by_time = bool((scores.tick >= 0).any())
        if by_time:
            scores = scores.select(scores.tick >= 0)
        node, time, value = scores.node, scores.time, scores.score
        moment = scores.tick if by_time else scores.round
    nodes, row, is_row = _places(node)
    moments, column, is_column = _places(moment)
    shown = is_row & is_column
    cells = np.full((len(nodes), len(moments)), np.nan)
    cells[row[shown], column[shown]] = value[shown]  # a node that rejoins may repeat a round: the last value counts
    x: Floats = moments.astype(np.float64) + 1
    if by_time:
        times = np.zeros(len(moments))
        np.maximum.at(times, column[shown], time[shown])
        x = np.maximum.accumulate(times)
    return x, nodes.astype(np.float64), cells, by_time


def _places(values: Integers) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """Return the distinct values in order, at most `MAX_CELLS`; for each value its place, and whether it is shown."""
    distinct = np.unique(values)
    if len(distinct) > MAX_CELLS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, MAX_CELLS).round().astype(np.int64)]
    place = np.searchsorted(distinct, values).clip(max=len(distinct) - 1)
    return distinct, place, distinct[place] == values


def _edges(centres: Floats) -> Floats:
    """Return the borders of cells around `centres`, half-way between them."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - between[0]], between, [2 * centres[-1] - between[-1]]])


def _colour_range(cells: Floats, bounded: bool) -> tuple[float, float]:
    """Return the values of the darkest and the brightest colour, or the reverse."""
    finite = cells[np.isfinite(cells)]
    if not len(finite):
        return 0.0, 1.0
    low, high = np.quantile(finite, [0.0, 1.0] if bounded else [EXTREME, 1 - EXTREME])
    return (float(low), float(high)) if high > low else (float(low) - 0.5, float(low) + 0.5)


def _beyond(cells: Floats, low: float, high: float) -> Literal["neither", "both", "min", "max"]:
    """Return the ends of the range of colours beyond which there are values."""
    below, above = bool((cells < low).any()), bool((cells > high).any())
    return "both" if below and above else "min" if below else "max" if above else "neither"


def _colours(rising: bool) -> Colormap:
    """Return a range of colours whose lightness only rises, so that it is readable in grey too."""
    import matplotlib

    return matplotlib.colormaps["viridis" if rising else "viridis_r"].with_extremes(bad=MISSING)
