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

import itertools
import math
import operator
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.progress import main_metric
from shoal.results.records import REJOINED, End, Evaluation, Event, Record, Round, RunFolder
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


class Evaluations:
    """Collects one metric of all nodes from their records; the records of a node must come in order."""

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        """Default: the main metric of the first scores."""
        self.known: set[str] = set()
        """All metrics in the records."""
        self._scores = array("d")  # tick, round, node, time, score of each evaluation: there may be many millions
        self._times: dict[NodeId, float] = {}
        self._rounds: dict[NodeId, int] = {}
        self._ended: set[NodeId] = set()

    def add(self, node: NodeId, record: Record) -> None:
        self._times[node] = record.time
        if isinstance(record, Round):
            self._rounds[node] = record.round
        elif isinstance(record, End):
            self._ended.add(node)
        elif isinstance(record, Evaluation) and record.scores:
            self.known.update(record.scores)
            self.metric = self.metric or main_metric(record.scores)
            if self.metric in record.scores:
                tick = -1 if record.tick is None else record.tick
                self._scores.extend((tick, record.round, node, record.time, record.scores[self.metric]))

    def curve(self) -> Curve | None:
        """Return the curve, or None if there are no scores."""
        if not self._scores or self.metric is None:
            return None
        rows = np.array(self._scores).reshape(-1, 5)
        by_ticks = bool((rows[:, 0] >= 0).any())
        if by_ticks:
            rows = rows[rows[:, 0] >= 0]
        column = 0 if by_ticks else 1
        rows = rows[rows[:, column].argsort(kind="stable")]
        last: Mapping[NodeId, float] = self._times if by_ticks else self._rounds
        failed = {node: at for node, at in last.items() if self._ended and node not in self._ended}
        return Curve(self.metric, by_ticks, *zip(*_points(rows, column, failed), strict=True))


def _points(rows: NDArray[np.float64], column: int, failed: dict[NodeId, float]) -> list[tuple[Any, ...]]:
    """Return the points of a curve from the evaluations in `rows`, sorted by `column`: 0 by ticks, 1 by rounds.

    `failed` holds the time (by ticks) or the round of the last record of each failed node.
    """
    by_ticks = column == 0
    scores: dict[NodeId, float] = {}
    finished: dict[NodeId, float] = {}
    clock = -math.inf
    points = []
    moments, starts = np.unique(rows[:, column], return_index=True)
    for moment, evaluations in zip(map(int, moments), np.split(rows, starts[1:]), strict=True):
        _, rounds, nodes, times, found = evaluations.T.tolist()
        begin = min(times) if by_ticks else moment
        for node in [n for n, at in failed.items() if at < begin and n in scores]:
            del scores[node], finished[node]
        scores.update(zip(nodes, found, strict=True))
        finished.update(zip(nodes, (round + 1 for round in rounds), strict=True))
        clock = max(clock, *times)
        mean_round = math.fsum(finished.values()) / len(finished) if by_ticks else moment + 1
        points.append((moment, clock, mean_round, *(statistics(scores.values()) or {}).values(), len(scores)))
    return points


def curve(folder: RunFolder, metric: str | None = None) -> Curve:
    """Return the curve of `metric`; default: the metric that the experiment names, or the main metric.

    Raises `DataError` if there is none.
    """
    evaluations = _collect(folder, metric)
    found = evaluations.curve()
    if found is None and not evaluations.known:
        raise DataError(f"{folder.path}: no scores were recorded; see evaluation.every and evaluation.nodes")
    if found is None:
        known = ", ".join(sorted(evaluations.known))
        raise DataError(f"{folder.path}: {evaluations.metric!r} was not measured; use one of {known}")
    return found


def curve_or_none(folder: RunFolder, metric: str | None = None) -> Curve | None:
    """Return the same as `curve`, or None if there is none."""
    return _collect(folder, metric).curve()


def _collect(folder: RunFolder, metric: str | None) -> Evaluations:
    evaluations = Evaluations(metric or target_of(folder)[0])
    for node, record in folder.read_all():
        evaluations.add(node, record)
    return evaluations


def time_to(curve: Curve, target: float) -> float | None:
    """Return the seconds until the mean is `target` or better, or None if that does not happen."""
    at = _reached(curve, target)
    return None if at is None else curve.times[at]


def bytes_to(folder: RunFolder, curve: Curve, target: float) -> int | None:
    """Return the bytes that all nodes sent until the mean is `target` or better, or None if that does not happen."""
    at = _reached(curve, target)
    return None if at is None else bytes_sent(folder, curve)[at]


def _reached(curve: Curve, target: float) -> int | None:
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
    totals = [0] * len(curve.moments)
    points: Sequence[float] = curve.times if curve.by_ticks else curve.moments
    for _, group in itertools.groupby(folder.read_all(), key=operator.itemgetter(0)):
        traffic, keys, counts = SentTraffic(), array("d"), array("q")
        for _, record in group:
            traffic.add(record)
            if isinstance(record, Round):
                key = record.time if curve.by_ticks else record.round
                keys.append(max(key, keys[-1]) if keys else key)  # a node may rejoin in an earlier round
                counts.append(traffic.bytes)
        for i, point in enumerate(points):
            if past := bisect_right(keys, point):
                totals[i] += counts[past - 1]
    return tuple(totals)


class SentTraffic:
    """The bytes and messages that one node sent, from its records in order.

    A node that rejoins starts to count from zero; this adds what it had sent before.
    """

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        self._before_rejoining = 0, 0

    def add(self, record: Record) -> None:
        if isinstance(record, Round | End):
            self.bytes = self._before_rejoining[0] + record.bytes_sent
            self.messages = self._before_rejoining[1] + record.messages_sent
        elif isinstance(record, Event) and record.what == REJOINED:
            self._before_rejoining = self.bytes, self.messages


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
