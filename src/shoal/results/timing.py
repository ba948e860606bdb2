"""How good the nodes' models were at which time, and how long it took until they were good enough.

    found = curve(folder)  # accuracy by time, or what the run's task is measured by
    time_to(found, 0.8)    # seconds, or None
    side_by_side({"gossip": [one, two], "dpsgd": [three, four]}, 0.8)

A curve has a point for each moment of evaluation: a tick where nodes are looked at every so many seconds, else a round.

- Its score is the mean over the nodes. A node that is not evaluated at a moment, since it is offline or has ended,
  counts with its last evaluation: that is the model it has. Before its first it does not count. A node that was lost
  (it has no `end`, and others have) counts until the last thing that it wrote down. Where no node has an `end`, the run
  was cut off, and all count.
- Its time is that of the last of its evaluations, and not before the point before it. Nodes come to a round at
  different times: when the last of them is there, and no sooner, were their models all at least that good.
- A mean that a diverged node has a part in is NaN, as it is in the summary, and reaches nothing.

Times are seconds of the run's clock: virtual in the simulation, wall time in processes. The time to a target is that of
the first moment whose mean is there or beyond, and nothing is interpolated: it is as fine as the moments are.
"""

from __future__ import annotations

import itertools
import math
import operator
import tomllib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from shoal.errors import DataError
from shoal.results.progress import main_metric
from shoal.results.records import End, Evaluation, Event, Record, Round, RunFolder
from shoal.results.statistics import statistics

Clock: TypeAlias = Literal["virtual", "wall"]

FALLING = ("loss", "perplexity", "rmse")
"""Metrics of which less is better."""


def higher_is_better(metric: str) -> bool:
    """Whether more is better. Of scores that Shoal does not know, such as those of Flower clients, it is."""
    return metric not in FALLING


@dataclass(frozen=True)
class Curve:
    """A metric by time: all sequences have one item for each moment, in the order of time."""

    metric: str
    by_ticks: bool
    """Whether moments are ticks; else they are rounds."""
    moments: tuple[int, ...]
    """The numbers of the ticks or rounds, as records have them."""
    times: tuple[float, ...]
    """Seconds since the start of the run."""
    rounds: tuple[float, ...]
    """Rounds done: the moment's or, at a tick, the mean over the nodes."""
    means: tuple[float, ...]
    stds: tuple[float, ...]
    mins: tuple[float, ...]
    maxs: tuple[float, ...]
    nodes: tuple[int, ...]
    """How many nodes count."""


class Evaluations:
    """One metric of all nodes, from records that come one at a time, a node's in the order that it wrote them."""

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        """When not given, the leading one of the first scores that come."""
        self.known: set[str] = set()
        """All metrics that there were."""
        self._found = array("d")  # tick, round, node, time and score, again and again: there may be many millions
        self._times: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._ended: set[int] = set()

    def add(self, node: int, record: Record) -> None:
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
                self._found.extend((tick, record.round, node, record.time, record.scores[self.metric]))

    def curve(self) -> Curve | None:
        """None where there is no score to draw."""
        if not self._found or self.metric is None:
            return None
        rows = np.array(self._found).reshape(-1, 5)
        by_ticks = bool((rows[:, 0] >= 0).any())
        if by_ticks:
            rows = rows[rows[:, 0] >= 0]
        column = 0 if by_ticks else 1
        rows = rows[rows[:, column].argsort(kind="stable")]
        last: Mapping[int, float] = self._times if by_ticks else self._rounds
        lost = {node: at for node, at in last.items() if self._ended and node not in self._ended}
        numbers, starts = np.unique(rows[:, column], return_index=True)
        scores: dict[int, float] = {}
        done: dict[int, float] = {}
        clock = -math.inf
        points = []
        for moment, looks in zip(map(int, numbers), np.split(rows, starts[1:]), strict=True):
            _, rounds, nodes, times, found = looks.T.tolist()
            began = min(times) if by_ticks else moment
            for node in [n for n, at in lost.items() if at < began and n in scores]:
                del scores[node], done[node]
            scores.update(zip(nodes, found, strict=True))
            done.update(zip(nodes, (round + 1 for round in rounds), strict=True))
            clock = max(clock, *times)
            spread = statistics(scores.values()) or {}
            mean_round = math.fsum(done.values()) / len(done) if by_ticks else moment + 1
            points.append((moment, clock, mean_round, *spread.values(), len(scores)))
        return Curve(self.metric, by_ticks, *zip(*points, strict=True))


def curve(folder: RunFolder, metric: str | None = None) -> Curve:
    """The curve of `metric`; when not given, of what the experiment names, or of the leading score.

    Raises `DataError` where there is none.
    """
    evaluations = _gathered(folder, metric)
    found = evaluations.curve()
    if found is None and not evaluations.known:
        raise DataError(f"{folder.path}: no scores were recorded; see evaluation.every and evaluation.nodes")
    if found is None:
        measured = ", ".join(sorted(evaluations.known))
        raise DataError(f"{folder.path}: {evaluations.metric!r} was not measured; what was is {measured}")
    return found


def curve_or_none(folder: RunFolder, metric: str | None = None) -> Curve | None:
    """As `curve`, and None where there is none."""
    return _gathered(folder, metric).curve()


def _gathered(folder: RunFolder, metric: str | None) -> Evaluations:
    evaluations = Evaluations(metric or target_of(folder)[0])
    for node, record in records(folder):
        evaluations.add(node, record)
    return evaluations


def time_to(curve: Curve, target: float) -> float | None:
    """Seconds to the first moment whose mean is `target` or better; None where there is none."""
    at = _reached(curve, target)
    return None if at is None else curve.times[at]


def bytes_to(folder: RunFolder, curve: Curve, target: float) -> int | None:
    """Bytes that all nodes had sent by the first moment whose mean is `target` or better; None where there is none."""
    at = _reached(curve, target)
    return None if at is None else bytes_sent(folder, curve)[at]


def _reached(curve: Curve, target: float) -> int | None:
    there = operator.ge if higher_is_better(curve.metric) else operator.le
    return next((i for i, mean in enumerate(curve.means) if there(mean, target)), None)


def best(curve: Curve) -> int | None:
    """The place in `curve` of its best mean, the first of several; None where no mean is finite."""
    sign = 1 if higher_is_better(curve.metric) else -1
    finite = [i for i, mean in enumerate(curve.means) if math.isfinite(mean)]
    return max(finite, key=lambda i: sign * curve.means[i], default=None)


def bytes_sent(folder: RunFolder, curve: Curve) -> tuple[int, ...]:
    """What all nodes had sent by each moment of `curve`, as of the last round that each had finished.

    By ticks that is the last by the tick's time; by rounds, that round or the last before it.
    """
    totals = [0] * len(curve.moments)
    ats: Sequence[float] = curve.times if curve.by_ticks else curve.moments
    for _, group in itertools.groupby(records(folder), key=operator.itemgetter(0)):
        sent, keys, bytes = SentTraffic(), array("d"), array("q")
        for _, record in group:
            sent.add(record)
            if isinstance(record, Round):
                key = record.time if curve.by_ticks else record.round
                keys.append(max(key, keys[-1]) if keys else key)  # one that comes back may be in an earlier round
                bytes.append(sent.bytes)
        for i, at in enumerate(ats):
            if past := bisect_right(keys, at):
                totals[i] += bytes[past - 1]
    return tuple(totals)


class SentTraffic:
    """What one node has sent so far, from its records in order. One that died and came back counts anew from zero."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        self._before = 0, 0
        """In its former lives."""

    def add(self, record: Record) -> None:
        if isinstance(record, Round | End):
            self.bytes = self._before[0] + record.bytes_sent
            self.messages = self._before[1] + record.messages_sent
        elif isinstance(record, Event) and record.what == "rejoined":
            self._before = self.bytes, self.messages


def target_and_best(curve: Curve | None, metric: str | None, target: float | None) -> dict[str, Any]:
    """What a summary says of a curve: `time_to_target` and `best`."""
    top = None if curve is None else best(curve)
    named = metric if curve is None else curve.metric
    seconds = None if curve is None or target is None else time_to(curve, target)
    return {
        "time_to_target": None if target is None else {"metric": named, "target": target, "seconds": seconds},
        "best": None
        if curve is None or top is None
        else {"metric": curve.metric, "mean": curve.means[top], "seconds": curve.times[top]},
    }


@dataclass(frozen=True)
class TimesToTarget:
    """How long the runs of one label took to a target, beside those of the others."""

    label: str
    seconds: tuple[float | None, ...]
    """For each run, in the order given; None where it did not get there."""
    mean: float | None
    """This and the following are None unless all runs got there: a mean of the lucky ones says nothing."""
    std: float | None
    """Of the population."""
    min: float | None
    max: float | None
    ratio: float | None
    """Of the mean to that of the first label; None where there is no such number."""

    @property
    def reached(self) -> int:
        """How many of the runs got there."""
        return sum(time is not None for time in self.seconds)


def compare_times(
    runs: Mapping[str, Sequence[RunFolder]], target: float, metric: str | None = None
) -> tuple[TimesToTarget, ...]:
    """The times to `target` of each label's runs, which differ in their seeds, in the order of `runs`.

    Raises `DataError` where runs have different metrics or clocks, which cannot be compared.
    """
    curves = {label: [curve(folder, metric) for folder in folders] for label, folders in runs.items()}
    for what, found in (
        ("metrics", {c.metric for several in curves.values() for c in several}),
        ("clocks", {clock(folder) for folders in runs.values() for folder in folders}),
    ):
        if len(found) > 1:
            raise DataError(f"runs have different {what}, {' and '.join(sorted(found))}: they cannot be compared")
    standings: list[TimesToTarget] = []
    for label, several in curves.items():
        seconds = tuple(time_to(c, target) for c in several)
        there = [time for time in seconds if time is not None]
        spread = statistics(there) if len(there) == len(seconds) else None
        mean, std, least, most = spread.values() if spread is not None else (None,) * 4
        first = standings[0].mean if standings else mean
        ratio = mean / first if mean is not None and first else None
        standings.append(TimesToTarget(label, seconds, mean, std, least, most, ratio))
    return tuple(standings)


def target_of(folder: RunFolder) -> tuple[str | None, float | None]:
    """The metric and the target that the experiment names."""
    plan: Mapping[str, Any] = experiment(folder).get("evaluation", {})
    return plan.get("metric"), plan.get("target")


def clock(folder: RunFolder) -> Clock:
    """What the run's times are in. The simulation has a clock of its own."""
    return "virtual" if experiment(folder).get("engine", "simulation") == "simulation" else "wall"


def experiment(folder: RunFolder) -> dict[str, Any]:
    """The experiment as it was resolved, as plain data; nothing where it was not written down."""
    return tomllib.loads(folder.experiment.read_text()) if folder.experiment.exists() else {}


def records(folder: RunFolder) -> Iterator[tuple[int, Record]]:
    """All records of all nodes, node by node."""
    for node in sorted(int(file.stem) for file in (folder.path / "nodes").glob("*.jsonl")):
        for record in folder.read(node):
            yield node, record
