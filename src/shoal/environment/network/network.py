"""What a network is made of: links with a bandwidth, and the routes that messages take over them.

One description serves both engines. `model.py` carries messages over it, in virtual or in real time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.types import NodeId

MEGABIT = 125_000.0
"""Bytes in a megabit: bandwidths are written in Mbit/s, and kept in bytes per second."""


def capacity(megabits: ArrayLike) -> NDArray[np.float64]:
    """Bytes in a second, of bandwidths in Mbit/s; where they are 0, nothing limits them."""
    given = np.asarray(megabits, np.float64)
    return np.where(given > 0, given * MEGABIT, np.inf)


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a message from one node to another."""

    links: tuple[int, ...] = ()
    """The numbers of the links that it shares with others."""
    latency: float = 0.0
    """Seconds, one way."""
    jitter: float = 0.0
    """The standard deviation of the latency, in seconds."""
    loss: float = 0.0
    """The probability that a message is lost."""


class NetworkState(Protocol):
    """A network as it stands, until something about it changes."""

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Of each link: how many bytes it carries in a second. Infinite where nothing limits it."""
        ...

    def route(self, sender: NodeId, receiver: NodeId) -> Route | None:
        """None where there is no way. A node reaches itself at once, over no link.

        Asked often: the same two nodes get the same object.
        """
        ...

    def access(self, node: NodeId) -> tuple[int, ...]:
        """The links that are the node's own: those that carry less when its connection is slow."""
        ...


HERE = Route()
"""From a node to itself."""


@dataclass(frozen=True)
class AvailabilityChange:
    """A node that joins the network, or leaves it, by the network's own schedule.

    All are there at first; one that joins later leaves at time 0.
    """

    time: float
    node: NodeId
    online: bool


@dataclass(frozen=True)
class NetworkChange:
    """From a time on, the network is wired like this."""

    time: float
    network_state: NetworkState


@dataclass(frozen=True)
class NetworkTimeline:
    """A network on a number of nodes, for the whole of a run."""

    states: Sequence[tuple[float, NetworkState]]
    """From which time on, in seconds, the network is wired how: the first from 0 on, the others in order. Links have
    the same numbers in all of them."""
    availability_changes: Sequence[AvailabilityChange] = ()
    """In order of time."""

    @property
    def initial_state(self) -> NetworkState:
        """The network at the start of the run."""
        return self.states[0][1]


class Network(Protocol):
    """A recipe for a network; its parameters are those of its constructor."""

    def build(self, nodes: int, seed: int) -> NetworkTimeline | None:
        """The network on nodes 0 to nodes − 1, those that serve among them. None: messages take no time at all.

        Raises ValueError, which names the parameter or the file and the place in it, for what cannot be built.
        """
        ...


class Direct:
    """Every node next to every other: no link limits anything, and nothing takes time."""

    capacities: NDArray[np.float64] = np.empty(0)
    _route = Route()

    def route(self, sender: NodeId, receiver: NodeId) -> Route:
        return self._route

    def access(self, node: NodeId) -> tuple[int, ...]:
        return ()
