"""The timeline of a run: a row for each node that shows when it trained, waited, sent, was idle, offline or failed.

A run with few nodes and few segments has a bar for each segment. Otherwise the timeline is a picture. If a run has too
many segments to show each of them, its time is divided into parts of equal length: in each part, the widths of the
colours are the shares of the time. The nodes of a picture with many nodes are sorted by the time that they train or
send: a straggler, which the others wait for, is in one of the first rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.activity import FAILED, IDLE, KINDS, Segments, read_segments
from shoal.results.plot_style import Columns, add_legend, new_figure, styled
from shoal.results.records import RunFolder
from shoal.results.spans import OFFLINE, SEND, TRAIN, WAIT
from shoal.results.timing import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shares: TypeAlias = NDArray[np.float64]
"""The part of the time that goes to each kind of segment: rows × columns × kinds."""

COLOURS = {
    TRAIN: "#0072B2",
    WAIT: "#F5C97A",
    SEND: "#009E73",
    IDLE: "#ECECEC",
    OFFLINE: "#9A9A9A",
    FAILED: "#000000",
}
"""Of Okabe and Ito (2008, "Color Universal Design"), or lighter: work is dark and a wait is light, also in a print
without colours."""
LABELS = {TRAIN: "train", WAIT: "wait for messages", SEND: "send", IDLE: "idle", OFFLINE: "offline", FAILED: "failed"}
"""In the order of the legend."""
MAX_BAR_NODES = 64
"""Up to this number of nodes, segments are bars."""
MAX_BARS = 4_000
"""Up to this number of segments, segments are bars."""
PICTURE_COLUMNS = 1_600
PARTS = 100
"""The parts of the time of a run that has too many segments to show each of them."""
COLUMNS_PER_SEGMENT = 4
"""If segments are narrower, there are too many."""
NAMED_NODES = 8
"""The nodes that a picture with sorted nodes names."""
PICTURE_ROWS = 1_200
"""The most rows of a picture. With more nodes, a row is the mean of several nodes."""
BAR_HEIGHT = 0.8


def timeline_figure(
    folder: RunFolder, columns: Columns = 2, start: float | None = None, end: float | None = None
) -> Figure:
    """Draw what each node did from `start` to `end`, in seconds of the run's clock; default: in the whole run.

    Raises `DataError` if an earlier version wrote the run, whose records do not have this, and if `start` is not before
    `end` or after the end of the run.
    """
    from matplotlib.patches import Patch

    segments = read_segments(folder)
    first, last = 0.0 if start is None else start, segments.duration if end is None else end
    if not first < min(last, segments.duration):
        raise DataError(
            f"{folder.path}: there is nothing from {first:g} s to {last:g} s; the run took {segments.duration:g} s"
        )
    with styled():
        figure = new_figure(columns, _height(len(segments.nodes)))
        axes = figure.subplots()
        shown = (segments.end > first) & (segments.start < last)
        if len(segments.nodes) <= MAX_BAR_NODES and shown.sum() <= MAX_BARS:
            _draw_bars(axes, segments, shown)
            shares = False
        else:
            shares = _draw_picture(axes, segments, first, last)
        axes.set_xlim(first, last)
        note = f"; widths: shares in {PARTS} parts of the time" if shares else ""
        axes.set_xlabel(f"{clock(folder)} time [s]{note}")
        axes.spines[["left", "right", "top"]].set_visible(False)
        present = {KINDS[code] for code in np.unique(segments.kind[shown])}
        found = [kind for kind in LABELS if kind in present]
        handles = [Patch(facecolor=COLOURS[kind], edgecolor="#666666", linewidth=0.4) for kind in found]
        add_legend(figure, handles, [LABELS[kind] for kind in found], None)
    return figure


def _height(nodes: int) -> float:
    """Inches."""
    return min(0.7 + 0.16 * nodes, 3.6) if nodes <= MAX_BAR_NODES else 3.6


def _draw_bars(axes: Axes, segments: Segments, shown: NDArray[np.bool_]) -> None:
    from matplotlib.collections import PolyCollection

    rows = np.searchsorted(segments.nodes, segments.node[shown])
    low, high = rows - BAR_HEIGHT / 2, rows + BAR_HEIGHT / 2
    left, right, kinds = segments.start[shown], segments.end[shown], segments.kind[shown]
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    for code, kind in enumerate(KINDS):
        if (chosen := kinds == code).any():
            axes.add_collection(PolyCollection(corners[chosen], facecolors=COLOURS[kind], linewidths=0))
    axes.set_ylim(len(segments.nodes) - 0.5, -0.5)
    step = 1 if len(segments.nodes) <= 20 else 4
    axes.set_yticks(range(0, len(segments.nodes), step), [str(node) for node in segments.nodes[::step]])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("node")


def _draw_picture(axes: Axes, segments: Segments, first: float, last: float) -> bool:
    """Draw the timelines as a picture. Returns whether it shows shares of parts of the time."""
    from matplotlib.colors import to_rgb

    nodes = len(segments.nodes)
    rows = min(nodes, PICTURE_ROWS)
    shown = np.count_nonzero((segments.end > first) & (segments.start < last)) / nodes
    parts = PICTURE_COLUMNS if shown * COLUMNS_PER_SEGMENT <= PICTURE_COLUMNS else PARTS
    order = by_work(segments) if nodes > MAX_BAR_NODES else np.arange(nodes)
    shares = activity_shares(segments, order, rows, parts, first, last)
    shown_colours = [*(COLOURS[kind] for kind in LABELS), "white"]  # white after the end of a node
    colours = (255 * np.array([to_rgb(colour) for colour in shown_colours])).round().astype(np.uint8)
    picture = colours[_widths(shares, PICTURE_COLUMNS // parts)].reshape(rows, PICTURE_COLUMNS, 3)
    axes.imshow(
        picture, extent=(first, last, nodes - 0.5, -0.5), aspect="auto", interpolation="nearest", rasterized=True
    )
    if nodes > MAX_BAR_NODES:
        axes.set_yticks([])
        named = ", ".join(str(segments.nodes[index]) for index in order[:NAMED_NODES])
        axes.set_ylabel(f"{nodes:,} nodes, most work at the top\nfirst: {named}, …", fontsize=7)
    else:
        axes.set_ylabel("node")
    return parts < PICTURE_COLUMNS


def _widths(shares: Shares, columns: int) -> NDArray[np.intp]:
    """Return the index in `LABELS` for each of the `columns` of each part: their number for a kind is its share."""
    ordered = shares[:, :, [KINDS.index(kind) for kind in LABELS]]
    if columns == 1:
        ended = 1.0 - shares.sum(axis=2, keepdims=True)
        return np.asarray(np.concatenate([ordered, ended], axis=2).argmax(axis=2))
    limits = np.cumsum(ordered, axis=2)[:, :, None, :]
    middles = ((np.arange(columns) + 0.5) / columns)[None, None, :, None]
    return np.asarray((limits < middles).sum(axis=3))


def by_work(segments: Segments) -> NDArray[np.intp]:
    """Return the indices of the nodes, by the time that they trained or sent; the most first."""
    worked = (segments.kind == KINDS.index(TRAIN)) | (segments.kind == KINDS.index(SEND))
    rows, seconds = np.searchsorted(segments.nodes, segments.node), (segments.end - segments.start) * worked
    return np.argsort(-np.bincount(rows, seconds, len(segments.nodes)), kind="stable")


def activity_shares(
    segments: Segments, order: NDArray[np.intp], rows: int, columns: int, first: float, last: float
) -> Shares:
    """Return the part of the time that goes to each kind, for `columns` parts of the time from `first` to `last`.

    `order` has the indices of the nodes from top to bottom. Each of the `rows` stands for the same number of nodes, as
    far as possible.
    """
    nodes, kinds = len(segments.nodes), len(KINDS)
    place = np.argsort(order)[np.searchsorted(segments.nodes, segments.node)] * rows // nodes
    scale = columns / (last - first)
    begin = np.clip((segments.start - first) * scale, 0.0, columns)
    end = np.clip((segments.end - first) * scale, 0.0, columns)
    from_column, to_column = (np.minimum(at.astype(np.int64), columns - 1) for at in (begin, end))
    cell = (place * kinds + segments.kind) * (columns + 1)
    size = rows * kinds * (columns + 1)
    # The time before the end of a segment, less the time before its start: in the columns of both, and all between.
    partial = np.bincount(cell + to_column, end - to_column, size) - np.bincount(
        cell + from_column, begin - from_column, size
    )
    whole = np.bincount(cell + from_column, minlength=size) - np.bincount(cell + to_column, minlength=size)
    time = partial.reshape(rows, kinds, -1) + np.cumsum(whole.reshape(rows, kinds, -1), axis=2)
    per_row = np.bincount(np.arange(nodes) * rows // nodes, minlength=rows)
    return np.asarray(time[:, :, :columns].transpose(0, 2, 1) / per_row[:, None, None])
