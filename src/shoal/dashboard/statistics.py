"""Statistics over the nodes at each round or tick, updated as records arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.dashboard.columns import Array

MAX_POINTS = 2048
"""A curve with more rounds has one point for every 2, 4, 8, … rounds."""
BAND = 0.1
"""The band of a curve leaves out this share of the nodes on either side."""

STATISTICS = ("mean", "min", "max", "low", "high", "sum")


class NodeStatistics:
    """A value of all nodes at each moment: a round, or a tick.

    With `carry`, a node without a value at a moment counts with its value at the moment before it. NaN: the node has no
    value yet. Infinite: its value is not finite.
    """

    def __init__(self, carry: bool) -> None:
        self._carry = carry
        self.step = 1
        """The number of moments that one point stands for."""
        self.moments: NDArray[np.int64] = np.empty(0, np.int64)
        """The last moment of each point, in order."""
        self.times: NDArray[np.float64] = np.empty(0)
        self.begins: NDArray[np.float64] = np.empty(0)
        """When the first and the last node reached each moment."""
        self.statistics: dict[str, NDArray[np.float64]] = {name: np.empty(0) for name in STATISTICS}
        self.versions: NDArray[np.int64] = np.empty(0, np.int64)
        """The version in which each point last changed."""
        self._values: NDArray[np.float64] = np.full((16, 16), np.nan)
        self._limits: NDArray[np.float64] | None = None
        self._limits_are_times = False
        self._dirty: int | None = None

    def add(self, moments: Array, nodes: Array, times: Array, values: Array) -> None:
        """Add values; later ones replace earlier ones of the same node and moment."""
        if not len(moments):
            return
        moments = np.asarray(moments, np.int64)
        self._reserve(rows=0, nodes=int(nodes.max()) + 1)
        self._insert(np.unique(moments // self.step))
        while len(self.moments) > MAX_POINTS:
            self._halve()
        rows = np.searchsorted(self.moments // self.step, moments // self.step)
        np.maximum.at(self.moments, rows, moments)
        np.maximum.at(self.times, rows, times)
        np.minimum.at(self.begins, rows, times)
        self._values[rows, nodes] = np.where(np.isfinite(values), values, np.inf)
        self._mark(int(rows.min()))

    def limit(self, limits: NDArray[np.float64], are_times: bool) -> None:
        """Count each node only until its limit, a moment or a time."""
        self._limits, self._limits_are_times = limits, are_times
        self._mark(0)

    def update(self, version: int) -> None:
        """Compute the statistics of the points that may have changed."""
        if self._dirty is None:
            return
        first, self._dirty = min(self._dirty, len(self.moments)), None
        block = self._block(first)
        changed = np.zeros(len(self.moments) - first, bool)
        for name, found in zip(STATISTICS, _statistics(block), strict=True):
            before = self.statistics[name]
            self.statistics[name] = np.concatenate([before[:first], found])
            same = np.zeros(len(found), bool)
            kept = before[first : first + len(found)]
            same[: len(kept)] = (kept == found[: len(kept)]) | (np.isnan(kept) & np.isnan(found[: len(kept)]))
            changed |= ~same
        versions = np.full(len(self.moments), version, np.int64)
        versions[: len(self.versions)] = self.versions[: len(versions)]
        versions[first:][changed] = version
        self.versions = versions

    def _block(self, first: int) -> NDArray[np.float64]:
        """Return the values from point `first` on that count."""
        block = self._values[first : len(self.moments)].copy()
        if self._carry and len(block):
            if first:
                block[0] = np.where(np.isnan(block[0]), self._latest_before(first), block[0])
            given = ~np.isnan(block)
            rows = np.where(given, np.arange(len(block))[:, None], 0)
            np.maximum.accumulate(rows, axis=0, out=rows)
            block = np.take_along_axis(block, rows, axis=0)
            if self._limits is not None:
                reached = self.begins if self._limits_are_times else self.moments
                limits = np.full(block.shape[1], np.inf)
                limits[: len(self._limits)] = self._limits
                block[reached[first : first + len(block), None] > limits] = np.nan
        return block

    def _latest_before(self, row: int) -> NDArray[np.float64]:
        """Return the latest value of each node before a point."""
        earlier = self._values[:row]
        given = ~np.isnan(earlier)
        last = row - 1 - given[::-1].argmax(axis=0)
        return np.where(given.any(axis=0), earlier[last, np.arange(earlier.shape[1])], np.nan)

    def _reserve(self, rows: int, nodes: int) -> None:
        have = self._values.shape
        if rows > have[0] or nodes > have[1]:
            grown = np.full((max(have[0], 2 * rows), max(have[1], int(1.5 * nodes))), np.nan)
            grown[: have[0], : have[1]] = self._values
            self._values = grown

    def _insert(self, buckets: NDArray[np.int64]) -> None:
        """Insert the points for `buckets` (moments divided by the step) that are new."""
        have = self.moments // self.step
        new = np.setdiff1d(buckets, have, assume_unique=True)
        if not len(new):
            return
        size, places = len(have), np.searchsorted(have, new)
        self._reserve(size + len(new), 0)
        if places[0] < size:
            values = np.insert(self._values[:size], places, np.nan, axis=0)
            self._values[: len(values)] = values
            self._compute_again()
        self.moments = np.insert(self.moments, places, new * self.step)
        self.times = np.insert(self.times, places, -np.inf)
        self.begins = np.insert(self.begins, places, np.inf)

    def _halve(self) -> None:
        """Merge points, so that each stands for twice as many moments."""
        self.step *= 2
        buckets = self.moments // self.step
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        ends = np.append(starts[1:], len(buckets)) - 1
        first, last = self._values[starts], self._values[ends]
        merged = np.where(np.isnan(last), first, last)
        self._values[: len(buckets)] = np.nan
        self._values[: len(merged)] = merged
        self.times, self.begins = np.maximum.reduceat(self.times, starts), np.minimum.reduceat(self.begins, starts)
        self.moments = self.moments[ends]
        self._compute_again()

    def _compute_again(self) -> None:
        """Forget the statistics, because points have moved."""
        self.versions = np.empty(0, np.int64)
        self.statistics = {name: np.empty(0) for name in STATISTICS}
        self._mark(0)

    def _mark(self, row: int) -> None:
        self._dirty = row if self._dirty is None else min(self._dirty, row)


def _statistics(block: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return the statistics of each row, in the order of `STATISTICS`; NaN if there is no value or one is infinite."""
    rows = np.arange(len(block))
    ordered = np.sort(block, axis=1)  # NaN comes last
    counts = (~np.isnan(block)).sum(axis=1)
    last = np.maximum(counts - 1, 0)
    total = np.nansum(block, axis=1)
    finite = np.isfinite(total) & (counts > 0)
    found = (
        total / np.maximum(counts, 1),
        ordered[:, 0],
        ordered[rows, last],
        ordered[rows, np.round(BAND * last).astype(int)],
        ordered[rows, np.round((1 - BAND) * last).astype(int)],
        total,
    )
    return tuple(np.where(finite, values, np.nan) for values in found)
