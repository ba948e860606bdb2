"""Latency, jitter and loss at the receiver: what the kernel does not simulate where it shapes messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.engines.processes.timed_queue import TimedQueue
from shoal.engines.rejoining import REJOIN_KINDS
from shoal.environment.network.network import NetworkState
from shoal.message import Message
from shoal.randomness import generator
from shoal.types import NodeId


class Delay:
    """Delivers every message after the latency of its route, and drops the messages that the route loses.

    Messages of one sender do not overtake each other.
    """

    def __init__(self, network_state: NetworkState, id: NodeId, seed: int, deliver: Callable[[Message], None]) -> None:
        self._network_state = network_state
        self._id = id
        self._rng = generator(seed, "network", id)
        self._loop = asyncio.get_running_loop()
        self._last_due: dict[NodeId, float] = {}
        """When the last message of each sender is due."""
        self._queue = TimedQueue(deliver)

    def receive(self, message: Message) -> None:
        """Take a message that has arrived over TCP."""
        sender = message.sender
        route = self._network_state.route(sender, self._id)
        if route is None or (route.loss and self._rng.random() < route.loss):
            return
        latency = route.latency
        if route.jitter:
            latency = max(0.0, latency + route.jitter * self._rng.standard_normal())
        due = self._last_due[sender] = max(self._loop.time() + latency, self._last_due.get(sender, 0.0))
        self._queue.put(due, message)

    def mark_failed(self, node: NodeId) -> None:
        """Drop the failed node's messages about rejoining: they were sent before it failed. All others arrive."""
        self._queue.remove(lambda message: message.sender == node and message.kind in REJOIN_KINDS)
