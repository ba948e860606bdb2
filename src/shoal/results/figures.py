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
from shoal.results.plots import LogAxis, chart_figure, read_chart
from shoal.results.records import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind: TypeAlias = Literal["lines", "heatmap", "timeline", "topology"]
"""What a figure shows: a quantity of several runs, or the nodes of one run."""

OPTIONS: dict[str, tuple[Kind, ...]] = {
    "y": ("lines", "heatmap", "topology"),
    "axes": ("lines",),
    "spread": ("lines",),
    "labels": ("lines",),
    "log": ("lines",),
    "round": ("topology",),
    "start": ("timeline",),
    "end": ("timeline",),
}
"""The kinds of figures that an option belongs to; the others belong to all kinds."""


@dataclass(frozen=True)
class FigureOptions:
    """What to draw. None or an empty sequence is the default of the kind."""

    y: str | None = None
    """The quantity: a metric, "consensus", "drift", "training-loss", or "averaged-" and a metric.

    A topology is coloured by it: by a metric, or by "class".
    """
    axes: Sequence[Axis] = ()
    """The horizontal axis of each panel."""
    kind: Kind = "lines"
    spread: Spread | None = None
    columns: Columns | None = None
    """The width, in columns of a paper."""
    labels: Sequence[str] = ()
    """The labels of the lines, in their order."""
    log: Sequence[LogAxis] = ()
    """The axes with a logarithmic scale."""
    round: int | None = None
    """The round of a topology; default: the last."""
    start: float | None = None
    """The time at which a timeline begins."""
    end: float | None = None


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
    kind = options.kind
    if kind not in get_args(Kind):
        raise DataError(f"kind = {kind!r}; expected one of {', '.join(map(repr, get_args(Kind)))}")
    if options.columns not in (None, *get_args(Columns)):
        raise DataError(f"columns = {options.columns!r}; expected 1 or 2: the width in columns of a paper")
    for key, kinds in OPTIONS.items():
        given = getattr(options, key)
        if kind not in kinds and given not in (None, ()) and given != []:
            name = "x or panels" if key == "axes" else key
            raise DataError(f"{name} = {given!r}: a figure of kind {kind!r} does not have it; leave it out")
    if kind == "lines":
        chart = read_chart(folders, options.y, options.axes, options.spread, options.labels)
        name = re.sub(r"[^\w-]+", "-", chart.y)
        figure = chart_figure(chart, options.columns or 2, options.log)
        return DrawnFigure(figure, f"{chart.y} by {', '.join(chart.axes)}", name)
    if len(folders) != 1:
        raise DataError(f"kind = {kind!r} shows one run, and {len(folders)} were given: name one of them")
    return DrawnFigure(_node_figure(folders[0], options), kind, kind)


def _node_figure(folder: RunFolder, options: FigureOptions) -> Figure:
    """Draw the nodes of one run."""
    if options.kind == "timeline":
        from shoal.results.timeline_plot import timeline_figure

        return timeline_figure(folder, options.columns or 2, options.start, options.end)
    if options.kind == "topology":
        from shoal.results.graph_plot import topology_figure

        return topology_figure(folder, options.round, options.y, options.columns or 1)
    return heatmap_figure(folder, options.y, options.columns or 2)
