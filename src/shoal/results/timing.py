"""Curves of a metric over time, and the time until a metric reaches a target.

    found = curve(folder)  # accuracy over time, or the main metric of the run's task
    time_to(found, 0.8)    # seconds, or None

A curve has one point per evaluation: a tick if nodes are evaluated every few seconds, else a round.

- The score of a point is the mean over the nodes. A node that is not evaluated at that point, because it is offline or
  has ended, counts with its last evaluation: it still has that model. It does not count before its first evaluation. A
  node that failed (it has no `end` record, and others have) counts until its last record. If no node has an `end`
  record, the run was interrupted, and all nodes count.
- The time of a point is that of its last evaluation, and not earlier than the point before it. Nodes finish a round at
  different times. Only when the last node has finished it, all models are at least that good.
- The mean is NaN if a model diverged, as in the summary, and reaches no target.

Times are seconds of the run's clock: virtual in the simulation, wall time in processes. The time to a target is that of
the first point whose mean is equal or better. Points are not interpolated: the time is as precise as the interval
between evaluations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.frames import RunRecords, Scores, read_records
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder
from shoal.results.statistics import statistics
from shoal.types import NodeId

Clock: TypeAlias = Literal["virtual", "wall"]

LOWER_IS_BETTER = ("loss", "perplexity", "rmse")


def higher_is_better(metric: str) -> bool:
    """Whether higher scores are better; assumed of scores that Shoal does not know, such as those of Flower clients."""
    return metric not in LOWER_IS_BETTER


@dataclass(frozen=True)
class Curve:
    """A metric over time: all sequences have one item per point, in the order of time."""

    metric: str
    by_ticks: bool
    """Whether points are ticks; else they are rounds."""
    moments: tuple[int, ...]
    """The numbers of the ticks or rounds, as in the records."""
    times: tuple[float, ...]
    """Seconds since the start of the run."""
    rounds: tuple[float, ...]
    """Finished rounds: those of the point or, at a tick, the mean over the nodes."""
    means: tuple[float, ...]
    stds: tuple[float, ...]
    mins: tuple[float, ...]
    maxs: tuple[float, ...]
    nodes: tuple[int, ...]
    """The number of nodes that count."""


def curve_of(records: RunRecords, metric: str | None = None) -> Curve | None:
    """Return the curve of `metric`, by default the main metric; None if it was not measured."""
    metric = metric or main_metric(records.evaluations.metrics)
    if metric is None or not len((found := records.evaluations.scores(metric)).score):
        return None
    by_ticks = bool((found.tick >= 0).any())
    if by_ticks:
        found = found.select(found.tick >= 0)
    moment = found.tick if by_ticks else found.round
    order = moment.argsort(kind="stable")
    return Curve(
        metric, by_ticks, *zip(*_points(found.select(order), by_ticks, _failed(records, by_ticks)), strict=True)
    )


def _failed(records: RunRecords, by_ticks: bool) -> dict[NodeId, float]:
    """Return the time (by ticks) or the round of the last record of each failed node."""
    ended = {end.node for end in records.ends}
    last = records.last_times if by_ticks else records.last_rounds()
    return {node: at for node, at in last.items() if ended and node not in ended}


def _points(found: Scores, by_ticks: bool, failed: Mapping[NodeId, float]) -> list[tuple[Any, ...]]:
    """Return the points of a curve from evaluations, which are sorted by their ticks or rounds."""
    nodes, places = np.unique(found.node, return_inverse=True)
    scores, finished, counts = np.zeros(len(nodes)), np.zeros(len(nodes)), np.zeros(len(nodes), bool)
    failures = np.array([failed.get(node, math.inf) for node in nodes.tolist()])
    clock = -math.inf
    points = []
    moments, starts = np.unique(found.tick if by_ticks else found.round, return_index=True)
    for moment, start, stop in zip(moments.tolist(), starts, [*starts[1:], len(places)], strict=True):
        here = slice(start, stop)
        times, place = found.time[here], places[here]
        counts &= failures >= (times.min() if by_ticks else moment)
        scores[place], finished[place], counts[place] = found.score[here], found.round[here] + 1, True
        clock = max(clock, float(times.max()))
        count = int(counts.sum())
        mean_round = math.fsum(finished[counts].tolist()) / count if by_ticks else moment + 1
        points.append((moment, clock, mean_round, *(statistics(scores[counts].tolist()) or {}).values(), count))
    return points


def curve(folder: RunFolder, metric: str | None = None, records: RunRecords | None = None) -> Curve:
    """Return the curve of `metric`; default: the metric that the experiment names, or the main metric.

    `records` are those of the run, if they have been read before. Raises `DataError` if there is no curve.
    """
    records = read_records(folder) if records is None else records
    wanted = metric or target_of(folder)[0]
    found, known = curve_of(records, wanted), records.evaluations.metrics
    if found is None and not known:
        raise DataError(f"{folder.path}: no scores were recorded; see evaluation.every and evaluation.nodes")
    if found is None:
        raise DataError(f"{folder.path}: {wanted!r} was not measured; use one of {', '.join(sorted(known))}")
    return found


def curve_or_none(folder: RunFolder, metric: str | None = None) -> Curve | None:
    """Return the same as `curve`, or None if there is none."""
    return curve_of(read_records(folder), metric or target_of(folder)[0])


def time_to(curve: Curve, target: float) -> float | None:
    """Return the seconds until the mean is `target` or better, or None if that does not happen."""
    at = reached(curve, target)
    return None if at is None else curve.times[at]


def bytes_to(folder: RunFolder, curve: Curve, target: float) -> int | None:
    """Return the bytes that all nodes sent until the mean is `target` or better, or None if that does not happen."""
    at = reached(curve, target)
    return None if at is None else bytes_sent(folder, curve)[at]


def reached(curve: Curve, target: float) -> int | None:
    """Return the index of the first point whose mean is `target` or better."""
    is_reached = operator.ge if higher_is_better(curve.metric) else operator.le
    return next((i for i, mean in enumerate(curve.means) if is_reached(mean, target)), None)


def best(curve: Curve) -> int | None:
    """Return the index of the best mean, the first of equal ones; None if no mean is finite."""
    sign = 1 if higher_is_better(curve.metric) else -1
    finite = [i for i, mean in enumerate(curve.means) if math.isfinite(mean)]
    return max(finite, key=lambda i: sign * curve.means[i], default=None)


def target_and_best(curve: Curve | None, metric: str | None, target: float | None) -> dict[str, Any]:
    """Return the entries `time_to_target` and `best` of a summary."""
    top = None if curve is None else best(curve)
    name = metric if curve is None else curve.metric
    seconds = None if curve is None or target is None else time_to(curve, target)
    return {
        "time_to_target": None if target is None else {"metric": name, "target": target, "seconds": seconds},
        "best": None
        if curve is None or top is None
        else {"metric": curve.metric, "mean": curve.means[top], "seconds": curve.times[top]},
    }


def bytes_sent(folder: RunFolder, curve: Curve) -> tuple[int, ...]:
    """Return the bytes that all nodes sent until each point of `curve`, as of the last round that each had finished.

    By ticks, that is the last round before the time of the tick; by rounds, that round or the last one before it.
    """
    return bytes_at(read_records(folder), curve)


def bytes_at(records: RunRecords, curve: Curve) -> tuple[int, ...]:
    """Return the same as `bytes_sent`, of records that have been read before."""
    points = np.array(curve.times if curve.by_ticks else curve.moments)
    totals = np.zeros(len(points), np.int64)
    keys: NDArray[Any] = records.rounds.time if curve.by_ticks else records.rounds.round
    sent = records.sent().bytes
    for node in np.unique(records.rounds.node).tolist():
        where = records.node_slice(node)
        # A node may rejoin in an earlier round.
        past = np.searchsorted(np.maximum.accumulate(keys[where]), points, side="right")
        totals += np.where(past > 0, sent[where][past - 1], 0)
    return tuple(totals.tolist())


def target_of(folder: RunFolder) -> tuple[str | None, float | None]:
    """Return the metric and the target that the experiment names."""
    plan: Mapping[str, Any] = folder.read_experiment().get("evaluation", {})
    return plan.get("metric"), plan.get("target")


def split_of(folder: RunFolder) -> str:
    """Return the samples that models were evaluated on: "test" or "validation"."""
    plan: Mapping[str, Any] = folder.read_experiment().get("evaluation", {})
    return str(plan.get("split", "test"))


def clock(folder: RunFolder) -> Clock:
    """Return the clock of the run's times."""
    return "virtual" if folder.read_experiment().get("engine", "simulation") == "simulation" else "wall"
