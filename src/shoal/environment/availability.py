"""When nodes are online.

An availability is a recipe; `build` makes of it the attendance of the nodes of a run. Times are seconds from the start
of the run. A node is online from a time on until just before another, so that at the very time of a change the new
state holds. The nodes that serve others are always online.
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
    "fedscale": "shoal.environment.availability:FedScale",
    "intervals": "shoal.environment.availability:Intervals",
    "day-night": "shoal.environment.availability:DayNight",
}

Interval: TypeAlias = tuple[float, float]
"""Online from the first time on, until just before the second."""
DIGITS = 6
"""Times are kept to the microsecond: what is shorter would drown in the rounding of later times."""
HORIZON = 1e9
"""Seconds, 32 years: nothing changes after that. Up to there a float tells microseconds apart."""
SHORTEST_PERIOD = 0.001
"""Seconds."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The step whose multiples, from 1 back to 0, are spread the most evenly."""


class AvailabilitySchedule(Protocol):
    """When the nodes of a run are online."""

    def online(self, node: NodeId, time: float) -> bool: ...

    def next_change(self, node: NodeId, time: float) -> float:
        """The first time after `time` at which `online` is not what it is at `time`; infinite if there is none."""
        ...


class Availability(Protocol):
    """A recipe for an attendance; its parameters are those of its constructor."""

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule | None:
        """On nodes 0 to nodes − 1, those that learn. None: everybody, always.

        Raises `DataError`, which names the file and the place in it, for a trace that cannot be used.
        """
        ...


@dataclass(frozen=True)
class Always:
    """Every node is online from start to end."""

    def build(self, nodes: int, seed: int) -> None:
        return None


@dataclass(frozen=True)
class FedScale:
    """Measured phones: each node is online when a client of a FedScale trace was, over and over.

    `path`: a pickle or JSON, client id → { active: [s], inactive: [s], finish_time: s, … }: online from active[k]
    until inactive[k], and so on every finish_time. `order`: clients "drawn" from the seed, or as in the "file".
    """

    path: Path
    order: Order = "drawn"

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule:
        clients = Clients(self.path)
        found = [_trace(clients.of(node, seed, self.order)) for node in range(nodes)]
        _report_absent([node for node, schedule in enumerate(found) if not schedule.intervals], str(self.path))
        return _AvailabilitySchedule(dict(enumerate(found)))


def _trace(client: Client) -> Schedule:
    period = client.above_zero("finish_time")
    if period < SHORTEST_PERIOD:
        raise DataError(f"{client.place}: finish_time = {period:g}: expected {SHORTEST_PERIOD} s at the least")
    active, inactive = client.times("active"), client.times("inactive")
    if len(active) != len(inactive):
        raise DataError(
            f"{client.place}: active holds {len(active)} times and inactive {len(inactive)}; expected pairs of them"
        )
    for on, off in zip(active, inactive, strict=True):
        if on > off:
            raise DataError(f"{client.place}: active at {on:g} s and inactive before that, at {off:g} s")
    return Schedule(zip(active, inactive, strict=True), period)


@dataclass(frozen=True)
class Intervals:
    """As a CSV file says: lines of node, on, off, in seconds; nodes that are not in it are always online.

    `off` may be inf. `period`: seconds after which it all begins anew; once only when not given. Lines of a node may
    come in any order, and overlap.
    """

    path: Path
    period: Annotated[float, Bounds(at_least=SHORTEST_PERIOD)] | None = None

    def build(self, nodes: int, seed: int) -> AvailabilitySchedule:
        period = math.inf if self.period is None else self.period
        found: dict[NodeId, list[Interval]] = {}
        for node, interval in _Table(self.path, nodes, period).rows():
            found.setdefault(node, []).append(interval)
        return _AvailabilitySchedule({node: Schedule(intervals, period) for node, intervals in found.items()})


class _Table:
    """A CSV file of intervals. Every refusal names the file and the line."""

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
            words = [word.strip() for word in line.partition("#")[0].split(",")]
            if words == [""]:
                continue
            header, begun = not begun and words[0].lower() == "node", True
            if header:
                if [word.lower() for word in words] != ["node", "on", "off"]:
                    self._refuse(number, f"the columns are {', '.join(words)}; expected node, on, off")
            else:
                yield self._row(number, words)

    def _row(self, line: int, words: Sequence[str]) -> tuple[NodeId, Interval]:
        if len(words) != 3:
            self._refuse(line, f"expected node, on, off; found {len(words)} values")
        if not re.fullmatch("[0-9]{1,9}", words[0]):
            self._refuse(line, f"node = {words[0]!r}: expected a node's id")
        node = int(words[0])
        if node >= self._nodes:
            self._refuse(line, f"there is no node {node}; with nodes = {self._nodes}, ids are 0 to {self._nodes - 1}")
        on, off = self._seconds(line, "on", words[1]), self._seconds(line, "off", words[2])
        if not 0 <= on < off:
            self._refuse(line, f"on = {on:g}, off = {off:g}: expected 0 ≤ on < off")
        if off > self._period and (off < math.inf or on >= self._period):
            self._refuse(line, f"on = {on:g}, off = {off:g}: expected times within the period, {self._period:g} s")
        return node, (on, off)

    def _seconds(self, line: int, column: str, word: str) -> float:
        try:
            seconds = float(word)
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            self._refuse(line, f"{column} = {word!r}: expected seconds")
        return seconds

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise DataError(f"{self._path}:{line}: {problem}")


@dataclass(frozen=True)
class DayNight:
    """Made up: the share of nodes that are online goes up and down as a sine, from `low` to `high` and back.

    `period`: seconds. `phases`: nodes are spread at random over so many time zones, each ahead of the one before by an
    equal part of the period; with 1, all have their night at the same time.

    Each node has a threshold, drawn evenly from 0 to 1, and is online while the sine of its time zone is above it: so
    at any time the share of nodes is what the sine says, and a node comes and goes once a period. Every night its
    threshold moves on by 0.618 (and from 1 back to 0), so that every node has long days and short ones, and none is
    away for ever. With `same_hours` it stays: then a share of 1 - `high` is never online.
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
            _report_absent([n for n, own in enumerate(hours) if own.threshold >= self.high], "availability 'day-night'")
        return _AvailabilitySchedule(dict(enumerate(hours)))

    def _hours(self, node: NodeId, seed: int) -> Hours:
        rng = generator(seed, "availability", node)
        return Hours(self, threshold=float(rng.random()), zone=int(rng.integers(self.phases)))


def _report_absent(nodes: Sequence[NodeId], place: str) -> None:
    """A node that never comes is allowed, for traces have such clients; whoever runs it should know."""
    if nodes:
        some = ", ".join(map(str, nodes[:5])) + (", …" if len(nodes) > 5 else "")
        warnings.warn(f"{place}: {len(nodes)} of the nodes are never online: {some}", stacklevel=3)


# In use


class _Timetable(Protocol):
    """When one node is online."""

    def online(self, time: float) -> bool: ...
    def next_change(self, time: float) -> float: ...


@dataclass(frozen=True)
class _AvailabilitySchedule:
    """A timetable for each node; those without one are always online."""

    timetables: Mapping[NodeId, _Timetable]

    def online(self, node: NodeId, time: float) -> bool:
        return node not in self.timetables or self.timetables[node].online(min(time, HORIZON))

    def next_change(self, node: NodeId, time: float) -> float:
        if node not in self.timetables or time >= HORIZON:
            return math.inf
        change = self.timetables[node].next_change(time)
        return change if change <= HORIZON else math.inf


class Schedule:
    """Intervals, which begin anew every `period`, or come once when that is infinite. They may be in any order."""

    def __init__(self, intervals: Iterable[Interval], period: float = math.inf) -> None:
        self.period = round(period, DIGITS)
        self.intervals = _merged((round(on, DIGITS), round(min(off, self.period), DIGITS)) for on, off in intervals)
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
        change = math.fsum([time, -phase, *ahead])  # rounded once, so the float next to the change: before it or after
        return change if self.online(change) != self.online(time) else math.nextafter(change, math.inf)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, those that touch or overlap as one, and none that is empty."""
    merged: list[Interval] = []
    for on, off in sorted(intervals):
        if merged and on <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(off, merged[-1][1]))
        elif on < off:
            merged.append((on, off))
    return merged


@dataclass(frozen=True)
class Hours:
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
        return round((day - self._ahead) * self.sine.period, DIGITS)

    def _online_on(self, day: int) -> Interval:
        low, high = self.sine.low, self.sine.high
        threshold = (self.threshold + (0 if self.sine.same_hours else day * GOLDEN)) % 1
        height = min(1.0, max(-1.0, 2 * (threshold - low) / (high - low) - 1))  # on the sine, from -1 to 1
        half = math.acos(height) / (2 * math.pi)  # of the day, before noon and after it
        dawn, next_dawn = self._dawn(day), self._dawn(day + 1)
        on, off = (round(dawn + (next_dawn - dawn) * part, DIGITS) for part in (0.5 - half, 0.5 + half))
        return on, off
