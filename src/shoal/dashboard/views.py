"""What the page gets: changes of a run since a version, its state at a time, its timeline. All as columns of JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.dashboard.columns import Array, Columns
from shoal.dashboard.feed import ENDED, FAILED, RunFeed
from shoal.dashboard.statistics import NodeStatistics
from shoal.results.progress import main_metric
from shoal.results.spans import ACTIVITIES

MAX_EDGES = 20_000
"""The most edges that the page draws. If a round has more, a part of them is sent."""
MAX_TIMELINE_NODES = 256
MAX_BINS = 4_000
IDLE, FAILED_SPAN, NOTHING = len(ACTIVITIES), len(ACTIVITIES) + 1, len(ACTIVITIES) + 2
LEGEND = (*ACTIVITIES, "idle", "failed", "")
"""The activities in a timeline, by number. The last one is the time after the end of a node."""


def numbers(values: Array, digits: int = 7) -> list[Any]:
    """Return values as JSON numbers with so many significant digits; None if not finite."""
    found = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(found))))
        rounded = np.where((found == 0) | ~np.isfinite(scale), found, np.round(found * scale) / scale)
    return list(rounded.tolist())  # msgspec writes NaN as null


def changes(feed: RunFeed, since: int, with_nodes: bool) -> dict[str, Any]:
    """Return what changed after version `since`; 0 returns everything."""
    found: dict[str, Any] = {
        "duration": feed.duration,
        "nodes": len(feed.ids),
        "damaged": feed.tail.damaged,
        "metric": main_metric(feed.curves),
        "has_edges": feed.sends.size > 0,
        "has_spans": feed.spans.size > 0,
        "curves": {},
    }
    for name, curve in feed.curves.items():
        rounds = feed.tick_rounds if feed.by_ticks else None
        if (part := _curve(curve, since, rounds)) is not None:
            found["curves"][name] = part
    training = {name: part for name, c in feed.training.items() if (part := _curve(c, since)) is not None}
    if training:
        found["training"] = training
    if feed.averages and max(feed.averages_version, feed.tick_rounds.versions.max(initial=0)) > since:
        found["averages"] = _averages(feed)
    if with_nodes:
        found |= _nodes(feed, since)
    return found


def _curve(curve: NodeStatistics, since: int, rounds: NodeStatistics | None = None) -> dict[str, Any] | None:
    rows = np.flatnonzero(curve.versions > since)
    if not len(rows):
        return None
    finished = curve.moments + 1.0
    if rounds is not None and len(rounds.moments) == len(curve.moments):
        finished = rounds.statistics["mean"]
    return {
        "size": len(curve.moments),
        "rows": rows.tolist(),
        "moment": curve.moments[rows].tolist(),
        "round": numbers(finished[rows]),
        "time": numbers(np.maximum.accumulate(curve.times)[rows]),
        **{name: numbers(values[rows]) for name, values in curve.statistics.items()},
    }


def _averages(feed: RunFeed) -> dict[str, Any]:
    """Return all evaluations of the averaged model, in order: there are few."""
    averages = sorted(feed.averages, key=lambda average: average.moment)
    moments = np.array([average.moment for average in averages], np.float64)
    finished = moments + 1.0
    if feed.by_ticks:  # as in the curves of the nodes: the mean of their rounds
        finished = np.interp(moments, feed.tick_rounds.moments, feed.tick_rounds.statistics["mean"])
    names = dict.fromkeys(name for average in averages for name in average.scores)
    return {
        "moment": moments.tolist(),
        "round": numbers(finished),
        "time": numbers(np.maximum.accumulate([average.time for average in averages])),
        "consensus": numbers(np.array([average.consensus_distance for average in averages])),
        "scores": {
            name: numbers(np.array([average.scores.get(name, np.nan) for average in averages])) for name in names
        },
    }


def _nodes(feed: RunFeed, since: int) -> dict[str, Any]:
    count = len(feed.ids)
    ids = np.array(feed.ids, np.int64)
    latest = {name: values.values[:count] for name, values in feed.latest.items()}
    rows = np.flatnonzero(latest["version"] > since)
    found: dict[str, Any] = {}
    if len(rows):
        found["state"] = {
            "id": ids[rows].tolist(),
            "round": (latest["round"][rows] + 1).tolist(),
            "time": numbers(latest["time"][rows]),
            "loss": numbers(latest["loss"][rows], 5),
            "state": latest["state"][rows].tolist(),
            "scores": {name: numbers(values.values[rows], 5) for name, values in feed.latest_scores.items()},
        }
    senders = np.flatnonzero(latest["edges_version"] > since)
    if len(senders):
        found["edges"] = _edges(feed, ids[senders], latest["sent"][senders])
    return found


def _edges(feed: RunFeed, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> dict[str, Any]:
    """Return the receivers of nodes, one after the other; a part of them if there are too many."""
    counts, receivers = feed.edges_of(rows)
    total = len(receivers)
    if total > MAX_EDGES:
        kept = np.arange(0, total, -(-total // MAX_EDGES))
        owners = np.repeat(np.arange(len(counts)), counts)[kept]
        counts, receivers = np.bincount(owners, minlength=len(counts)), receivers[kept]
    return {"id": ids.tolist(), "count": counts.tolist(), "to": receivers.tolist(), "left_out": total - len(receivers)}


def state_at(feed: RunFeed, at: float) -> dict[str, Any]:
    """Return the state of all nodes at a time of the run's clock."""
    ids = np.array(feed.ids, np.int64)
    rounds = feed.latest_rows(feed.rounds, at)
    table = {name: _take(feed.rounds[name], rounds, np.nan) for name in ("round", "time", "loss")}
    states = _take(feed.states["state"], feed.latest_rows(feed.states, at), 0)
    edges = feed.latest_rows(feed.sends, at)
    edges[states == FAILED] = -1
    return {
        "at": at,
        "state": {
            "id": ids.tolist(),
            "round": (np.nan_to_num(table["round"], nan=-1.0) + 1).astype(int).tolist(),
            "time": numbers(np.nan_to_num(table["time"])),
            "loss": numbers(table["loss"], 5),
            "state": states.astype(int).tolist(),
            "scores": {
                name: numbers(_take(scores["score"], feed.latest_rows(scores, at), np.nan), 5)
                for name, scores in feed.scores.items()
            },
        },
        "edges": _edges(feed, ids, edges),
    }


def _take(column: Array, rows: NDArray[np.int64], missing: float) -> Array:
    if not len(column):
        return np.full(len(rows), missing)
    return np.where(rows >= 0, column[rows], missing)


def timeline(feed: RunFeed, first: int, count: int, start: float, end: float, bins: int, order: str) -> dict[str, Any]:
    """Return what `count` nodes did between two times, in `bins` equal parts of this time.

    A part shows the activity that takes most of it. The rows are run-length encoded: activity, length, activity, …
    """
    indices = _ordered(feed, order)[first : first + min(count, MAX_TIMELINE_NODES)]
    edges = np.linspace(start, end, min(bins, MAX_BINS) + 1)
    spans, states = (_rows_of(table, indices, len(feed.ids)) for table in (feed.spans, feed.states))
    rows = [_run_lengths(_activities(feed, *own, edges)) for own in zip(spans, states, strict=True)]
    return {
        "start": start,
        "end": end,
        "bins": len(edges) - 1,
        "total": len(feed.ids),
        "id": [feed.ids[index] for index in indices],
        "rows": rows,
    }


def _ordered(feed: RunFeed, order: str) -> list[int]:
    """Return nodes in order of their id, or of the time they spend with an activity, the longest first."""
    by_id = sorted(range(len(feed.ids)), key=lambda index: feed.ids[index])
    if order not in ACTIVITIES:
        return by_id
    chosen = feed.spans["activity"] == ACTIVITIES.index(order)
    spent = (feed.spans["end"] - feed.spans["start"])[chosen]
    totals = np.bincount(feed.spans["node"][chosen], spent, minlength=len(feed.ids))
    return sorted(by_id, key=lambda index: -totals[index])


def _rows_of(table: Columns, indices: Sequence[int], nodes: int) -> list[NDArray[np.int64]]:
    """Return the rows of some of the nodes in a table, in order. The table is read once: it may have many rows."""
    place = np.full(nodes, -1)
    place[indices] = np.arange(len(indices))
    owners = place[table["node"]]
    rows = np.flatnonzero(owners >= 0)
    rows = rows[np.argsort(owners[rows], kind="stable")]
    limits = np.searchsorted(owners[rows], np.arange(len(indices) + 1))
    return [rows[first:end] for first, end in itertools.pairwise(limits)]


def _activities(
    feed: RunFeed, spans: NDArray[np.int64], changes: NDArray[np.int64], edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the activity of one node in each bin. `spans` and `changes` are the rows of its spans and its states."""
    activity, starts, ends = (feed.spans[name][spans] for name in ("activity", "start", "end"))
    width = np.diff(edges)
    shares = np.zeros((len(ACTIVITIES) + 1, len(width)))
    for code in range(len(ACTIVITIES)):
        chosen = activity == code
        if chosen.any():
            durations = np.maximum(ends[chosen] - starts[chosen], 0.0)
            spent = np.cumsum(durations)
            times = np.column_stack([starts[chosen], ends[chosen]]).ravel()
            totals = np.column_stack([spent - durations, spent]).ravel()
            shares[code] = np.diff(np.interp(edges, np.maximum.accumulate(times), totals))
    shares[IDLE] = width - shares[:IDLE].sum(axis=0)
    found = shares.argmax(axis=0)
    middles = (edges[:-1] + edges[1:]) / 2
    times, states = feed.states["time"][changes], feed.states["state"][changes]
    if len(times):
        at = np.searchsorted(times, middles, side="right") - 1
        state = np.where(at >= 0, states[at], 0)
        found = np.where(state == FAILED, FAILED_SPAN, np.where(state == ENDED, NOTHING, found))
    return np.where(middles > feed.duration, NOTHING, found)


def _run_lengths(values: NDArray[np.int64]) -> list[int]:
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    lengths = np.diff(np.append(starts, len(values)))
    return np.column_stack([values[starts], lengths]).ravel().tolist()
