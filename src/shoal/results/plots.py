"""Figures of runs: a quantity over rounds, time or bytes, one line for each group of runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from shoal.errors import DataError
from shoal.results.groups import Group, group_runs, one_of_each_seed
from shoal.results.plot_curves import (
    AVERAGED,
    CONSENSUS,
    DRIFT,
    FRACTIONS,
    TRAINING_LOSS,
    WITHOUT_NODES,
    Axis,
    Floats,
    Line,
    RunCurve,
    Spread,
    mean_line,
    read_curve,
    unknown_quantity,
)
from shoal.results.plot_style import NEUTRAL, Columns, add_legend, line_style, new_figure, plain_text, styled
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

LogAxis: TypeAlias = Literal["rounds", "time", "bytes", "y"]
"""An axis that may have a logarithmic scale."""
PANEL_HEIGHTS: dict[Columns, float] = {1: 2.1, 2: 2.9}
"""Inches, of a figure with one panel."""
ROW_HEIGHT = 2.1
"""Inches, of panels side by side, and of each of the panels one below the other."""
MARKERS_PER_LINE = 8
BAND_ALPHAS, MANY_LINES = (0.2, 0.12), 4
"""The opacity of bands, of few lines and of more than `MANY_LINES`: bands may overlap."""
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
LONG_TIME = 2 * 3600
"""Seconds from which on an axis shows hours."""
AVERAGED_STYLE = line_style(1)
"""The line of the averaged model, in a figure of one run."""
LOG_TICKS = ((1.7, (1.0, 2.0, 5.0)), (3.5, (1.0, 3.0)), (math.inf, (1.0,)))
"""The ticks in each decade of a logarithmic axis of less than so many decades."""
SHORT_PART = 0.9
"""If a line covers less than this part of its longest run, a warning names the reason."""


@dataclass(frozen=True)
class GroupLine:
    """One line of a chart, in each panel."""

    label: str
    runs: tuple[RunCurve, ...]
    panels: tuple[Line, ...]


@dataclass(frozen=True)
class Chart:
    """What a figure of lines shows."""

    y: str
    axes: tuple[Axis, ...]
    """The horizontal axis of each panel."""
    spread: Spread
    split: str
    lines: tuple[GroupLine, ...]
    title: str | None
    """What the labels of all lines name, such as "sharing"; None if they differ in several keys."""

    @property
    def alone(self) -> bool:
        """Whether the chart shows one run: it then also shows the averaged model."""
        return len(self.lines) == 1 and len(self.lines[0].runs) == 1

    @property
    def has_band(self) -> bool:
        return any(line.low is not None for group in self.lines for line in group.panels)


def read_chart(
    folders: Sequence[RunFolder],
    y: str | None = None,
    axes: Sequence[Axis] = (),
    spread: Spread | None = None,
    labels: Sequence[str] = (),
) -> Chart:
    """Read what a figure of runs shows. Runs without the quantity `y` are left out, with a warning.

    `axes` are the horizontal axes of the panels; default: time if a run was evaluated by time, else rounds. `spread` is
    the band around a line; default: the interval over seeds or, if there is only one run, the range over nodes.
    `labels` replace the labels of the lines, in their order.

    Raises `DataError` if there is nothing to plot, for an unknown quantity or axis, for a wrong number of labels, and
    if runs have different splits (`evaluation.split`): one axis cannot show both.
    """
    _check("x", axes, get_args(Axis))
    _check("spread", [] if spread is None else [spread], get_args(Spread))
    runs = [read_curve(folder, y, "bytes" in axes) for folder in folders]
    y = _choose(runs, y)
    shown = [run for run in runs if run.curve is not None and run.curve.metric == y]
    _warn_of_left_out(y, len(runs) - len(shown), len(runs))
    splits = sorted({run.split for run in shown})
    if len(splits) > 1:
        raise DataError(f"runs have different splits, {' and '.join(splits)}: plot those of each split by themselves")
    mains = sorted({str(run.main) for run in shown})
    if y == DRIFT and len(mains) > 1:
        raise DataError(f"y = 'drift': runs have different metrics, {' and '.join(mains)}: plot those of each metric")
    axes = tuple(axes) or ("time" if any(run.by_ticks for run in runs) else "rounds",)
    if spread is None:
        spread = "nodes" if len(shown) == 1 else "seeds"
    elif spread == "nodes" and y.startswith(WITHOUT_NODES):
        raise DataError(f"spread = 'nodes': {y!r} has no value for each node; plot it without a spread over nodes")
    groups = group_runs([run.folder for run in shown])
    title, names = _labels(groups, labels)
    by_folder = {run.folder: run for run in shown}
    lines = [
        _group_line(name, _with_seeds(name, [by_folder[folder] for folder in group.runs]), axes, spread)
        for name, group in zip(names, groups, strict=True)
    ]
    drawn = tuple(line for line in lines if line is not None)
    if not drawn:
        raise DataError("nothing to plot: the runs of each group have no common part of the axis")
    return Chart(y, axes, spread, splits[0], drawn, title)


def _check(key: str, values: Iterable[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise DataError(f"{key} = {value!r}; expected one of {', '.join(map(repr, allowed))}")


def _choose(runs: Sequence[RunCurve], wanted: str | None) -> str:
    """Return the quantity to plot: `wanted`, or the main metric of the runs."""
    known = list(dict.fromkeys(name for run in runs for name in run.known))
    metrics = {run.curve.metric for run in runs if run.curve is not None}
    y = main_metric(metrics) if wanted is None else wanted
    if y is None:
        others = f"; or plot one of {', '.join(known)} with --y" if known else ""
        raise DataError(
            f"nothing to plot: no scores were recorded; see evaluation.every and evaluation.nodes{others}"
        )  # fmt: skip
    if y not in known:
        raise unknown_quantity(y, known)
    return y


def _warn_of_left_out(y: str, count: int, total: int) -> None:
    if count:
        warnings.warn(f"{count} of {total} runs {'has' if count == 1 else 'have'} no {y}: left out", stacklevel=3)


def _labels(groups: Sequence[Group], labels: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the title of the legend, and the label of each line. If the lines differ in one key, it is the title."""
    if labels and len(labels) != len(groups):
        lines = "\n".join(f"  {number}. {group.label}" for number, group in enumerate(groups, 1))
        raise DataError(
            f"{len(labels)} {'label' if len(labels) == 1 else 'labels'} for {len(groups)} lines; give one for each, in "
            f"this order:\n{lines}"
        )
    found = list(labels) or [group.label for group in groups]
    parts = [label.partition(" = ") for label in found]
    keys = {key for key, _, _ in parts}
    if labels or len(keys) > 1 or any(len(group.settings) != 1 for group in groups):
        return None, found
    return keys.pop(), [value for _, _, value in parts]


def _with_seeds(label: str, runs: Sequence[RunCurve]) -> list[RunCurve]:
    return one_of_each_seed(label, [run.folder.read_experiment().get("seed") for run in runs], runs)


def _group_line(label: str, runs: Sequence[RunCurve], axes: Sequence[Axis], spread: Spread) -> GroupLine | None:
    panels = []
    for axis in axes:
        line = mean_line(runs, axis, spread)
        if line is None:
            warnings.warn(f"{label}: left out, because its runs have no common part of the axis {axis}", stacklevel=3)
            return None
        panels.append(line)
    longest = max(run.positions(axes[0])[-1] for run in runs)
    if len(runs) > 1 and panels[0].x[-1] < SHORT_PART * longest:
        warnings.warn(
            f"{label}: the line ends where the shortest of its {len(runs)} runs ends, at {panels[0].x[-1]:g} of "
            f"{longest:g} ({axes[0]})",
            stacklevel=3,
        )
    if not np.isfinite(panels[0].mean).all():
        warnings.warn(f"{label}: the line has gaps, because a value is not finite (training diverged)", stacklevel=3)
    return GroupLine(label, tuple(runs), tuple(panels))


def chart_figure(chart: Chart, columns: Columns = 2, log: Sequence[LogAxis] = ()) -> Figure:
    """Draw a chart: panels side by side in two columns, one below the other in one column.

    `log` are the axes with a logarithmic scale. Raises `DataError` for an unknown one.
    """
    _check("log", log, get_args(LogAxis))
    count = len(chart.axes)
    with styled():
        height = PANEL_HEIGHTS[columns] if count == 1 else ROW_HEIGHT * (1 if columns == 2 else count)
        figure = new_figure(columns, height)
        shape = (1, count) if columns == 2 else (count, 1)
        panels: list[Axes] = list(figure.subplots(*shape, sharey=True, squeeze=False).flat)
        for number, axes in enumerate(panels):
            _draw_panel(axes, chart, number, chart.axes[number] in log)
        _format_y(panels[0], chart, "y" in log)
        for axes in panels if columns == 1 else panels[:1]:
            axes.set_ylabel(plain_text(_y_title(chart)))
        if not chart.alone and chart.has_band:
            panels[0].set_title(_band_title(chart), loc="left", fontsize=7, color=NEUTRAL, pad=3)
        add_legend(figure, *_legend_entries(chart), None if chart.title is None else plain_text(chart.title))
    return figure


def _draw_panel(axes: Axes, chart: Chart, number: int, log: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axis = chart.axes[number]
    end = max(float(line.panels[number].x[-1]) for line in chart.lines)
    scale, title = _unit(chart, axis, end)
    alpha = BAND_ALPHAS[len(chart.lines) > MANY_LINES]
    for index, group in enumerate(chart.lines):
        line, style = group.panels[number], line_style(index)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x / scale, line.low, line.high, color=style.colour, alpha=alpha, linewidth=0)
        marked = [] if chart.alone else _marked(np.log(line.x + 1) if log else line.x, index / len(chart.lines))
        height = 2.1 if style.dash == "-" else 2.2  # a line below shows through the gaps of a dashed line
        axes.plot(line.x / scale, line.mean, markevery=marked, zorder=height, **style.arguments())
    if chart.alone:
        _draw_averaged(axes, chart.lines[0].runs[0], axis, scale)
    axes.set_xlim(0, 1.02 * end / scale if end > 0 else 1)
    axes.set_xlabel(title)
    if log:
        _set_log(axes, axes.xaxis, np.concatenate([group.panels[number].x for group in chart.lines]) / scale)
    elif axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.grid()


def _marked(x: Floats, shift: float) -> list[int]:
    """Return the points that have a marker: evenly spaced, at different positions for different lines."""
    at = x[0] + (np.arange(MARKERS_PER_LINE) + shift) / MARKERS_PER_LINE * (x[-1] - x[0])
    return [int(i) for i in np.unique(np.searchsorted(x, at).clip(0, len(x) - 1))]


def _draw_averaged(axes: Axes, run: RunCurve, axis: Axis, scale: float) -> None:
    found = np.isfinite(run.averaged)
    if found.any():
        x = np.asarray(run.positions(axis))[found] / scale
        axes.plot(x, np.asarray(run.averaged)[found], color=AVERAGED_STYLE.colour, linestyle=AVERAGED_STYLE.dash)


def _unit(chart: Chart, axis: Axis, end: float) -> tuple[float, str]:
    """Return the unit of a horizontal axis that ends at `end`, and its title."""
    runs = [run for line in chart.lines for run in line.runs]
    if axis == "bytes":
        scale, unit = next(((scale, unit) for scale, unit in BYTE_UNITS if end >= scale), (1.0, "B"))
        return scale, f"sent by all nodes [{unit}]"
    if axis == "time":
        clocks = " or ".join(sorted({run.clock for run in runs}))
        return (3600.0, f"{clocks} time [h]") if end >= LONG_TIME else (1.0, f"{clocks} time [s]")
    by_ticks = any(run.curve is not None and run.curve.by_ticks for run in runs)
    return 1.0, "round, mean over nodes" if by_ticks else "round"


def _set_log(axes: Axes, axis: XAxis | YAxis, values: Floats) -> None:
    """Give an axis a logarithmic scale that begins at the smallest of the positive values, and plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = values[values > 0]
    if not len(positive):
        raise DataError(f"log: {axis.get_label_text()!r} has no values above 0; plot it without a logarithmic scale")
    set_scale, set_limits = (
        (axes.set_xscale, axes.set_xlim) if axis is axes.xaxis else (axes.set_yscale, axes.set_ylim)
    )  # fmt: skip
    set_scale("log", nonpositive="clip")
    set_limits(float(positive.min()) / 1.1, float(positive.max()) * 1.1)
    decades = math.log10(float(positive.max() / positive.min()))
    axis.set_major_locator(LogLocator(subs=next(subs for most, subs in LOG_TICKS if decades < most)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _format_y(axes: Axes, chart: Chart, log: bool) -> None:
    """Set the range of the vertical axis: that of the data, but not beyond the possible values."""
    drawn = [line for group in chart.lines for line in group.panels]
    values = np.concatenate([part for line in drawn for part in (line.mean, line.low, line.high) if part is not None])
    finite = values[np.isfinite(values)]
    if log:
        _set_log(axes, axes.yaxis, finite)
    elif not len(finite):
        return
    elif chart.y.removeprefix(AVERAGED).startswith(FRACTIONS):
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), min(1.0, high))
    elif finite.min() >= 0:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))


def _y_title(chart: Chart) -> str:
    if chart.y == CONSENSUS:
        return "consensus distance"
    if chart.y == TRAINING_LOSS:
        return "training loss"
    if chart.y == DRIFT:
        return f"drift: std of {chart.lines[0].runs[0].main}"
    averaged = ", averaged model" if chart.y.startswith(AVERAGED) else ""
    return f"{chart.split} {chart.y.removeprefix(AVERAGED)}{averaged}"


def _legend_entries(chart: Chart) -> tuple[list[Artist], list[str]]:
    """Return the entries of the legend: one for each line, and one for the band of a single run."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    labels: list[str] = []
    for index, group in enumerate(chart.lines):
        arguments: dict[str, Any] = line_style(index).arguments()
        handles.append(Line2D([], [], **(arguments | {"marker": None} if chart.alone else arguments)))
        labels.append(group.label)
    if chart.alone and not chart.y.startswith(WITHOUT_NODES):
        labels = [f"{labels[0]}: mean over nodes"]
    if chart.alone and chart.has_band:
        handles.append(Patch(color=line_style(0).colour, alpha=BAND_ALPHAS[0], linewidth=0))
        labels.append("from node to node")
    if chart.alone and np.isfinite(chart.lines[0].runs[0].averaged).any():
        handles.append(Line2D([], [], color=AVERAGED_STYLE.colour, linestyle=AVERAGED_STYLE.dash))
        labels.append("averaged model")
    return handles, labels


def _band_title(chart: Chart) -> str:
    counts = [len(group.runs) for group in chart.lines if len(group.runs) > 1]
    if not counts:
        return "bands: from the worst to the best node"
    seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    if chart.spread == "nodes":
        return f"bands: from the worst to the best node, mean over {seeds} seeds"
    return f"bands: 95 % interval of the mean over {seeds} seeds"
