"""Messages under way: what a network does to them.

The carrier is told the time and never reads a clock, so the same code carries messages of the simulation, in virtual
time, and of processes, in real time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.environment.faults import Happening, Interference
from shoal.environment.network.network import MEGABIT, Presence, Route, Stage, Wiring
from shoal.randomness import generator
from shoal.types import NodeId

SHORTEST_ROUND_TRIP = 1e-4
"""Seconds: flows share a link by their round-trip times, and none is taken to be shorter than this."""

Fate: TypeAlias = Literal["left", "travels", "arrived", "lost"]
"""What becomes of a message: the last of it has left its sender; it is known when it will arrive (`Parcel.due`), if
nothing comes in between; it is there; it will never be. One that is lost and has not left before did not get out."""


class Parcel:
    """A message under way, as far as the network knows it. The content is its owner's business."""

    __slots__ = ("content", "doomed", "due", "left", "receiver", "route", "sender", "size")

    def __init__(self, sender: NodeId, receiver: NodeId, size: int, content: Any = None) -> None:
        self.sender = sender
        self.receiver = receiver
        self.size = size
        self.content = content
        self.left = False
        self.doomed = False
        """Whether it gets lost on the way."""
        self.route: Route | None = None
        self.due = math.inf
        """When it arrives, once that is known."""


News: TypeAlias = tuple[float, Fate, Parcel]
Occurrence: TypeAlias = Stage | Presence | Happening
"""What a network has to be told of, apart from messages."""


@dataclass(frozen=True)
class Connection:
    """What a node's device makes of the links that are its own."""

    bandwidth: float = math.inf
    """Mbit/s; the links carry as much at most."""
    slowdown: float = 1.0
    """They carry so many times less."""


class Carrier:
    """A network in use. Calls come in order of time; `advance` hands out what has happened in between.

    Messages from one node to another go one after another, as over one connection, and do not overtake each other.
    Those to different nodes, or from different ones, share the links that they have in common.
    """

    def __init__(self, wiring: Wiring, size: int, seed: int, connections: Sequence[Connection] = ()) -> None:
        from shoal.environment.network.flows import (
            Flows,  # compiled code, which takes a moment to load: only who needs it waits
        )

        self._wiring = wiring
        self._connections = list(connections) or [Connection()] * size
        self._factors = [1.0] * size
        """How many times slower than usual each node's own links are just now."""
        self._flows = Flows(self._capacities())
        self._flowing: dict[int, Parcel] = {}
        self._lines: dict[tuple[NodeId, NodeId], deque[Parcel]] = {}
        """Of each two nodes between which a message flows: those that wait until it has."""
        self._travelling: list[tuple[float, int, Parcel]] = []
        """Those that have left: a heap of when they arrive."""
        self._posted = 0
        self._latest: dict[tuple[NodeId, NodeId], float] = {}
        """When the last message from one node to another arrives: later ones do not overtake it."""
        self._held: list[Parcel] = []
        self._news: list[News] = []
        self._interference = Interference(size)
        self._away = [0] * size
        """For how many reasons each node is away."""
        self._rng = generator(seed, "network")

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that could arrive by itself."""
        return self.next_time() == math.inf

    @staticmethod
    def load() -> None:
        """Load the code that the first message would wait for otherwise; real time goes on meanwhile."""
        from shoal.environment.network.flows import load

        load()

    def post(self, now: float, parcel: Parcel) -> None:
        """Take a message."""
        if not self._reaches(parcel):
            self._news.append((now, "lost", parcel))
        elif self._interference.held(parcel.sender, parcel.receiver):
            self._leaves(now, parcel)
            self._held.append(parcel)
        else:
            self._carry(now, parcel)

    def next_time(self) -> float:
        """When there will be news if nothing else happens; infinite if never."""
        if self._news:
            return self._news[0][0]
        first = self._travelling[0][0] if self._travelling else math.inf
        return min(first, self._flows.next_time()) if self._flowing else first

    def advance(self, now: float) -> list[News]:
        """What has happened up to and including `now`, in order of time."""
        while self._flowing and (ends := self._flows.next_time()) <= now:
            for time, flow in self._flows.advance(ends):
                parcel = self._flowing.pop(flow)
                self._travel(time, parcel)
                self._next_in_line(time, parcel)
        while self._travelling and self._travelling[0][0] <= now:
            time, _, parcel = heapq.heappop(self._travelling)
            if not parcel.doomed:
                self._news.append((time, "arrived", parcel))
        news, self._news = self._news, []
        if len(news) > 1:
            news.sort(key=_time)
        return news

    def occur(self, now: float, occurrence: Occurrence) -> None:
        """Something about the network changes."""
        self._news = self.advance(now)  # what has ended by now did so under the old conditions
        if isinstance(occurrence, Stage):
            self._rewire(now, occurrence.wiring)
        elif isinstance(occurrence, Presence):
            self._attend(now, occurrence.node, occurrence.online)
        elif occurrence.kind == "slow":
            if occurrence.what != "compute":
                for node in occurrence.nodes:
                    self._factors[node] = occurrence.value
                self._set_capacities(now, {link for node in occurrence.nodes for link in self._wiring.access(node)})
        elif occurrence.kind in ("crash", "restart"):
            for node in occurrence.nodes:
                self._attend(now, node, occurrence.kind == "restart")
        else:
            self._interference.apply(occurrence)
            self._lose(now, lambda parcel: self._interference.cut(parcel.sender, parcel.receiver))
            self._release(now)

    def _reaches(self, parcel: Parcel) -> bool:
        away = self._away
        return not (
            away[parcel.sender] or away[parcel.receiver] or self._interference.cut(parcel.sender, parcel.receiver)
        )

    def _carry(self, now: float, parcel: Parcel) -> None:
        sender, receiver = parcel.sender, parcel.receiver
        if (line := self._lines.get((sender, receiver))) is not None:
            line.append(parcel)
            return
        route = parcel.route = self._wiring.route(sender, receiver)
        if route is None:
            self._news.append((now, "lost", parcel))
            return
        kept = (1.0 - route.loss) * (1.0 - self._interference.drop(sender, receiver))
        parcel.doomed = kept < 1.0 and self._rng.random() >= kept
        if route.links:
            self._flow(now, parcel, route, parcel.size)
        else:
            self._travel(now, parcel)

    def _flow(self, now: float, parcel: Parcel, route: Route, size: float) -> None:
        weight = 1.0 / max(2.0 * route.latency, SHORTEST_ROUND_TRIP)
        self._lines.setdefault((parcel.sender, parcel.receiver), deque())
        self._flowing[self._flows.start(now, route.links, weight, size)] = parcel

    def _next_in_line(self, now: float, parcel: Parcel) -> None:
        """After `parcel`, those that waited for it to have flowed."""
        line = self._lines.pop((parcel.sender, parcel.receiver))
        while line and (parcel.sender, parcel.receiver) not in self._lines:
            self._carry(now, line.popleft())
        if line:
            self._lines[parcel.sender, parcel.receiver] = line

    def _leaves(self, time: float, parcel: Parcel) -> None:
        if not parcel.left:
            parcel.left = True
            self._news.append((time, "left", parcel))

    def _travel(self, time: float, parcel: Parcel) -> None:
        """The last of a message has been sent; what is left is the latency."""
        self._leaves(time, parcel)
        if parcel.doomed:
            self._news.append((time, "lost", parcel))
            return
        route, pair = parcel.route, (parcel.sender, parcel.receiver)
        assert route is not None
        latency = route.latency
        if route.jitter:
            latency = max(0.0, latency + route.jitter * self._rng.standard_normal())
        parcel.due = self._latest[pair] = max(time + latency, self._latest.get(pair, 0.0))
        self._posted += 1
        heapq.heappush(self._travelling, (parcel.due, self._posted, parcel))
        self._news.append((time, "travels", parcel))

    def _attend(self, now: float, node: NodeId, online: bool) -> None:
        """One that goes gets nothing more, also if it is back in a moment; of what it sent, only what has left is."""
        self._away[node] += -1 if online else 1
        if not online:
            self._lose(now, lambda parcel: parcel.receiver == node or (parcel.sender == node and not parcel.left))

    def _lose(self, now: float, lost: Callable[[Parcel], bool]) -> None:
        """Give up on what is under way and cannot get through."""
        losses = [parcel for _, _, parcel in self._travelling if not parcel.doomed and lost(parcel)]
        for parcel in losses:
            parcel.doomed = True
        stopped = [(flow, parcel) for flow, parcel in self._flowing.items() if lost(parcel)]
        for flow, parcel in stopped:
            self._flows.cancel(now, flow)
            del self._flowing[flow]
            losses.append(parcel)
        for waiting in (*self._lines.values(), self._held):
            losses += [parcel for parcel in waiting if lost(parcel)]
            kept = [parcel for parcel in waiting if not lost(parcel)]
            waiting.clear()
            waiting.extend(kept)
        self._news.extend((now, "lost", parcel) for parcel in losses)
        for _, parcel in stopped:
            self._next_in_line(now, parcel)

    def _release(self, now: float) -> None:
        """What is no longer held goes on its way, in the order in which it was sent."""
        held, self._held = self._held, []
        for parcel in held:
            if self._interference.held(parcel.sender, parcel.receiver):
                self._held.append(parcel)
            else:
                self._carry(now, parcel)

    def _rewire(self, now: float, wiring: Wiring) -> None:
        self._wiring = wiring
        for flow, parcel in list(self._flowing.items()):
            route, before = wiring.route(parcel.sender, parcel.receiver), parcel.route
            if route is not None and before is not None:
                parcel.route = route
                if route.links == before.links and route.latency == before.latency:
                    continue
            rest = self._flows.cancel(now, flow)
            del self._flowing[flow]
            if route is not None and route.links:
                self._flow(now, parcel, route, rest)
                continue
            if route is None:
                self._news.append((now, "lost", parcel))
            else:
                self._travel(now, parcel)
            self._next_in_line(now, parcel)
        self._set_capacities(now, range(len(wiring.capacities)))

    def _capacities(self) -> NDArray[np.float64]:
        return capacities(self._wiring, self._connections, self._factors)

    def _set_capacities(self, now: float, links: Iterable[int]) -> None:
        capacities = self._capacities()
        for link in sorted(links):
            self._flows.set_capacity(now, link, float(capacities[link]))


def capacities(
    wiring: Wiring, connections: Sequence[Connection], factors: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """What the links carry, in bytes per second, with the nodes' own devices taken into account.

    factors[i] is how many times slower than usual node i's own links are just now.
    """
    carry = np.array(wiring.capacities, np.float64)
    own: dict[int, float] = {}
    for node, connection in enumerate(connections):
        slower = connection.slowdown * (1.0 if factors is None else factors[node])
        for link in wiring.access(node):
            carries = min(float(carry[link]), connection.bandwidth * MEGABIT) / slower
            own[link] = min(carries, own.get(link, math.inf))
    for link, carries in own.items():
        carry[link] = carries
    return carry


def _time(news: News) -> float:
    return news[0]
