"""The description of a network: links with a bandwidth, and the routes of messages over them.

Both engines use the same description. `model.py` computes deliveries from it, in virtual or in real time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.types import NodeId

MEGABIT = 125_000.0
"""Bytes per megabit: experiments give bandwidths in Mbit/s, the code uses bytes per second."""


def capacity(megabits: ArrayLike) -> NDArray[np.float64]:
    """Convert bandwidths in Mbit/s to bytes per second; 0 means unlimited."""
    given = np.asarray(megabits, np.float64)
    return np.where(given > 0, given * MEGABIT, np.inf)


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a message from one node to another."""

    links: tuple[int, ...] = ()
    """The numbers of the links on it."""
    latency: float = 0.0
    """Seconds, one way."""
    jitter: float = 0.0
    """The standard deviation of the latency, in seconds."""
    loss: float = 0.0
    """The probability that a message is lost."""


class NetworkState(Protocol):
    """A network until its next change."""

    @property
    def capacities(self) -> NDArray[np.float64]:
        """The bytes per second of each link; infinite if unlimited."""
        ...

    def route(self, sender: NodeId, receiver: NodeId) -> Route | None:
        """The route between two nodes; None if there is none. A node reaches itself at once, over no link.

        Called often: it returns the same object for the same nodes.
        """
        ...

    def access(self, node: NodeId) -> tuple[int, ...]:
        """The node's own links, whose capacity its device limits."""
        ...


LOOPBACK = Route()
"""From a node to itself."""


@dataclass(frozen=True)
class AvailabilityChange:
    """A node goes online or offline.

    All nodes are online at first. A node that joins later goes offline at time 0.
    """

    time: float
    node: NodeId
    online: bool


@dataclass(frozen=True)
class NetworkChange:
    """The network has a new state from a time on."""

    time: float
    network_state: NetworkState


@dataclass(frozen=True)
class NetworkTimeline:
    """A network for the whole of a run."""

    states: Sequence[tuple[float, NetworkState]]
    """The states of the network, each with its start in seconds: the first starts at 0, the others follow in order. A
    link has the same number in all states."""
    availability_changes: Sequence[AvailabilityChange] = ()
    """In order of time."""

    @property
    def initial_state(self) -> NetworkState:
        """The network at the start of the run."""
        return self.states[0][1]


class Network(Protocol):
    """The settings of a network; its parameters are those of its constructor."""

    def build(self, nodes: int, seed: int) -> NetworkTimeline | None:
        """Build the network for nodes 0 to nodes − 1, servers included. None: messages take no time.

        Raises ValueError, with the parameter, or the file and the line, if the network cannot be built.
        """
        ...


class Direct:
    """A network without limits: messages take no time."""

    capacities: NDArray[np.float64] = np.empty(0)
    _route = Route()

    def route(self, sender: NodeId, receiver: NodeId) -> Route:
        return self._route

    def access(self, node: NodeId) -> tuple[int, ...]:
        return ()
