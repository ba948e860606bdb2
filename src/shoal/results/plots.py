"""Plots of runs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shoal.errors import DataError
from shoal.results.frames import read_records
from shoal.results.groups import run_labels
from shoal.results.progress import main_metric
from shoal.results.records import Average, RunFolder
from shoal.results.timing import Curve, bytes_sent, clock, curve_or_none, split_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Axis: TypeAlias = Literal["rounds", "time", "bytes"]
"""The horizontal axis."""

FRACTIONS = ("accuracy", "top5", "class ")
"""Metrics between 0 and 1, by how their names begin."""


def choose_metric(folders: Sequence[RunFolder], wanted: str | None = None) -> str:
    """Return the metric to plot: `wanted`, or the main metric of the runs.

    Raises `DataError` if the runs have no scores, or none of this metric.
    """
    known = {name for folder in folders for name in read_records(folder).evaluations.metrics}
    metric = main_metric(known) if wanted is None else wanted
    if metric is None:
        raise DataError("nothing to plot: no scores were recorded; see evaluation.every and evaluation.nodes")
    if metric not in known:
        raise DataError(f"metric {metric!r} was not measured; use one of {', '.join(sorted(known)) or 'none'}")
    return metric


def choose_axis(folders: Sequence[RunFolder]) -> Axis:
    """Return the default axis: time if one of the runs was evaluated by time, else rounds."""
    ticks = any((read_records(folder).evaluations.tick >= 0).any() for folder in folders)
    return "time" if ticks else "rounds"


def metric_plot(folders: Sequence[RunFolder], path: Path, metric: str, x: Axis = "rounds") -> None:
    """Draw `metric_figure` to a file."""
    figure = metric_figure(folders, metric, x)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def metric_figure(folders: Sequence[RunFolder], metric: str, x: Axis = "rounds") -> Figure:
    """Plot a metric over rounds, time or bytes sent: mean, minimum and maximum of the nodes, and the averaged model.

    Runs without this metric, such as a run that failed before its first evaluation, are left out. The figure does not
    belong to `pyplot`: it changes no backend and need not be closed. Notebooks display it.

    Raises `DataError` for an unknown axis, and if runs have different splits (`evaluation.split`): one axis cannot show
    both.
    """
    from matplotlib.figure import Figure

    if x not in get_args(Axis):
        raise DataError(f"x = {x!r}; expected one of {', '.join(map(repr, get_args(Axis)))}")

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    curves = {folder: found for folder in folders if (found := curve_or_none(folder, metric)) is not None}
    splits = sorted({split_of(folder) for folder in curves})
    if len(splits) > 1:
        raise DataError(f"runs have different splits, {' and '.join(splits)}: plot those of each split by themselves")
    alone = len(curves) == 1
    figure = NotebookFigure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for number, (folder, label) in enumerate(zip(curves, run_labels(list(curves)), strict=True)):
        _draw_run(axes, folder, curves[folder], x, f"C{number}", label, alone)
    _format_axes(axes, " ".join([*splits, metric]), x, _axis_title(x, curves))
    if metric.startswith(FRACTIONS):
        axes.set_ylim(0, 1)
    axes.legend(
        frameon=False, loc="lower right" if metric.startswith(FRACTIONS) else "upper right",
        title=None if alone else "mean over nodes; dashed: averaged model",
    )  # fmt: skip
    return figure


def _draw_run(axes: Axes, folder: RunFolder, curve: Curve, x: Axis, colour: str, label: str, alone: bool) -> None:
    """Draw one run; if it is alone, the legend names each of its lines."""
    xs = _positions(x, folder, curve)
    axes.plot(xs, curve.means, color=colour, label=f"{label}: mean over nodes" if alone else label)
    axes.fill_between(
        xs, curve.mins, curve.maxs, color=colour, alpha=0.15, linewidth=0,
        label="from node to node" if alone else None,
    )  # fmt: skip
    averages = _averages(folder, curve)
    found = [i for i, moment in enumerate(curve.moments) if moment in averages]
    if found:
        axes.plot(
            [xs[i] for i in found], [averages[curve.moments[i]] for i in found],
            color=colour, linestyle="--", linewidth=1, label="averaged model" if alone else None,
        )  # fmt: skip


def _format_axes(axes: Axes, score: str, x: Axis, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    if x == "bytes":
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    if x != "rounds":
        axes.set_xlim(left=0)
    axes.set(xlabel=title, ylabel=score)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _positions(x: Axis, folder: RunFolder, curve: Curve) -> Sequence[float]:
    if x == "bytes":
        return bytes_sent(folder, curve)
    return curve.times if x == "time" else curve.rounds


def _axis_title(x: Axis, curves: Mapping[RunFolder, Curve]) -> str:
    if x == "bytes":
        return "sent by all nodes"
    if x == "time":
        clocks = sorted({clock(folder) for folder in curves})
        return f"{' or '.join(clocks)} time [s]"
    return "round, mean over nodes" if any(found.by_ticks for found in curves.values()) else "round"


def _averages(folder: RunFolder, curve: Curve) -> dict[int, float]:
    """Return the score of the averaged model at each tick or round."""
    scores = {}
    for record in folder.read_averages():
        if isinstance(record, Average) and curve.metric in record.scores:
            moment = record.tick if curve.by_ticks else record.round
            if moment is not None:
                scores[moment] = record.scores[curve.metric]
    return scores
