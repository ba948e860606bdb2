"""Networks as Kollaps describes them (Gouveia et al., EuroSys 2020), collapsed to end-to-end routes.

Services and bridges are joined by links. A message takes the shortest way; its latency is the sum over the links of it,
its jitter the root of the sum of squares, and it gets through if no link drops it. Bandwidth is that of the links,
which all flows over them share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shoal.environment.network.kollaps_file import (
    Action,
    Description,
    Link,
    LinkEvent,
    Service,
    ServiceEvent,
    read,
    write,
)
from shoal.environment.network.network import LOOPBACK, MEGABIT, AvailabilityChange, NetworkTimeline, Route
from shoal.randomness import generator
from shoal.schema import nearest
from shoal.types import NodeId

__all__ = [
    "Action",
    "Collapsed",
    "Description",
    "Kollaps",
    "Layout",
    "Link",
    "LinkEvent",
    "Properties",
    "Service",
    "ServiceEvent",
    "read",
    "write",
]

By: TypeAlias = Literal["hops", "latency"]

HOP = 1e-9
"""Seconds that a link adds to a path by latency: of paths with equal latency, the one with fewer links is used."""


@dataclass(frozen=True)
class Kollaps:
    """A network from a file for Kollaps: services, bridges, links and a schedule of changes (Gouveia et al. 2020).

    Nodes are the replicas of `services`, in the order of the file; when none are named, of all but supervisors. There
    may be more of them than nodes: the first are taken. The shortest way is that of the fewest links, or the least
    latency; where two are equal in one, the other decides. Where a schedule speaks of some replicas, they are the first
    that it can be true of; `draw`: ones drawn from the seed.
    """

    path: Path
    services: tuple[str, ...] = ()
    by: By = "hops"
    draw: bool = False

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        description = read(self.path)
        layout = Layout(description)
        members = self._members(layout, nodes)
        course = _Course(description, layout, self.path, generator(seed, "kollaps") if self.draw else None)
        stages: list[tuple[float, Collapsed]] = []
        availability_changes: list[AvailabilityChange] = []
        online = [True] * nodes
        for time, state, joined in course.moments():
            if not stages or stages[-1][1].state is not state:
                stages.append((time, Collapsed(layout, members, state, self.by)))
            now = [vertex in joined for vertex in members]
            availability_changes += [
                AvailabilityChange(time, node, there) for node, there in enumerate(now) if there != online[node]
            ]
            online = now
        return NetworkTimeline(stages, availability_changes)

    def _members(self, layout: Layout, nodes: int) -> list[int]:
        """The vertex of each node."""
        known = layout.services
        for name in self.services:
            if name not in known:
                raise ValueError(f"services: there is no service {name!r} in {self.path}{nearest(name, known)}")
        chosen = [s.name for s in known.values() if (s.name in self.services if self.services else not s.supervisor)]
        members = [(name, vertex) for name in chosen for vertex in layout.vertices[name]]
        if len(members) < nodes:
            late = sorted(layout.late.intersection(chosen))
            remedy = "set replicas in the file, or nodes to fewer"
            if late:
                remedy = f"{', '.join(map(repr, late))} join by schedule, so none are there before: let more join"
            raise ValueError(
                f"{self.path}: {len(members)} replicas of {', '.join(map(repr, chosen)) or 'services'}, and there are "
                f"{nodes} nodes, servers included; {remedy}"
            )
        linked = {name for way in layout.ways for name in way}
        for name in sorted({name for name, _ in members[:nodes]} - linked):
            raise ValueError(
                f"{self.path}: service {name!r} has no link, so no node can reach it; give it one, or name the other "
                "services that are nodes: services = […]"
            )
        return [vertex for _, vertex in members[:nodes]]


@dataclass(frozen=True)
class Properties:
    """The properties of links that may change. Latencies and jitters are in seconds, capacities in bytes per second."""

    latency: NDArray[np.float64]
    jitter: NDArray[np.float64]
    drop: NDArray[np.float64]
    capacity: NDArray[np.float64]
    up: NDArray[np.bool_]
    """Whether a link is there."""
    gone: frozenset[int] = frozenset()
    """Vertices without any path to or through them: bridges that left, and disconnected replicas."""


class Layout:
    """Vertices and one-way links between them, all that are ever there, numbered in the order of the file.

    A link of a service is one of each replica, unless they share it. Then a vertex stands between: the link leads to
    it, and ties without a latency lead on to each replica, as wide as the link.
    """

    def __init__(self, description: Description) -> None:
        self.services = {service.name: service for service in description.services}
        self.late = {e.name for e in description.schedule if isinstance(e, ServiceEvent) and e.action == "join"}
        """Services and bridges of which some join by schedule."""
        self.size = 0
        self.vertices = {s.name: self._more(_replicas(s, description.schedule)) for s in description.services}
        self.vertices |= {name: self._more(1) for name in description.bridges}
        self.ways: dict[tuple[str, str], list[int]] = {}
        """The links from one name to another."""
        self._rows: list[tuple[int, int, float, float, float, float, bool, bool]] = []
        for link in description.links:
            self._lay(link, up=True)
        for event in description.schedule:
            for link in _joining(event, self.ways):
                self._lay(link, up=False)
        table = np.array(self._rows, np.float64).reshape(-1, 8)
        self.source, self.target = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        self.ties = table[:, 6].astype(bool)
        self.properties = Properties(table[:, 2], table[:, 3], table[:, 4], table[:, 5], table[:, 7].astype(bool))

    def _more(self, count: int) -> list[int]:
        self.size += count
        return list(range(self.size - count, self.size))

    def _lay(self, link: Link, *, up: bool) -> None:
        ends = [self.vertices[name] for name in (link.origin, link.dest)]
        shared = [name in self.services and self.services[name].share for name in (link.origin, link.dest)]
        near, far = (self._more(1) if s else end for s, end in zip(shared, ends, strict=True))
        self._lay_one_way(link, up, link.upload, (link.origin, link.dest), ends[0], near, far, ends[1])
        if link.download is not None:
            self._lay_one_way(link, up, link.download, (link.dest, link.origin), ends[1], far, near, ends[0])

    def _lay_one_way(self, link: Link, up: bool, megabits: float, way: tuple[str, str], *stations: list[int]) -> None:
        """Through four stations: an end, its side of the link, the other side and its end. Without ties two are one."""
        start, near, far, finish = stations
        first = len(self._rows)
        capacity = megabits * MEGABIT
        for a, b in ((a, b) for a in near for b in far):
            self._rows.append((a, b, link.latency / 1e3, link.jitter / 1e3, link.drop, capacity, False, up))
        ties = [(a, b) for a in start for b in near] if near is not start else []
        ties += [(a, b) for a in far for b in finish] if far is not finish else []
        self._rows += [(a, b, 0.0, 0.0, 0.0, capacity, True, up) for a, b in ties]
        self.ways.setdefault(way, []).extend(range(first, len(self._rows)))

    def after(self, event: LinkEvent, state: Properties) -> Properties:
        """The links after the event."""
        forth = self.ways.get((event.origin, event.dest), [])
        back = self.ways.get((event.dest, event.origin), [])
        changed = {f.name: getattr(state, f.name).copy() for f in dataclasses.fields(state) if f.name != "gone"}
        if event.action is not None:
            changed["up"][[*forth, *back]] = event.action in ("join", "reconnect")
        for numbers, megabits in ((forth, event.upload), (back, event.download)):
            if megabits is not None:
                changed["capacity"][numbers] = megabits * MEGABIT
        links = np.array(forth if event.download is None else [*forth, *back], np.int64)
        links = links[~self.ties[links]]
        for name, value, unit in (
            ("latency", event.latency, 1e3),
            ("jitter", event.jitter, 1e3),
            ("drop", event.drop, 1),
        ):
            if value is not None:
                changed[name][links] = value / unit
        return Properties(**changed, gone=state.gone)


def _joining(event: ServiceEvent | LinkEvent, ways: Collection[tuple[str, str]]) -> list[Link]:
    """The new links of the event: the ones that it describes and that do not exist yet."""
    if not isinstance(event, LinkEvent) or not event.is_new:
        return []
    latency, upload, download = cast(float, event.latency), cast(float, event.upload), event.download
    here, there, rest = event.origin, event.dest, (event.jitter or 0.0, event.drop or 0.0)
    if (here, there) not in ways:
        return [Link(here, there, latency, upload, None if (there, here) in ways else download, *rest)]
    if download is not None and (there, here) not in ways:
        return [Link(there, here, latency, download, None, *rest)]
    return []


def _replicas(service: Service, schedule: Sequence[ServiceEvent | LinkEvent]) -> int:
    """How many there ever are. As in Kollaps: where some join by schedule, all do, and none are there before."""
    events = [event for event in schedule if isinstance(event, ServiceEvent) and event.name == service.name]
    if not any(event.action == "join" for event in events):
        return service.replicas
    present = most = ever = 0
    for event in sorted(events, key=lambda event: event.time):
        if event.action == "join":
            present, ever = present + event.amount, ever + event.amount
        elif event.action in ("leave", "crash"):
            present -= event.amount
        most = max(most, present)
    return most if service.reuse else ever


class _Course:
    """The scheduled changes of the network."""

    def __init__(self, description: Description, layout: Layout, path: Path, rng: np.random.Generator | None) -> None:
        self._layout, self._path, self._rng = layout, path, rng
        self._schedule = sorted(description.schedule, key=lambda event: event.time)
        self._state = layout.properties
        self._joined = {v for name in layout.services if name not in layout.late for v in layout.vertices[name]}
        self._left: set[int] = set()

    def moments(self) -> Iterator[tuple[float, Properties, frozenset[int]]]:
        """Time 0 and the time of every change: the state from then on, and the replicas that are online."""
        fault_event = groupby(self._schedule, key=lambda event: event.time)
        if not self._schedule or self._schedule[0].time > 0:
            yield 0.0, self._state, frozenset(self._joined)
        for time, events in fault_event:
            for event in events:
                self._take(event)
            yield time, self._state, frozenset(self._joined)

    def _take(self, event: ServiceEvent | LinkEvent) -> None:
        if isinstance(event, LinkEvent):
            self._state = self._layout.after(event, self._state)
        elif event.name not in self._layout.services:
            self._withdraw(self._layout.vertices[event.name], back=event.action == "join")
        else:
            who = self._picked(event)
            match event.action:
                case "join":
                    self._joined.update(who)
                case "leave" | "crash":
                    self._joined.difference_update(who)
                    self._left.update(who)
                case "disconnect" | "reconnect":
                    self._withdraw(who, back=event.action == "reconnect")

    def _withdraw(self, vertices: Sequence[int], *, back: bool) -> None:
        gone = self._state.gone - {*vertices} if back else self._state.gone | {*vertices}
        self._state = dataclasses.replace(self._state, gone=gone)

    def _picked(self, event: ServiceEvent) -> list[int]:
        replicas = self._layout.vertices[event.name]
        match event.action:
            case "join":
                used = set() if self._layout.services[event.name].reuse else self._left
                able, are = [v for v in replicas if v not in self._joined and v not in used], "are not there yet"
            case "leave" | "crash":
                able, are = [v for v in replicas if v in self._joined], "are there"
            case "disconnect":
                able = [v for v in replicas if v in self._joined and v not in self._state.gone]
                are = "are there and connected"
            case "reconnect":
                able, are = [v for v in replicas if v in self._state.gone], "are disconnected"
        if len(able) < event.amount:
            raise ValueError(
                f"{self._path}:{event.line}: {event.action} of {event.amount} replicas of {event.name!r} at "
                f"{event.time:g} s, when {len(able)} {are}; where some join by schedule, none are there before they do"
            )
        if self._rng is not None:
            able = sorted(self._rng.choice(able, event.amount, replace=False).tolist())
        return able[: event.amount]


class Collapsed:
    """The network between two changes. Paths are computed on first use."""

    def __init__(self, layout: Layout, members: Sequence[int], state: Properties, by: By) -> None:
        self.state = state
        self._layout, self._members, self._by = layout, members, by
        self._routes: dict[tuple[NodeId, NodeId], Route | None] = {}
        self._tree = functools.lru_cache(maxsize=256)(self._shortest)

    @property
    def capacities(self) -> NDArray[np.float64]:
        return self.state.capacity

    def route(self, sender: NodeId, receiver: NodeId) -> Route | None:
        if sender == receiver:
            return LOOPBACK
        pair = (sender, receiver)
        if pair not in self._routes:
            links = self._way(self._members[sender], self._members[receiver])
            self._routes[pair] = None if links is None else self._collapsed(links)
        return self._routes[pair]

    def access(self, node: NodeId) -> tuple[int, ...]:
        vertex = self._members[node]
        return tuple(np.flatnonzero((self._layout.source == vertex) | (self._layout.target == vertex)).tolist())

    def _collapsed(self, links: list[int]) -> Route:
        latencies, jitters, drops = self._lists
        latency = math.fsum(latencies[link] for link in links)  # exactly equal in both directions
        jitter = math.hypot(*(jitters[link] for link in links))
        return Route(tuple(links), latency, jitter, 1 - math.prod(1 - drops[link] for link in links))

    def _way(self, start: int, end: int) -> list[int] | None:
        """The links of the shortest path, in order."""
        before = self._tree(start)
        if before[end] < 0:
            return None
        _, numbers = self._graph
        links: list[int] = []
        while end != start:
            links.append(numbers[before[end] * self._layout.size + end])
            end = before[end]
        return links[::-1]

    def _shortest(self, start: int) -> list[int]:
        """The vertex before each on the shortest path from `start`; negative if there is no path."""
        from scipy.sparse.csgraph import dijkstra

        before: list[int] = dijkstra(self._graph[0], indices=start, return_predecessors=True)[1].tolist()
        return before

    @functools.cached_property
    def _lists(self) -> tuple[list[float], list[float], list[float]]:
        """Latency, jitter and drop of the links: single numbers are read faster from lists than from arrays."""
        return self.state.latency.tolist(), self.state.jitter.tolist(), self.state.drop.tolist()

    @functools.cached_property
    def _graph(self) -> tuple[Any, dict[int, int]]:
        """Vertices and the best link from each to each, as a sparse matrix; and the numbers of these links, by pair."""
        from scipy.sparse import csr_matrix

        layout, size = self._layout, self._layout.size
        gone = np.zeros(size, bool)
        gone[list(self.state.gone)] = True
        usable = np.flatnonzero(self.state.up & ~gone[layout.source] & ~gone[layout.target])
        latency = self.state.latency[usable]
        # Of paths with equally many links, the one with the least latency: all latencies count less than one link.
        weight = 1 + latency / (1 + latency.sum()) if self._by == "hops" else latency + HOP
        pairs = layout.source[usable] * size + layout.target[usable]
        order = np.lexsort((usable, weight, pairs))
        keys, first = np.unique(pairs[order], return_index=True)
        best = order[first]
        graph = csr_matrix((weight[best], (keys // size, keys % size)), shape=(size, size))
        return graph, dict(zip(keys.tolist(), usable[best].tolist(), strict=True))
