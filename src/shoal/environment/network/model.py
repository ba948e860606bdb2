"""The network model: it computes when messages are sent, delivered or lost.

Callers pass the time; the model never reads a clock. So the same code serves the simulation, in virtual time, and
processes, in real time.
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
"""Seconds. The weight of a flow is one over its round-trip time, which counts as at least this long."""

DeliveryStatus: TypeAlias = Literal["sent", "in_transit", "delivered", "lost"]
"""The states of a message in the network.

- sent: the sender has sent the last byte.
- in_transit: the arrival time is known (`Delivery.arrival_time`); an event may still cause a loss.
- delivered: the receiver has the message.
- lost: the message will never be delivered. If it was not sent before, it never left its sender.
"""


class Delivery:
    """A message in the network. The network does not read `content`."""

    __slots__ = ("arrival_time", "content", "receiver", "route", "sender", "sent", "size", "will_be_lost")

    def __init__(self, sender: NodeId, receiver: NodeId, size: int, content: Any = None) -> None:
        self.sender = sender
        self.receiver = receiver
        self.size = size
        self.content = content
        self.sent = False
        """Whether the sender has sent the last byte."""
        self.will_be_lost = False
        """Whether the network loses the message, now or later."""
        self.route: Route | None = None
        self.arrival_time = math.inf
        """Infinite until it is known."""


DeliveryUpdate: TypeAlias = tuple[float, DeliveryStatus, Delivery]
EnvironmentEvent: TypeAlias = NetworkChange | AvailabilityChange | FaultEvent
"""A change of the environment."""


@dataclass(frozen=True)
class AccessLimit:
    """The limits that a node's device sets to the node's own links."""

    bandwidth: float = math.inf
    """Mbit/s, for each link."""
    slowdown: float = 1.0
    """The capacity of each link is divided by this."""


class NetworkModel:
    """The messages of a network. Calls come in order of time; `advance` returns the updates since the last call.

    Messages from one node to another are sent one after another, as over one connection, and do not overtake each
    other. Messages between different pairs of nodes share the links that their routes have in common.
    """

    def __init__(
        self, network_state: NetworkState, size: int, seed: int, access_limits: Sequence[AccessLimit] = ()
    ) -> None:
        # Imported here: the compiled code takes a moment to load, and runs without a network model do not need it.
        from shoal.environment.network.flows import Flows

        self._network_state = network_state
        self._access_limits = list(access_limits) or [AccessLimit()] * size
        self._factors = [1.0] * size
        """The current slowdown of each node's own links by faults."""
        self._flows = Flows(self._capacities())
        self._flowing: dict[int, Delivery] = {}
        self._queues: dict[tuple[NodeId, NodeId], deque[Delivery]] = {}
        """For each pair of nodes with a message in a flow: the messages that wait for its end."""
        self._in_transit: list[tuple[float, int, Delivery]] = []
        """A heap of sent messages by their arrival times."""
        self._transits = 0
        self._latest: dict[tuple[NodeId, NodeId], float] = {}
        """When the last message of each pair of nodes arrives: later messages do not overtake it."""
        self._held: list[Delivery] = []
        self._updates: list[DeliveryUpdate] = []
        self._pair_faults = PairFaults(size)
        self._offline = [0] * size
        """The number of reasons why each node is offline."""
        self._rng = generator(seed, "network")

    @property
    def idle(self) -> bool:
        """Whether no message will be delivered without another call."""
        return self.next_time() == math.inf

    @staticmethod
    def load() -> None:
        """Load the compiled code ahead of the first message, which would be late in real time otherwise."""
        from shoal.environment.network.flows import load

        load()

    def send(self, now: float, delivery: Delivery) -> None:
        """Send a message."""
        if not self._can_reach(delivery):
            self._updates.append((now, "lost", delivery))
        elif self._pair_faults.held(delivery.sender, delivery.receiver):
            self._mark_sent(now, delivery)
            self._held.append(delivery)
        else:
            self._start_sending(now, delivery)

    def next_time(self) -> float:
        """The time of the next update if nothing else changes; infinite if there is none."""
        if self._updates:
            return self._updates[0][0]
        first = self._in_transit[0][0] if self._in_transit else math.inf
        return min(first, self._flows.next_time()) if self._flowing else first

    def advance(self, now: float) -> list[DeliveryUpdate]:
        """The updates up to and including `now`, in order of time."""
        while self._flowing and (ends := self._flows.next_time()) <= now:
            for time, flow in self._flows.advance(ends):
                delivery = self._flowing.pop(flow)
                self._finish_sending(time, delivery)
                self._send_queued(time, delivery)
        while self._in_transit and self._in_transit[0][0] <= now:
            time, _, delivery = heapq.heappop(self._in_transit)
            if not delivery.will_be_lost:
                self._updates.append((time, "delivered", delivery))
        updates, self._updates = self._updates, []
        if len(updates) > 1:
            updates.sort(key=_time)
        return updates

    def apply_event(self, now: float, event: EnvironmentEvent) -> None:
        """Apply a change of the environment."""
        # Flows that end at or before `now` are completed before the event is applied.
        self._updates = self.advance(now)
        if isinstance(event, NetworkChange):
            self._change_network(now, event.network_state)
        elif isinstance(event, AvailabilityChange):
            self._set_online(now, event.node, event.online)
        elif event.kind == "slow":
            if event.what != "compute":
                for node in event.nodes:
                    self._factors[node] = event.value
                self._set_capacities(now, {link for node in event.nodes for link in self._network_state.access(node)})
        elif event.kind in ("crash", "restart"):
            for node in event.nodes:
                self._set_online(now, node, event.kind == "restart")
        else:
            self._pair_faults.apply(event)
            self._lose(now, lambda delivery: self._pair_faults.cut(delivery.sender, delivery.receiver))
            self._release(now)

    def _can_reach(self, delivery: Delivery) -> bool:
        offline = self._offline
        return not (
            offline[delivery.sender]
            or offline[delivery.receiver]
            or self._pair_faults.cut(delivery.sender, delivery.receiver)
        )

    def _start_sending(self, now: float, delivery: Delivery) -> None:
        sender, receiver = delivery.sender, delivery.receiver
        if (queue := self._queues.get((sender, receiver))) is not None:
            queue.append(delivery)
            return
        route = delivery.route = self._network_state.route(sender, receiver)
        if route is None:
            self._updates.append((now, "lost", delivery))
            return
        kept = (1.0 - route.loss) * (1.0 - self._pair_faults.drop(sender, receiver))
        delivery.will_be_lost = kept < 1.0 and self._rng.random() >= kept
        if route.links:
            self._start_flow(now, delivery, route, delivery.size)
        else:
            self._finish_sending(now, delivery)

    def _start_flow(self, now: float, delivery: Delivery, route: Route, size: float) -> None:
        weight = 1.0 / max(2.0 * route.latency, SHORTEST_ROUND_TRIP)
        self._queues.setdefault((delivery.sender, delivery.receiver), deque())
        self._flowing[self._flows.start(now, route.links, weight, size)] = delivery

    def _send_queued(self, now: float, delivery: Delivery) -> None:
        """Send the messages that waited for the flow of `delivery` to end."""
        queue = self._queues.pop((delivery.sender, delivery.receiver))
        while queue and (delivery.sender, delivery.receiver) not in self._queues:
            self._start_sending(now, queue.popleft())
        if queue:
            self._queues[delivery.sender, delivery.receiver] = queue

    def _mark_sent(self, time: float, delivery: Delivery) -> None:
        if not delivery.sent:
            delivery.sent = True
            self._updates.append((time, "sent", delivery))

    def _finish_sending(self, time: float, delivery: Delivery) -> None:
        """The last byte is sent; the message arrives after the latency."""
        self._mark_sent(time, delivery)
        if delivery.will_be_lost:
            self._updates.append((time, "lost", delivery))
            return
        route, pair = delivery.route, (delivery.sender, delivery.receiver)
        assert route is not None
        latency = route.latency
        if route.jitter:
            latency = max(0.0, latency + route.jitter * self._rng.standard_normal())
        delivery.arrival_time = self._latest[pair] = max(time + latency, self._latest.get(pair, 0.0))
        self._transits += 1
        heapq.heappush(self._in_transit, (delivery.arrival_time, self._transits, delivery))
        self._updates.append((time, "in_transit", delivery))

    def _set_online(self, now: float, node: NodeId, online: bool) -> None:
        """Change whether a node is online.

        When it goes offline, two kinds of messages are lost: all messages to it, and messages that it has not sent
        completely.
        """
        self._offline[node] += -1 if online else 1
        if not online:
            self._lose(
                now, lambda delivery: delivery.receiver == node or (delivery.sender == node and not delivery.sent)
            )

    def _lose(self, now: float, lost: Callable[[Delivery], bool]) -> None:
        """Lose the messages in the network that cannot be delivered any more."""
        losses = [delivery for _, _, delivery in self._in_transit if not delivery.will_be_lost and lost(delivery)]
        for delivery in losses:
            delivery.will_be_lost = True
        stopped = [(flow, delivery) for flow, delivery in self._flowing.items() if lost(delivery)]
        for flow, delivery in stopped:
            self._flows.cancel(now, flow)
            del self._flowing[flow]
            losses.append(delivery)
        for waiting in (*self._queues.values(), self._held):
            losses += [delivery for delivery in waiting if lost(delivery)]
            kept = [delivery for delivery in waiting if not lost(delivery)]
            waiting.clear()
            waiting.extend(kept)
        self._updates.extend((now, "lost", delivery) for delivery in losses)
        for _, delivery in stopped:
            self._send_queued(now, delivery)

    def _release(self, now: float) -> None:
        """Send the messages that are no longer held, in their order."""
        held, self._held = self._held, []
        for delivery in held:
            if self._pair_faults.held(delivery.sender, delivery.receiver):
                self._held.append(delivery)
            else:
                self._start_sending(now, delivery)

    def _change_network(self, now: float, network_state: NetworkState) -> None:
        self._network_state = network_state
        for flow, delivery in list(self._flowing.items()):
            route, before = network_state.route(delivery.sender, delivery.receiver), delivery.route
            if route is not None and before is not None:
                delivery.route = route
                if route.links == before.links and route.latency == before.latency:
                    continue
            rest = self._flows.cancel(now, flow)
            del self._flowing[flow]
            if route is not None and route.links:
                self._start_flow(now, delivery, route, rest)
                continue
            if route is None:
                self._updates.append((now, "lost", delivery))
            else:
                self._finish_sending(now, delivery)
            self._send_queued(now, delivery)
        self._set_capacities(now, range(len(network_state.capacities)))

    def _capacities(self) -> NDArray[np.float64]:
        return link_capacities(self._network_state, self._access_limits, self._factors)

    def _set_capacities(self, now: float, links: Iterable[int]) -> None:
        capacities = self._capacities()
        for link in sorted(links):
            self._flows.set_capacity(now, link, float(capacities[link]))


def link_capacities(
    network_state: NetworkState, access_limits: Sequence[AccessLimit], factors: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """The capacities of all links in bytes per second, within the limits of the nodes' devices.

    `factors[i]` is the current slowdown of node i's own links by faults.
    """
    capacities = np.array(network_state.capacities, np.float64)
    own: dict[int, float] = {}
    for node, limit in enumerate(access_limits):
        divisor = limit.slowdown * (1.0 if factors is None else factors[node])
        for link in network_state.access(node):
            capacity = min(float(capacities[link]), limit.bandwidth * MEGABIT) / divisor
            own[link] = min(capacity, own.get(link, math.inf))
    for link, capacity in own.items():
        capacities[link] = capacity
    return capacities


def _time(update: DeliveryUpdate) -> float:
    return update[0]
