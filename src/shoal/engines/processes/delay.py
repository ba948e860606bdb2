"""What the kernel does not do to messages where it shapes them: latency, jitter and loss, at the receiver's end."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from shoal.engines.rejoining import REJOIN_KINDS
from shoal.environment.network.network import NetworkState
from shoal.message import Message
from shoal.randomness import generator
from shoal.types import NodeId


class Delay:
    """Keeps what has come for as long as its route takes beside its links, and drops what gets lost on the way.

    Messages of one sender do not overtake each other.
    """

    def __init__(self, network_state: NetworkState, id: NodeId, seed: int, deliver: Callable[[Message], None]) -> None:
        self._wiring = network_state
        self._id = id
        self._deliver = deliver
        self._rng = generator(seed, "network", id)
        self._loop = asyncio.get_running_loop()
        self._latest: dict[NodeId, float] = {}
        """When the last message of each sender is due."""
        self._waiting: list[tuple[float, int, Message]] = []
        """Messages that are here and not yet due: a heap."""
        self._taken = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, message: Message) -> None:
        """A message has come over the machine."""
        sender = message.sender
        route = self._wiring.route(sender, self._id)
        if route is None or (route.loss and self._rng.random() < route.loss):
            return
        latency = route.latency
        if route.jitter:
            latency = max(0.0, latency + route.jitter * self._rng.standard_normal())
        due = self._latest[sender] = max(self._loop.time() + latency, self._latest.get(sender, 0.0))
        self._taken += 1
        heapq.heappush(self._waiting, (due, self._taken, message))
        self._hand_over()

    def mark_failed(self, node: NodeId) -> None:
        """`node` has died: what it sent arrives, but nobody counts on it because it asked for that before."""
        self._waiting = [w for w in self._waiting if w[2].sender != node or w[2].kind not in REJOIN_KINDS]
        heapq.heapify(self._waiting)

    def _hand_over(self) -> None:
        """Deliver what is due, and see to the rest in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            self._deliver(heapq.heappop(self._waiting)[2])
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._hand_over)
