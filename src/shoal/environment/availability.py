"""Availability: when nodes are online.

The `build` method of an availability creates the schedule of a run. Times are seconds from the start of the run. At the
time of a change, the new state applies. Servers are always online.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, Protocol, TypeAlias

from shoal.environment.fedscale import Client, Clients, Order
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import Bounds, NodeId

AVAILABILITIES: dict[str, str] = {
    "always": "shoal.environment.availability:Always",
    "fedscale": "shoal.environment.availability:FedScaleAvailability",
    "intervals": "shoal.environment.availability:Intervals",
    "day-night": "shoal.environment.availability:DayNight",
}

Interval: TypeAlias = tuple[float, float]
"""Online from the first time, until just before the second."""
TIME_DIGITS = 6
"""Times are rounded to microseconds: shorter differences would be lost in the rounding of late times."""
HORIZON = 1e9
"""Seconds, 32 years: nothing changes later. Until then a float can represent microseconds."""
SHORTEST_PERIOD = 0.001
"""Seconds."""
THRESHOLD_STEP = (math.sqrt(5) - 1) / 2
"""The step whose multiples, modulo 1, are spread the most evenly."""


class AvailabilitySchedule(Protocol):
    """When the nodes of a run are online."""

    def online(self, node: NodeId, time: float) -> bool: ...

    def next_change(self, node: NodeId, time: float) -> float:
        """The first time after `time` at which `online` is not what it is at `time`; infinite if there is none."""
        ...


class Availability(Protocol):
    """The settings of an availability; its parameters are those of its constructor."""

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule | None:
        """Build the schedule of the training nodes 0 to nodes − 1. None: all nodes are always online.

        Raises `DataError`, with the file and the place in it, if a trace cannot be used.
        """
        ...


@dataclass(frozen=True)
class Always:
    """Every node is online from start to end."""

    def build(self, nodes: int, seed: int) -> None:
        return None


@dataclass(frozen=True)
class FedScaleAvailability:
    """Measured phones: each node is online when a client of a FedScale trace was, repeatedly.

    `path`: a pickle or JSON, client id → { active: [s], inactive: [s], finish_time: s, … }: online from active[k]
    until inactive[k], repeated every finish_time. `order`: clients "drawn" at random, or as in the "file".
    """

    path: Path
    order: Order = "drawn"

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule:
        clients = Clients(self.path)
        found = [_trace(clients.of(node, seed, self.order)) for node in range(nodes)]
        _warn_of_offline_nodes([node for node, schedule in enumerate(found) if not schedule.intervals], str(self.path))
        return _AvailabilitySchedule(dict(enumerate(found)))


def _trace(client: Client) -> RepeatedIntervals:
    period = client.above_zero("finish_time")
    if period < SHORTEST_PERIOD:
        raise DataError(f"{client.place}: finish_time = {period:g}: expected at least {SHORTEST_PERIOD} s")
    active, inactive = client.times("active"), client.times("inactive")
    if len(active) != len(inactive):
        raise DataError(
            f"{client.place}: active holds {len(active)} times and inactive {len(inactive)}; expected pairs of them"
        )
    for on, off in zip(active, inactive, strict=True):
        if on > off:
            raise DataError(f"{client.place}: active at {on:g} s and inactive before that, at {off:g} s")
    return RepeatedIntervals(zip(active, inactive, strict=True), period)


@dataclass(frozen=True)
class Intervals:
    """Intervals from a CSV file: lines of node, on, off, in seconds; nodes that are not in it are always online.

    `off` may be inf. With `period`, in seconds, the intervals repeat. Without it they apply once. The lines of a node
    may be in any order, and overlap.
    """

    path: Path
    period: Annotated[float, Bounds(at_least=SHORTEST_PERIOD)] | None = None

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule:
        period = math.inf if self.period is None else self.period
        found: dict[NodeId, list[Interval]] = {}
        for node, interval in _Table(self.path, nodes, period).rows():
            found.setdefault(node, []).append(interval)
        return _AvailabilitySchedule({node: RepeatedIntervals(intervals, period) for node, intervals in found.items()})


class _Table:
    """A CSV file of intervals. Every error names the file and the line."""

    def __init__(self, path: Path, nodes: int, period: float) -> None:
        self._path, self._nodes, self._period = path, nodes, period

    def rows(self) -> Iterable[tuple[NodeId, Interval]]:
        try:
            lines = self._path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise DataError(f"{self._path}: cannot read these intervals: {reason}") from None
        begun = False
        for number, line in enumerate(lines, start=1):
            cells = [cell.strip() for cell in line.partition("#")[0].split(",")]
            if cells == [""]:
                continue
            header, begun = not begun and cells[0].lower() == "node", True
            if header:
                if [cell.lower() for cell in cells] != ["node", "on", "off"]:
                    self._reject(number, f"the columns are {', '.join(cells)}; expected node, on, off")
            else:
                yield self._row(number, cells)

    def _row(self, line: int, cells: Sequence[str]) -> tuple[NodeId, Interval]:
        if len(cells) != 3:
            self._reject(line, f"expected node, on, off; found {len(cells)} values")
        if not re.fullmatch("[0-9]{1,9}", cells[0]):
            self._reject(line, f"node = {cells[0]!r}: expected a node's id")
        node = int(cells[0])
        if node >= self._nodes:
            self._reject(line, f"there is no node {node}; with nodes = {self._nodes}, ids are 0 to {self._nodes - 1}")
        on, off = self._seconds(line, "on", cells[1]), self._seconds(line, "off", cells[2])
        if not 0 <= on < off:
            self._reject(line, f"on = {on:g}, off = {off:g}: expected 0 ≤ on < off")
        if off > self._period and (off < math.inf or on >= self._period):
            self._reject(line, f"on = {on:g}, off = {off:g}: expected times within the period, {self._period:g} s")
        return node, (on, off)

    def _seconds(self, line: int, column: str, cell: str) -> float:
        try:
            seconds = float(cell)
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            self._reject(line, f"{column} = {cell!r}: expected seconds")
        return seconds

    def _reject(self, line: int, problem: str) -> NoReturn:
        raise DataError(f"{self._path}:{line}: {problem}")


@dataclass(frozen=True)
class DayNight:
    """Synthetic days and nights: the share of online nodes follows a sine, from `low` to `high` and back.

    `period` is in seconds. Nodes are assigned at random to `phases` time zones. Each zone is ahead of the previous one
    by the same part of the period; with 1 zone, all nodes have their night at the same time.

    Each node has a threshold, uniform from 0 to 1, and is online while the sine of its time zone is above it. So the
    share of online nodes equals the sine, and a node goes online and offline once a period. Every night its threshold
    increases by 0.618, modulo 1, so every node has long and short days, and no node stays offline forever. With
    `same_hours` thresholds are fixed: then a share of 1 - `high` is never online.
    """

    period: Annotated[float, Bounds(at_least=SHORTEST_PERIOD)] = 3600.0
    low: Annotated[float, Bounds(at_least=0, at_most=0.99)] = 0.1
    high: Annotated[float, Bounds(at_least=0.01, at_most=1)] = 0.8
    phases: Annotated[int, Bounds(at_least=1)] = 24
    same_hours: bool = False

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g}, high = {self.high:g}: expected low below high")

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule:
        hours = [self._hours(node, seed) for node in range(nodes)]
        if self.same_hours:
            _warn_of_offline_nodes(
                [n for n, own in enumerate(hours) if own.threshold >= self.high], "availability 'day-night'"
            )
        return _AvailabilitySchedule(dict(enumerate(hours)))

    def _hours(self, node: NodeId, seed: int) -> DayNightHours:
        rng = generator(seed, "availability", node)
        return DayNightHours(self, threshold=float(rng.random()), zone=int(rng.integers(self.phases)))


def _warn_of_offline_nodes(nodes: Sequence[NodeId], place: str) -> None:
    """Warn of nodes that are never online. Traces have such clients, so they are allowed."""
    if nodes:
        some = ", ".join(map(str, nodes[:5])) + (", …" if len(nodes) > 5 else "")
        warnings.warn(f"{place}: {len(nodes)} of the nodes are never online: {some}", stacklevel=3)


# Schedules


class _NodeSchedule(Protocol):
    """When one node is online."""

    def online(self, time: float) -> bool: ...
    def next_change(self, time: float) -> float: ...


@dataclass(frozen=True)
class _AvailabilitySchedule:
    """A schedule for each node; nodes without one are always online."""

    schedules: Mapping[NodeId, _NodeSchedule]

    def online(self, node: NodeId, time: float) -> bool:
        return node not in self.schedules or self.schedules[node].online(min(time, HORIZON))

    def next_change(self, node: NodeId, time: float) -> float:
        if node not in self.schedules or time >= HORIZON:
            return math.inf
        change = self.schedules[node].next_change(time)
        return change if change <= HORIZON else math.inf


class RepeatedIntervals:
    """Intervals that repeat every `period`; an infinite period means once. They may be in any order."""

    def __init__(self, intervals: Iterable[Interval], period: float = math.inf) -> None:
        self.period = round(period, TIME_DIGITS)
        self.intervals = _merged(
            (round(on, TIME_DIGITS), round(min(off, self.period), TIME_DIGITS)) for on, off in intervals
        )
        self._edges = [edge for interval in self.intervals for edge in interval]
        self._flips = [edge for edge in self._edges if 0 < edge < self.period]
        if self._edges and self.period < math.inf and (self._edges[0] == 0) != (self._edges[-1] == self.period):
            self._flips.append(self.period)

    def online(self, time: float) -> bool:
        return bisect.bisect_right(self._edges, time % self.period) % 2 == 1

    def next_change(self, time: float) -> float:
        phase = time % self.period  # exact, as the remainder of floats is
        after = bisect.bisect_right(self._flips, phase)
        if after < len(self._flips):
            ahead = [self._flips[after]]
        elif self._flips and self.period < math.inf:
            ahead = [self.period, self._flips[0]]
        else:
            return math.inf
        change = math.fsum([time, -phase, *ahead])  # rounded once: the float next to the change, before or after it
        return change if self.online(change) != self.online(time) else math.nextafter(change, math.inf)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort the intervals, merge those that touch or overlap, and drop empty ones."""
    merged: list[Interval] = []
    for on, off in sorted(intervals):
        if merged and on <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(off, merged[-1][1]))
        elif on < off:
            merged.append((on, off))
    return merged


@dataclass(frozen=True)
class DayNightHours:
    """A node's days and nights. A day is numbered, and lasts from one lowest point of the sine to the next."""

    sine: DayNight
    threshold: float
    zone: int

    def online(self, time: float) -> bool:
        on, off = self._online_on(self._day(time))
        return on <= time < off

    def next_change(self, time: float) -> float:
        now, today = self.online(time), self._day(time)
        days = range(today, today + 2) if self.sine.same_hours else itertools.count(today)
        for day in days:
            for change in (*self._online_on(day), self._dawn(day + 1)):
                if change > time and self.online(change) != now:
                    return change
            if self._dawn(day) > HORIZON:
                break
        return math.inf

    def _day(self, time: float) -> int:
        day = math.floor(time / self.sine.period + self._ahead)
        while self._dawn(day) > time:
            day -= 1
        while self._dawn(day + 1) <= time:
            day += 1
        return day

    @property
    def _ahead(self) -> float:
        """Periods by which the lowest point of the sine comes before the run's start."""
        return 0.25 + self.zone / self.sine.phases

    def _dawn(self, day: int) -> float:
        return round((day - self._ahead) * self.sine.period, TIME_DIGITS)

    def _online_on(self, day: int) -> Interval:
        low, high = self.sine.low, self.sine.high
        threshold = (self.threshold + (0 if self.sine.same_hours else day * THRESHOLD_STEP)) % 1
        height = min(1.0, max(-1.0, 2 * (threshold - low) / (high - low) - 1))  # on the sine, from -1 to 1
        half = math.acos(height) / (2 * math.pi)  # of the day, before noon and after it
        dawn, next_dawn = self._dawn(day), self._dawn(day + 1)
        on, off = (round(dawn + (next_dawn - dawn) * part, TIME_DIGITS) for part in (0.5 - half, 0.5 + half))
        return on, off
