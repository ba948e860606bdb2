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

from shoal.environment.faults import FaultEvent, PairFaults
from shoal.environment.network.network import MEGABIT, AvailabilityChange, NetworkChange, NetworkState, Route
from shoal.randomness import generator
from shoal.types import NodeId

SHORTEST_ROUND_TRIP = 1e-4
"""Seconds: flows share a link by their round-trip times, and none is taken to be shorter than this."""

DeliveryStatus: TypeAlias = Literal["sent", "in_transit", "delivered", "lost"]
"""The states of a message in the network.

- sent: the sender has sent the last byte.
- in_transit: the arrival time is known (`Delivery.arrival_time`); an event may still cause a loss.
- delivered: the receiver has the message.
- lost: the message will never be delivered. If it was not sent before, it never left its sender.
"""


class Delivery:
    """A message under way, as far as the network knows it. The content is its owner's business."""

    __slots__ = ("arrival_time", "content", "lost", "receiver", "route", "sender", "sent", "size")

    def __init__(self, sender: NodeId, receiver: NodeId, size: int, content: Any = None) -> None:
        self.sender = sender
        self.receiver = receiver
        self.size = size
        self.content = content
        self.sent = False
        self.lost = False
        """Whether it gets lost on the way."""
        self.route: Route | None = None
        self.arrival_time = math.inf
        """When it arrives, once that is known."""


DeliveryUpdate: TypeAlias = tuple[float, DeliveryStatus, Delivery]
EnvironmentEvent: TypeAlias = NetworkChange | AvailabilityChange | FaultEvent
"""What a network has to be told of, apart from messages."""


@dataclass(frozen=True)
class AccessLimit:
    """What a node's device makes of the links that are its own."""

    bandwidth: float = math.inf
    """Mbit/s; the links carry as much at most."""
    slowdown: float = 1.0
    """They carry so many times less."""


class NetworkModel:
    """A network in use. Calls come in order of time; `advance` hands out what has happened in between.

    Messages from one node to another go one after another, as over one connection, and do not overtake each other.
    Those to different nodes, or from different ones, share the links that they have in common.
    """

    def __init__(
        self, network_state: NetworkState, size: int, seed: int, access_limits: Sequence[AccessLimit] = ()
    ) -> None:
        from shoal.environment.network.flows import (
            Flows,  # compiled code, which takes a moment to load: only who needs it waits
        )

        self._wiring = network_state
        self._connections = list(access_limits) or [AccessLimit()] * size
        self._factors = [1.0] * size
        """How many times slower than usual each node's own links are just now."""
        self._flows = Flows(self._capacities())
        self._flowing: dict[int, Delivery] = {}
        self._lines: dict[tuple[NodeId, NodeId], deque[Delivery]] = {}
        """Of each two nodes between which a message flows: those that wait until it has."""
        self._travelling: list[tuple[float, int, Delivery]] = []
        """Those that have left: a heap of when they arrive."""
        self._posted = 0
        self._latest: dict[tuple[NodeId, NodeId], float] = {}
        """When the last message from one node to another arrives: later ones do not overtake it."""
        self._held: list[Delivery] = []
        self._updates: list[DeliveryUpdate] = []
        self._interference = PairFaults(size)
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

    def send(self, now: float, delivery: Delivery) -> None:
        """Take a message."""
        if not self._reaches(delivery):
            self._updates.append((now, "lost", delivery))
        elif self._interference.held(delivery.sender, delivery.receiver):
            self._leaves(now, delivery)
            self._held.append(delivery)
        else:
            self._carry(now, delivery)

    def next_time(self) -> float:
        """When there will be news if nothing else happens; infinite if never."""
        if self._updates:
            return self._updates[0][0]
        first = self._travelling[0][0] if self._travelling else math.inf
        return min(first, self._flows.next_time()) if self._flowing else first

    def advance(self, now: float) -> list[DeliveryUpdate]:
        """What has happened up to and including `now`, in order of time."""
        while self._flowing and (ends := self._flows.next_time()) <= now:
            for time, flow in self._flows.advance(ends):
                delivery = self._flowing.pop(flow)
                self._travel(time, delivery)
                self._next_in_line(time, delivery)
        while self._travelling and self._travelling[0][0] <= now:
            time, _, delivery = heapq.heappop(self._travelling)
            if not delivery.lost:
                self._updates.append((time, "delivered", delivery))
        news, self._updates = self._updates, []
        if len(news) > 1:
            news.sort(key=_time)
        return news

    def apply_event(self, now: float, event: EnvironmentEvent) -> None:
        """Something about the network changes."""
        self._updates = self.advance(now)  # what has ended by now did so under the old conditions
        if isinstance(event, NetworkChange):
            self._rewire(now, event.network_state)
        elif isinstance(event, AvailabilityChange):
            self._attend(now, event.node, event.online)
        elif event.kind == "slow":
            if event.what != "compute":
                for node in event.nodes:
                    self._factors[node] = event.value
                self._set_capacities(now, {link for node in event.nodes for link in self._wiring.access(node)})
        elif event.kind in ("crash", "restart"):
            for node in event.nodes:
                self._attend(now, node, event.kind == "restart")
        else:
            self._interference.apply(event)
            self._lose(now, lambda delivery: self._interference.cut(delivery.sender, delivery.receiver))
            self._release(now)

    def _reaches(self, delivery: Delivery) -> bool:
        away = self._away
        return not (
            away[delivery.sender]
            or away[delivery.receiver]
            or self._interference.cut(delivery.sender, delivery.receiver)
        )

    def _carry(self, now: float, delivery: Delivery) -> None:
        sender, receiver = delivery.sender, delivery.receiver
        if (line := self._lines.get((sender, receiver))) is not None:
            line.append(delivery)
            return
        route = delivery.route = self._wiring.route(sender, receiver)
        if route is None:
            self._updates.append((now, "lost", delivery))
            return
        kept = (1.0 - route.loss) * (1.0 - self._interference.drop(sender, receiver))
        delivery.lost = kept < 1.0 and self._rng.random() >= kept
        if route.links:
            self._flow(now, delivery, route, delivery.size)
        else:
            self._travel(now, delivery)

    def _flow(self, now: float, delivery: Delivery, route: Route, size: float) -> None:
        weight = 1.0 / max(2.0 * route.latency, SHORTEST_ROUND_TRIP)
        self._lines.setdefault((delivery.sender, delivery.receiver), deque())
        self._flowing[self._flows.start(now, route.links, weight, size)] = delivery

    def _next_in_line(self, now: float, delivery: Delivery) -> None:
        """After `delivery`, those that waited for it to have flowed."""
        line = self._lines.pop((delivery.sender, delivery.receiver))
        while line and (delivery.sender, delivery.receiver) not in self._lines:
            self._carry(now, line.popleft())
        if line:
            self._lines[delivery.sender, delivery.receiver] = line

    def _leaves(self, time: float, delivery: Delivery) -> None:
        if not delivery.sent:
            delivery.sent = True
            self._updates.append((time, "sent", delivery))

    def _travel(self, time: float, delivery: Delivery) -> None:
        """The last of a message has been sent; what is left is the latency."""
        self._leaves(time, delivery)
        if delivery.lost:
            self._updates.append((time, "lost", delivery))
            return
        route, pair = delivery.route, (delivery.sender, delivery.receiver)
        assert route is not None
        latency = route.latency
        if route.jitter:
            latency = max(0.0, latency + route.jitter * self._rng.standard_normal())
        delivery.arrival_time = self._latest[pair] = max(time + latency, self._latest.get(pair, 0.0))
        self._posted += 1
        heapq.heappush(self._travelling, (delivery.arrival_time, self._posted, delivery))
        self._updates.append((time, "in_transit", delivery))

    def _attend(self, now: float, node: NodeId, online: bool) -> None:
        """One that goes gets nothing more, also if it is back in a moment; of what it sent, only what has left is."""
        self._away[node] += -1 if online else 1
        if not online:
            self._lose(
                now, lambda delivery: delivery.receiver == node or (delivery.sender == node and not delivery.sent)
            )

    def _lose(self, now: float, lost: Callable[[Delivery], bool]) -> None:
        """Give up on what is under way and cannot get through."""
        losses = [delivery for _, _, delivery in self._travelling if not delivery.lost and lost(delivery)]
        for delivery in losses:
            delivery.lost = True
        stopped = [(flow, delivery) for flow, delivery in self._flowing.items() if lost(delivery)]
        for flow, delivery in stopped:
            self._flows.cancel(now, flow)
            del self._flowing[flow]
            losses.append(delivery)
        for waiting in (*self._lines.values(), self._held):
            losses += [delivery for delivery in waiting if lost(delivery)]
            kept = [delivery for delivery in waiting if not lost(delivery)]
            waiting.clear()
            waiting.extend(kept)
        self._updates.extend((now, "lost", delivery) for delivery in losses)
        for _, delivery in stopped:
            self._next_in_line(now, delivery)

    def _release(self, now: float) -> None:
        """What is no longer held goes on its way, in the order in which it was sent."""
        held, self._held = self._held, []
        for delivery in held:
            if self._interference.held(delivery.sender, delivery.receiver):
                self._held.append(delivery)
            else:
                self._carry(now, delivery)

    def _rewire(self, now: float, network_state: NetworkState) -> None:
        self._wiring = network_state
        for flow, delivery in list(self._flowing.items()):
            route, before = network_state.route(delivery.sender, delivery.receiver), delivery.route
            if route is not None and before is not None:
                delivery.route = route
                if route.links == before.links and route.latency == before.latency:
                    continue
            rest = self._flows.cancel(now, flow)
            del self._flowing[flow]
            if route is not None and route.links:
                self._flow(now, delivery, route, rest)
                continue
            if route is None:
                self._updates.append((now, "lost", delivery))
            else:
                self._travel(now, delivery)
            self._next_in_line(now, delivery)
        self._set_capacities(now, range(len(network_state.capacities)))

    def _capacities(self) -> NDArray[np.float64]:
        return capacities(self._wiring, self._connections, self._factors)

    def _set_capacities(self, now: float, links: Iterable[int]) -> None:
        capacities = self._capacities()
        for link in sorted(links):
            self._flows.set_capacity(now, link, float(capacities[link]))


def capacities(
    network_state: NetworkState, access_limits: Sequence[AccessLimit], factors: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """What the links carry, in bytes per second, with the nodes' own devices taken into account.

    factors[i] is how many times slower than usual node i's own links are just now.
    """
    carry = np.array(network_state.capacities, np.float64)
    own: dict[int, float] = {}
    for node, connection in enumerate(access_limits):
        slower = connection.slowdown * (1.0 if factors is None else factors[node])
        for link in network_state.access(node):
            carries = min(float(carry[link]), connection.bandwidth * MEGABIT) / slower
            own[link] = min(carries, own.get(link, math.inf))
    for link, carries in own.items():
        carry[link] = carries
    return carry


def _time(news: DeliveryUpdate) -> float:
    return news[0]
