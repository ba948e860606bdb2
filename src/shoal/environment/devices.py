"""How fast nodes compute, and what their own connections carry.

A device is a recipe with one method: the speed of a node, of its own draw from the seed. So nodes keep their speeds
when others join or leave their group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from shoal.environment.fedscale import Clients, Order
from shoal.randomness import generator
from shoal.types import Bounds, NodeId

SIMULATED_STEP = 0.01
"""Virtual seconds of a training step where nobody says how many."""
TRAINING = 3.0
"""Training takes so many times what inference takes: the way back is twice the way there."""

DEVICES: dict[str, str] = {
    "constant": "shoal.environment.devices:Constant",
    "lognormal": "shoal.environment.devices:Lognormal",
    "fedscale": "shoal.environment.devices:FedScale",
}

Factor = Annotated[float, Bounds(above=0)]


@dataclass(frozen=True)
class Speed:
    """How fast one node is."""

    step_seconds: float | None = None
    """What a training step takes, with `slowdown`. None: as long as it takes the machine, times `slowdown`."""
    slowdown: float = 1.0
    bandwidth: float | None = None
    """Mbit/s of the node's own connection, up and down, before `network_slowdown`. None: as the network says."""
    network_slowdown: float = 1.0
    """What divides the bandwidth of the node's own links."""

    @property
    def simulated_step(self) -> float:
        """Virtual seconds of a training step."""
        return SIMULATED_STEP * self.slowdown if self.step_seconds is None else self.step_seconds


class Device(Protocol):
    """A recipe for the speeds of nodes; its parameters are those of its constructor.

    `slowdown` and `network_slowdown` are parameters that all of them have.
    """

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        """How fast `node` is when its batches have so many samples.

        Raises `DataError`, which names the file and the place in it, for a trace that cannot be used.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """All nodes alike: a training step takes `step_seconds`.

    When not given, it is 0.01 s in the simulation, and as long as it takes where nodes are processes. `slowdown`
    multiplies it either way; `network_slowdown` divides the bandwidth of a node's own links.
    """

    step_seconds: Annotated[float, Bounds(at_least=0)] | None = None
    slowdown: Factor = 1.0
    network_slowdown: Factor = 1.0

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        step = None if self.step_seconds is None else self.step_seconds * self.slowdown
        return Speed(step, self.slowdown, network_slowdown=self.network_slowdown)


@dataclass(frozen=True)
class Lognormal:
    """Nodes differ: a sample takes `sample_seconds` times a draw from lognormal(`mu`, `sigma`), one for each node.

    `mu` and `sigma` are of the logarithm: half of the nodes are faster than sample_seconds · e^mu, which is 13.6 ms as
    it stands, and one in six slower than e^sigma times that. A step takes what its batch takes.
    """

    sample_seconds: Annotated[float, Bounds(above=0)] = 0.005
    mu: Annotated[float, Bounds(at_least=-10, at_most=10)] = 1.0
    sigma: Annotated[float, Bounds(at_least=0, at_most=10)] = 0.6
    slowdown: Factor = 1.0
    network_slowdown: Factor = 1.0

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        factor = math.exp(self.mu + self.sigma * generator(seed, "device", node).standard_normal())
        step = batch_size * self.sample_seconds * factor * self.slowdown
        return Speed(step, self.slowdown, network_slowdown=self.network_slowdown)


@dataclass(frozen=True)
class FedScale:
    """Measured phones: each node has the speed and the bandwidth of a client in a FedScale capacity file.

    `path`: a pickle or JSON, client id → { computation: ms of inference per sample, communication: kbit/s }. A step
    takes 3 · batch size · computation; the bandwidth holds up and down. `order`: "drawn" from the seed, or as in the
    "file"; no client is taken again before all were.
    """

    path: Path
    order: Order = "drawn"
    slowdown: Factor = 1.0
    network_slowdown: Factor = 1.0

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        client = self._clients.of(node, seed, self.order)
        step = TRAINING * batch_size * client.above_zero("computation") / 1000 * self.slowdown
        return Speed(step, self.slowdown, client.above_zero("communication") / 1000, self.network_slowdown)

    @functools.cached_property
    def _clients(self) -> Clients:
        return Clients(self.path)
