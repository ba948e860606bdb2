"""All kinds of figures of runs, by name: `shoal plot`, `shoal.plot` and `run.plot` use this module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shoal.errors import DataError
from shoal.results.plot_curves import Axis, Spread
from shoal.results.plot_heatmap import heatmap_figure
from shoal.results.plot_style import Columns
from shoal.results.plots import chart_figure, read_chart
from shoal.results.records import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind: TypeAlias = Literal["lines", "heatmap"]
"""What a figure shows: a quantity of several runs, or the nodes of one run."""


@dataclass(frozen=True)
class FigureOptions:
    """What to draw. None or an empty sequence is the default of the kind."""

    y: str | None = None
    """The quantity: a metric, "consensus", "drift", "training-loss", or "averaged-" and a metric."""
    axes: Sequence[Axis] = ()
    """The horizontal axis of each panel."""
    kind: Kind = "lines"
    spread: Spread | None = None
    columns: Columns = 2
    """The width, in columns of a paper."""
    labels: Sequence[str] = ()
    """The labels of the lines, in their order."""


@dataclass(frozen=True)
class DrawnFigure:
    """A figure, and what it shows."""

    figure: Figure
    title: str
    """Such as "accuracy by rounds"."""
    name: str
    """For a file, without an ending."""


def draw_figure(folders: Sequence[RunFolder], options: FigureOptions) -> DrawnFigure:
    """Draw a figure of runs; a run that is given twice is drawn once.

    Raises `DataError` if the runs do not have what it shows, or if options are wrong.
    """
    folders = list({folder.path.resolve(): folder for folder in folders}.values())
    if options.columns not in get_args(Columns):
        raise DataError(f"columns = {options.columns!r}; expected 1 or 2: the width in columns of a paper")
    if options.kind == "lines":
        chart = read_chart(folders, options.y, options.axes, options.spread, options.labels)
        name = re.sub(r"[^\w-]+", "-", chart.y)
        return DrawnFigure(chart_figure(chart, options.columns), f"{chart.y} by {', '.join(chart.axes)}", name)
    if options.kind not in get_args(Kind):
        raise DataError(f"kind = {options.kind!r}; expected one of {', '.join(map(repr, get_args(Kind)))}")
    for key, given in (("x", options.axes), ("spread", options.spread), ("labels", options.labels)):
        if given:
            raise DataError(f"{key} = {given!r}: a figure of kind {options.kind!r} does not have it; leave it out")
    if len(folders) != 1:
        raise DataError(f"kind = {options.kind!r} shows one run, and {len(folders)} were given: name one of them")
    return DrawnFigure(heatmap_figure(folders[0], options.y, options.columns), options.kind, options.kind)
