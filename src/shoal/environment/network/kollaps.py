"""Networks as Kollaps describes them (Gouveia et al., EuroSys 2020), collapsed to end-to-end routes.

Services and bridges are joined by links. A message takes the shortest path. The latency of a path is the sum of the
latencies of its links, the jitter is the root of the sum of squares, and a message arrives if no link drops it. All
flows over a link share its bandwidth.
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
    "KollapsGraph",
    "Link",
    "LinkEvent",
    "Properties",
    "Service",
    "ServiceEvent",
    "read",
    "write",
]

By: TypeAlias = Literal["hops", "latency"]

HOP_SECONDS = 1e-9
"""Seconds that every link adds to a path by latency. Between paths of equal latency, the one with fewer links wins."""


@dataclass(frozen=True)
class Kollaps:
    """A network from a file for Kollaps: services, bridges, links and a schedule of changes (Gouveia et al. 2020).

    Nodes are the replicas of `services`, in the order of the file. Without `services`, nodes are the replicas of all
    services except supervisors. If there are more replicas than nodes, the first ones are used. The shortest path has
    the fewest links (`by` = "hops") or the least latency; the other criterion breaks ties. A scheduled event selects
    the first replicas in a suitable state. With `draw`, it selects random ones of all replicas in a suitable state.
    """

    path: Path
    services: tuple[str, ...] = ()
    by: By = "hops"
    draw: bool = False

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        description = read(self.path)
        graph = KollapsGraph(description)
        members = self._node_vertices(graph, nodes)
        replay = _ScheduleReplay(description, graph, self.path, generator(seed, "kollaps") if self.draw else None)
        states: list[tuple[float, Collapsed]] = []
        availability_changes: list[AvailabilityChange] = []
        online = [True] * nodes
        for time, state, joined in replay.states():
            if not states or states[-1][1].state is not state:
                states.append((time, Collapsed(graph, members, state, self.by)))
            now = [vertex in joined for vertex in members]
            availability_changes += [
                AvailabilityChange(time, node, is_online)
                for node, is_online in enumerate(now)
                if is_online != online[node]
            ]
            online = now
        return NetworkTimeline(states, availability_changes)

    def _node_vertices(self, graph: KollapsGraph, nodes: int) -> list[int]:
        """Return the vertex of each node."""
        known = graph.services
        for name in self.services:
            if name not in known:
                raise ValueError(f"services: there is no service {name!r} in {self.path}{nearest(name, known)}")
        chosen = [s.name for s in known.values() if (s.name in self.services if self.services else not s.supervisor)]
        members = [(name, vertex) for name in chosen for vertex in graph.vertices[name]]
        if len(members) < nodes:
            joining = sorted(graph.joining.intersection(chosen))
            remedy = "set replicas in the file, or reduce nodes"
            if joining:
                remedy = (
                    f"replicas of {', '.join(map(repr, joining))} exist only after they join by schedule; let more join"
                )
            raise ValueError(
                f"{self.path}: {len(members)} replicas of {', '.join(map(repr, chosen)) or 'services'}, but "
                f"{nodes} nodes, servers included; {remedy}"
            )
        linked = {name for pair in graph.links_by_pair for name in pair}
        for name in sorted({name for name, _ in members[:nodes]} - linked):
            raise ValueError(
                f"{self.path}: service {name!r} has no link, so no node can reach it; add a link, or list only "
                "the other services: services = […]"
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
    """Whether a link exists."""
    unreachable: frozenset[int] = frozenset()
    """Vertices without any path to or through them: bridges that left, and disconnected replicas."""


class KollapsGraph:
    """All vertices and one-way links that exist at any time, numbered in the order of the file.

    Every replica of a service has its own copy of each link of the service, unless the replicas share it. A shared link
    ends at an extra vertex. Connectors join this vertex to each replica, with the bandwidth of the link and no latency.
    """

    def __init__(self, description: Description) -> None:
        self.services = {service.name: service for service in description.services}
        self.joining = {e.name for e in description.schedule if isinstance(e, ServiceEvent) and e.action == "join"}
        """Services and bridges with a scheduled join."""
        self.size = 0
        self.vertices = {
            s.name: self._add_vertices(_total_replicas(s, description.schedule)) for s in description.services
        }
        self.vertices |= {name: self._add_vertices(1) for name in description.bridges}
        self.links_by_pair: dict[tuple[str, str], list[int]] = {}
        """The links from one name to another, by the two names."""
        self._rows: list[tuple[int, int, float, float, float, float, bool, bool]] = []
        for link in description.links:
            self._add_link(link, up=True)
        for event in description.schedule:
            for link in _new_links(event, self.links_by_pair):
                self._add_link(link, up=False)
        table = np.array(self._rows, np.float64).reshape(-1, 8)
        self.source, self.target = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        self.connectors = table[:, 6].astype(bool)
        self.properties = Properties(table[:, 2], table[:, 3], table[:, 4], table[:, 5], table[:, 7].astype(bool))

    def _add_vertices(self, count: int) -> list[int]:
        self.size += count
        return list(range(self.size - count, self.size))

    def _add_link(self, link: Link, *, up: bool) -> None:
        ends = [self.vertices[name] for name in (link.origin, link.dest)]
        shared = [name in self.services and self.services[name].share for name in (link.origin, link.dest)]
        near, far = (self._add_vertices(1) if s else end for s, end in zip(shared, ends, strict=True))
        self._add_one_way(link, up, link.upload, (link.origin, link.dest), ends[0], near, far, ends[1])
        if link.download is not None:
            self._add_one_way(link, up, link.download, (link.dest, link.origin), ends[1], far, near, ends[0])

    def _add_one_way(self, link: Link, up: bool, megabits: float, pair: tuple[str, str], *stages: list[int]) -> None:
        """Add links through four stages: an end, its side of the link, the other side and its end.

        An end and its side are the same list if the link has no connectors there.
        """
        start, near, far, finish = stages
        first = len(self._rows)
        capacity = megabits * MEGABIT
        for a, b in ((a, b) for a in near for b in far):
            self._rows.append((a, b, link.latency / 1e3, link.jitter / 1e3, link.drop, capacity, False, up))
        connectors = [(a, b) for a in start for b in near] if near is not start else []
        connectors += [(a, b) for a in far for b in finish] if far is not finish else []
        self._rows += [(a, b, 0.0, 0.0, 0.0, capacity, True, up) for a, b in connectors]
        self.links_by_pair.setdefault(pair, []).extend(range(first, len(self._rows)))

    def after(self, event: LinkEvent, state: Properties) -> Properties:
        """Return the properties of all links after the event."""
        forward = self.links_by_pair.get((event.origin, event.dest), [])
        reverse = self.links_by_pair.get((event.dest, event.origin), [])
        changed = {f.name: getattr(state, f.name).copy() for f in dataclasses.fields(state) if f.name != "unreachable"}
        if event.action is not None:
            changed["up"][[*forward, *reverse]] = event.action in ("join", "reconnect")
        for numbers, megabits in ((forward, event.upload), (reverse, event.download)):
            if megabits is not None:
                changed["capacity"][numbers] = megabits * MEGABIT
        links = np.array(forward if event.download is None else [*forward, *reverse], np.int64)
        links = links[~self.connectors[links]]
        for name, value, unit in (
            ("latency", event.latency, 1e3),
            ("jitter", event.jitter, 1e3),
            ("drop", event.drop, 1),
        ):
            if value is not None:
                changed[name][links] = value / unit
        return Properties(**changed, unreachable=state.unreachable)


def _new_links(event: ServiceEvent | LinkEvent, pairs: Collection[tuple[str, str]]) -> list[Link]:
    """Return the links that the event describes and that do not exist yet."""
    if not isinstance(event, LinkEvent) or not event.is_new:
        return []
    latency, upload, download = cast(float, event.latency), cast(float, event.upload), event.download
    origin, dest, rest = event.origin, event.dest, (event.jitter or 0.0, event.drop or 0.0)
    if (origin, dest) not in pairs:
        return [Link(origin, dest, latency, upload, None if (dest, origin) in pairs else download, *rest)]
    if download is not None and (dest, origin) not in pairs:
        return [Link(dest, origin, latency, download, None, *rest)]
    return []


def _total_replicas(service: Service, schedule: Sequence[ServiceEvent | LinkEvent]) -> int:
    """Count the replicas over all time. As in Kollaps, a service with a scheduled join starts with none."""
    events = [event for event in schedule if isinstance(event, ServiceEvent) and event.name == service.name]
    if not any(event.action == "join" for event in events):
        return service.replicas
    present = peak = total = 0
    for event in sorted(events, key=lambda event: event.time):
        if event.action == "join":
            present, total = present + event.amount, total + event.amount
        elif event.action in ("leave", "crash"):
            present -= event.amount
        peak = max(peak, present)
    return peak if service.reuse else total


class _ScheduleReplay:
    """The scheduled changes of the network."""

    def __init__(
        self, description: Description, graph: KollapsGraph, path: Path, rng: np.random.Generator | None
    ) -> None:
        self._graph, self._path, self._rng = graph, path, rng
        self._schedule = sorted(description.schedule, key=lambda event: event.time)
        self._state = graph.properties
        self._joined = {v for name in graph.services if name not in graph.joining for v in graph.vertices[name]}
        self._departed: set[int] = set()

    def states(self) -> Iterator[tuple[float, Properties, frozenset[int]]]:
        """Yield time 0 and the time of every change, each with the state from then on and the online replicas."""
        batches = groupby(self._schedule, key=lambda event: event.time)
        if not self._schedule or self._schedule[0].time > 0:
            yield 0.0, self._state, frozenset(self._joined)
        for time, events in batches:
            for event in events:
                self._apply(event)
            yield time, self._state, frozenset(self._joined)

    def _apply(self, event: ServiceEvent | LinkEvent) -> None:
        if isinstance(event, LinkEvent):
            self._state = self._graph.after(event, self._state)
        elif event.name not in self._graph.services:
            self._set_reachable(self._graph.vertices[event.name], event.action == "join")
        else:
            replicas = self._select_replicas(event)
            match event.action:
                case "join":
                    self._joined.update(replicas)
                case "leave" | "crash":
                    self._joined.difference_update(replicas)
                    self._departed.update(replicas)
                case "disconnect" | "reconnect":
                    self._set_reachable(replicas, event.action == "reconnect")

    def _set_reachable(self, vertices: Sequence[int], reachable: bool) -> None:
        before = self._state.unreachable
        unreachable = before - {*vertices} if reachable else before | {*vertices}
        self._state = dataclasses.replace(self._state, unreachable=unreachable)

    def _select_replicas(self, event: ServiceEvent) -> list[int]:
        replicas = self._graph.vertices[event.name]
        match event.action:
            case "join":
                used = set() if self._graph.services[event.name].reuse else self._departed
                candidates, condition = [v for v in replicas if v not in self._joined and v not in used], "can join"
            case "leave" | "crash":
                candidates, condition = [v for v in replicas if v in self._joined], "are online"
            case "disconnect":
                candidates = [v for v in replicas if v in self._joined and v not in self._state.unreachable]
                condition = "are online and connected"
            case "reconnect":
                candidates, condition = [v for v in replicas if v in self._state.unreachable], "are disconnected"
        if len(candidates) < event.amount:
            raise ValueError(
                f"{self._path}:{event.line}: {event.action} of {event.amount} replicas of {event.name!r} at "
                f"{event.time:g} s, when {len(candidates)} {condition}; a service with a scheduled join starts "
                "without replicas"
            )
        if self._rng is not None:
            candidates = sorted(self._rng.choice(candidates, event.amount, replace=False).tolist())
        return candidates[: event.amount]


class Collapsed:
    """The network between two changes. Paths are computed on first use."""

    def __init__(self, graph: KollapsGraph, members: Sequence[int], state: Properties, by: By) -> None:
        self.state = state
        self._graph, self._node_vertices, self._by = graph, members, by
        self._routes: dict[tuple[NodeId, NodeId], Route | None] = {}
        self._predecessors = functools.lru_cache(maxsize=256)(self._shortest)

    @property
    def capacities(self) -> NDArray[np.float64]:
        return self.state.capacity

    def route(self, sender: NodeId, receiver: NodeId) -> Route | None:
        if sender == receiver:
            return LOOPBACK
        pair = (sender, receiver)
        if pair not in self._routes:
            links = self._path_links(self._node_vertices[sender], self._node_vertices[receiver])
            self._routes[pair] = None if links is None else self._collapse(links)
        return self._routes[pair]

    def access(self, node: NodeId) -> tuple[int, ...]:
        vertex = self._node_vertices[node]
        return tuple(np.flatnonzero((self._graph.source == vertex) | (self._graph.target == vertex)).tolist())

    def _collapse(self, links: list[int]) -> Route:
        latencies, jitters, drops = self._lists
        latency = math.fsum(latencies[link] for link in links)  # exactly equal in both directions
        jitter = math.hypot(*(jitters[link] for link in links))
        return Route(tuple(links), latency, jitter, 1 - math.prod(1 - drops[link] for link in links))

    def _path_links(self, start: int, end: int) -> list[int] | None:
        """Return the links of the shortest path, in order; None if there is no path."""
        predecessors = self._predecessors(start)
        if predecessors[end] < 0:
            return None
        _, numbers = self._best_links
        links: list[int] = []
        while end != start:
            links.append(numbers[predecessors[end] * self._graph.size + end])
            end = predecessors[end]
        return links[::-1]

    def _shortest(self, start: int) -> list[int]:
        """Return the predecessor of each vertex on the shortest path from `start`; negative if there is no path."""
        from scipy.sparse.csgraph import dijkstra

        predecessors: list[int] = dijkstra(self._best_links[0], indices=start, return_predecessors=True)[1].tolist()
        return predecessors

    @functools.cached_property
    def _lists(self) -> tuple[list[float], list[float], list[float]]:
        """Latency, jitter and drop of the links as lists, because reading one number from an array is slower."""
        return self.state.latency.tolist(), self.state.jitter.tolist(), self.state.drop.tolist()

    @functools.cached_property
    def _best_links(self) -> tuple[Any, dict[int, int]]:
        """The best link between each pair of vertices: a sparse matrix of weights, and the link numbers by pair."""
        from scipy.sparse import csr_matrix

        graph, size = self._graph, self._graph.size
        unreachable = np.zeros(size, bool)
        unreachable[list(self.state.unreachable)] = True
        usable = np.flatnonzero(self.state.up & ~unreachable[graph.source] & ~unreachable[graph.target])
        latency = self.state.latency[usable]
        # Latency decides between paths with equally many links: all latencies together weigh less than one link.
        weight = 1 + latency / (1 + latency.sum()) if self._by == "hops" else latency + HOP_SECONDS
        pairs = graph.source[usable] * size + graph.target[usable]
        order = np.lexsort((usable, weight, pairs))
        keys, first = np.unique(pairs[order], return_index=True)
        best = order[first]
        graph = csr_matrix((weight[best], (keys // size, keys % size)), shape=(size, size))
        return graph, dict(zip(keys.tolist(), usable[best].tolist(), strict=True))
