"""The curves that figures show: a quantity of a run over rounds, time or bytes, and the mean of several runs.

The runs of a line differ only in the seed. They have points at different positions if the axis is time or bytes. The
mean is computed as follows:

- Each run is a function of the position: between two of its points, the value is interpolated linearly. A run is not
  extrapolated: it has no value before its first and after its last point.
- The line covers the positions at which all its runs have a value, so every point is a mean over the same runs. A mean
  over the remaining runs would jump where a run ends.
- The line has a point wherever one of its runs has a point. Between these positions all runs are linear, so the mean
  is exact there.
- The band is the 95 % confidence interval of the mean: mean ± t · s / √n, with the standard deviation s (n - 1 degrees
  of freedom) of the n values at this position, and Student's t.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.frames import RunRecords, read_records
from shoal.results.progress import main_metric
from shoal.results.records import DIVERGED, Average, RunFolder
from shoal.results.statistics import t_quantile
from shoal.results.timing import Clock, Curve, bytes_at, clock, curve_of, split_of

Floats: TypeAlias = NDArray[np.float64]
Axis: TypeAlias = Literal["rounds", "time", "bytes"]
"""The horizontal axis."""
Spread: TypeAlias = Literal["seeds", "nodes", "none"]
"""What the band around a line shows."""

CONSENSUS = "consensus"
"""The root mean square distance of the nodes' models to their average."""
DRIFT = "drift"
"""The standard deviation of the main metric from node to node."""
TRAINING_LOSS = "training-loss"
"""The loss of the training steps, in place of that of test samples."""
AVERAGED = "averaged-"
"""Followed by a metric: the score of the average of all models."""
WITHOUT_NODES = (CONSENSUS, DRIFT, AVERAGED)
"""Quantities with one value for all nodes, by how their names begin."""
FRACTIONS = ("accuracy", "top5", "class ")
"""Metrics between 0 and 1, by how their names begin."""


@dataclass(frozen=True)
class RunCurve:
    """What a figure shows of one run."""

    folder: RunFolder
    known: tuple[str, ...]
    """The quantities that the run has."""
    main: str | None
    """The main metric of the run."""
    by_ticks: bool
    """Whether the run was evaluated by time."""
    curve: Curve | None
    """None if the run does not have the quantity."""
    bytes: tuple[int, ...]
    """Sent by all nodes until each point; empty unless asked for."""
    averaged: tuple[float, ...]
    """The score of the averaged model at each point, or NaN; empty unless the quantity is a metric."""
    split: str
    clock: Clock

    def positions(self, axis: Axis) -> Sequence[float]:
        """Return where the values of the curve are. They do not decrease: a mean over nodes may, when a node fails."""
        assert self.curve is not None
        found = {"rounds": self.curve.rounds, "time": self.curve.times, "bytes": self.bytes}[axis]
        return tuple(itertools.accumulate(found, max))


@dataclass(frozen=True)
class Line:
    """The mean of the runs of a group, with a band."""

    x: Floats
    mean: Floats
    low: Floats | None
    high: Floats | None


def read_curve(folder: RunFolder, y: str | None, with_bytes: bool) -> RunCurve:
    """Read the curve of the quantity `y`, by default of the main metric of the run."""
    records = read_records(folder)
    known = quantities(records)
    main = main_metric(records.evaluations.metrics)
    name = main if y is None else y
    curve = None if name is None else _quantity(records, name)
    averaged: tuple[float, ...] = ()
    if curve is not None and name in records.evaluations.metrics:
        scores = {_moment(a, curve.by_ticks): a.scores.get(curve.metric, math.nan) for a in records.averages}
        averaged = tuple(scores.get(moment, math.nan) for moment in curve.moments)
    sent = bytes_at(records, curve) if with_bytes and curve is not None else ()
    by_ticks = bool((records.evaluations.tick >= 0).any())
    return RunCurve(folder, known, main, by_ticks, curve, sent, averaged, split_of(folder), clock(folder))


def quantities(records: RunRecords) -> tuple[str, ...]:
    """Return the quantities of a run that can be plotted: its metrics, and quantities that follow from its records."""
    metrics = sorted(records.evaluations.metrics)
    averaged = sorted({f"{AVERAGED}{name}" for average in records.averages for name in average.scores})
    found = {
        CONSENSUS: bool(records.averages),
        DRIFT: len(np.unique(records.evaluations.node)) > 1,
        TRAINING_LOSS: bool(np.isfinite(records.rounds.loss).any()),
    }
    return (*metrics, *(name for name, has in found.items() if has), *averaged)


def unknown_quantity(name: str, known: Sequence[str], kind: str = "") -> DataError:
    """Return the error for a quantity that was not measured, with the nearest quantities that were."""
    close = difflib.get_close_matches(name.lower().replace(" ", "-"), known, n=2, cutoff=0.5)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    why = "; set evaluation.average = true" if name == CONSENSUS or name.startswith(AVERAGED) else ""
    measured = f"{', '.join(known)} {kind}".rstrip() if known else "no scores"
    return DataError(f"{name!r} was not measured{why}; the records have {measured}{meant}")


def _quantity(records: RunRecords, name: str) -> Curve | None:
    if name in records.evaluations.metrics:
        return curve_of(records, name)
    if name == DRIFT:
        curve = curve_of(records, main_metric(records.evaluations.metrics))
        return None if curve is None else _without_nodes(curve, name, curve.stds)
    if name == TRAINING_LOSS:
        return _training_loss(records)
    if name == CONSENSUS or name.startswith(AVERAGED):
        return _of_averages(records, name)
    return None


def _without_nodes(curve: Curve, name: str, values: Sequence[float]) -> Curve:
    same = tuple(values)
    return dataclasses.replace(curve, metric=name, means=same, stds=(0.0,) * len(same), mins=same, maxs=same)


def _of_averages(records: RunRecords, name: str) -> Curve | None:
    """Return the curve of a quantity of the averaged model."""
    metric = name.removeprefix(AVERAGED)
    averages = [a for a in records.averages if name == CONSENSUS or metric in a.scores]
    if not averages:
        return None
    by_ticks = any(average.tick is not None for average in averages)
    found = {moment: a for a in averages if (moment := _moment(a, by_ticks)) is not None}
    evaluated = curve_of(records, main_metric(records.evaluations.metrics))
    rounds = {} if evaluated is None else dict(zip(evaluated.moments, evaluated.rounds, strict=True))
    moments = tuple(sorted(found))
    values = tuple(found[m].consensus_distance if name == CONSENSUS else found[m].scores[metric] for m in moments)
    times = np.maximum.accumulate([found[m].time for m in moments])
    finished = tuple(rounds.get(m, found[m].round + 1.0) if by_ticks else m + 1.0 for m in moments)
    nodes = tuple(found[m].nodes for m in moments)
    return Curve(name, by_ticks, moments, tuple(times.tolist()), finished, values, (0.0,) * len(values), values, values,
                 nodes)  # fmt: skip


def _moment(average: Average, by_ticks: bool) -> int | None:
    return average.tick if by_ticks else average.round


def _training_loss(records: RunRecords) -> Curve | None:
    """Return the mean training loss of each round over the nodes that recorded it."""
    rounds = records.rounds
    diverged = {node: row for row, node, event in reversed(records.events) if event.what == DIVERGED}
    since = np.full(1 + max([*diverged, int(rounds.node.max(initial=0))]), np.iinfo(np.int64).max)
    since[list(diverged)] = list(diverged.values())
    # A loss that is not finite is not in the record. The event of the divergence is before the record of its round.
    measured = ~np.isnan(rounds.loss) | (rounds.row > since[rounds.node])
    if not measured.any():
        return None
    order = np.argsort(rounds.round[measured], kind="stable")
    loss, times = rounds.loss[measured][order], rounds.time[measured][order]
    moments, starts, counts = np.unique(rounds.round[measured][order], return_index=True, return_counts=True)
    means = np.add.reduceat(loss, starts) / counts
    squares = np.add.reduceat((loss - np.repeat(means, counts)) ** 2, starts) / counts
    columns = (
        np.maximum.accumulate(np.maximum.reduceat(times, starts)), moments + 1.0, means, np.sqrt(squares),
        np.minimum.reduceat(loss, starts), np.maximum.reduceat(loss, starts), counts,
    )  # fmt: skip
    return Curve(TRAINING_LOSS, False, tuple(moments.tolist()), *(tuple(column.tolist()) for column in columns))


def mean_line(runs: Sequence[RunCurve], axis: Axis, spread: Spread) -> Line | None:
    """Return the mean of runs that have a curve; None if there is no position at which all of them have a value.

    The band is the confidence interval over the runs or, with "nodes", from the mean of the runs' minima to the mean of
    their maxima over the nodes. Without a value for each node, or with one run, there may be none.
    """
    curves = [run.curve for run in runs if run.curve is not None]
    positions = [np.asarray(run.positions(axis), np.float64) for run in runs]
    x = common_positions(positions)
    if not len(x):
        return None
    mean, low, high = (
        np.array([_interpolated(x, at, values) for at, values in zip(positions, several, strict=True)])
        for several in ((c.means for c in curves), (c.mins for c in curves), (c.maxs for c in curves))
    )
    if spread == "nodes" and not curves[0].metric.startswith(WITHOUT_NODES):
        return Line(x, mean.mean(axis=0), low.mean(axis=0), high.mean(axis=0))
    if spread == "seeds" and len(runs) > 1:
        half = confidence(mean)
        return Line(x, mean.mean(axis=0), mean.mean(axis=0) - half, mean.mean(axis=0) + half)
    return Line(x, mean.mean(axis=0), None, None)


def common_positions(positions: Iterable[Floats]) -> Floats:
    """Return the positions of all runs that are inside the range of every run, in order."""
    several = list(positions)
    start, end = max(at[0] for at in several), min(at[-1] for at in several)
    union = np.unique(np.concatenate(several))
    return np.asarray(union[(union >= start) & (union <= end)])


def _interpolated(x: Floats, positions: Floats, values: Sequence[float]) -> Floats:
    """Return the values at `x`. Of several values at one position, the last counts."""
    last = np.append(positions[1:] > positions[:-1], True)
    return np.asarray(np.interp(x, positions[last], np.asarray(values, np.float64)[last]))


def confidence(values: Floats) -> Floats:
    """Return half the width of the confidence interval of the mean of each column."""
    count = len(values)
    return np.asarray(t_quantile(count - 1) * values.std(axis=0, ddof=1) / math.sqrt(count))
