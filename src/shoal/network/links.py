"""Networks whose nodes each have one link: a latency, and a bandwidth up and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from shoal.schema import Bounds
from shoal.topologies.graph import NodeId


class Delays(Protocol):
    """A network in use. Times are virtual seconds."""

    def arrival(self, now: float, sender: NodeId, receiver: NodeId, size: int) -> float:
        """When a message of `size` bytes, handed over at `now`, has arrived in full. Called in order of time."""
        ...


class Network(Protocol):
    """A recipe for a network; its parameters are those of its constructor."""

    def build(self, nodes: int) -> Delays | None:
        """None is a network that takes no time at all."""
        ...


@dataclass(frozen=True)
class Ideal:
    """Messages take no time."""

    def build(self, nodes: int) -> None:
        return None


@dataclass(frozen=True)
class Uniform:
    """Every node has the same link: `latency` in seconds one way, bandwidths in Mbit/s (0: unlimited)."""

    latency: Annotated[float, Bounds(at_least=0)] = 0.001
    upload: Annotated[float, Bounds(at_least=0)] = 0.0
    download: Annotated[float, Bounds(at_least=0)] = 0.0

    def build(self, nodes: int) -> Delays:
        return Queues(nodes, self.latency, self.upload, self.download)


class Queues:
    """First come, first served: a link carries one message at a time, in the order they were handed over."""

    def __init__(self, nodes: int, latency: float, upload: float, download: float) -> None:
        self._latency = latency
        self._up = _seconds_per_byte(upload)
        self._down = _seconds_per_byte(download)
        self._up_free = [0.0] * nodes
        self._down_free = [0.0] * nodes

    def arrival(self, now: float, sender: NodeId, receiver: NodeId, size: int) -> float:
        sent = self._up_free[sender] = max(now, self._up_free[sender]) + size * self._up
        arrived = sent + self._latency
        if self._down:
            # The first bytes come in while the last still leave: the slower of the two links sets the pace.
            first = sent - size * self._up + self._latency
            received = max(first, self._down_free[receiver]) + size * self._down
            arrived = self._down_free[receiver] = max(received, arrived)
        return arrived


def _seconds_per_byte(megabits_per_second: float) -> float:
    return 8e-6 / megabits_per_second if megabits_per_second else 0.0
