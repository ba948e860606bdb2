"""Devices: how fast nodes compute, and the bandwidth of their own links.

A device has one method, `speed`. It draws its random numbers for each node separately, so a node keeps its speed when
its group changes.
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
"""Virtual seconds of a training step by default."""
TRAINING_PER_INFERENCE = 3.0
"""Training takes this many times as long as inference: the backward pass takes twice as long as the forward pass."""

DEVICES: dict[str, str] = {
    "constant": "shoal.environment.devices:Constant",
    "lognormal": "shoal.environment.devices:Lognormal",
    "fedscale": "shoal.environment.devices:FedScaleDevices",
}

Factor = Annotated[float, Bounds(above=0)]


@dataclass(frozen=True)
class Speed:
    """The speed of one node."""

    step_seconds: float | None = None
    """The seconds of a training step, including `slowdown`. None: the time that the machine needs, times `slowdown`."""
    slowdown: float = 1.0
    bandwidth: float | None = None
    """Mbit/s of the node's own links, up and down, before `network_slowdown`. None: the network decides."""
    network_slowdown: float = 1.0
    """The bandwidth of the node's own links is divided by this."""

    @property
    def simulated_step(self) -> float:
        """Virtual seconds of a training step."""
        return SIMULATED_STEP * self.slowdown if self.step_seconds is None else self.step_seconds


class Device(Protocol):
    """The settings of devices; its parameters are those of its constructor.

    All devices of Shoal have the parameters `slowdown` and `network_slowdown`.
    """

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        """The speed of `node` with batches of this size.

        Raises `DataError`, with the file and the place in it, if a trace cannot be used.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """The same speed for all nodes: a training step takes `step_seconds`.

    Default: 0.01 s in the simulation, and the time that the machine needs with processes. `slowdown` multiplies
    either; `network_slowdown` divides the bandwidth of a node's own links.
    """

    step_seconds: Annotated[float, Bounds(at_least=0)] | None = None
    slowdown: Factor = 1.0
    network_slowdown: Factor = 1.0

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        step = None if self.step_seconds is None else self.step_seconds * self.slowdown
        return Speed(step, self.slowdown, network_slowdown=self.network_slowdown)


@dataclass(frozen=True)
class Lognormal:
    """Random speeds: a sample takes `sample_seconds` times a factor from lognormal(`mu`, `sigma`), one for each node.

    `mu` and `sigma` apply to the logarithm: half of the nodes are faster than sample_seconds · e^mu, by default
    13.6 ms, and one in six is slower than e^sigma times that. A step takes the time of all samples in its batch.
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
class FedScaleDevices:
    """Measured phones: each node has the speed and the bandwidth of a client in a FedScale capacity file.

    `path`: a pickle or JSON, client id → { computation: ms of inference per sample, communication: kbit/s }. A step
    takes 3 · batch size · computation; the bandwidth applies up and down. `order`: "drawn" at random, or as in the
    "file"; no client is used twice before all were used.
    """

    path: Path
    order: Order = "drawn"
    slowdown: Factor = 1.0
    network_slowdown: Factor = 1.0

    def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed:
        client = self._clients.of(node, seed, self.order)
        step = TRAINING_PER_INFERENCE * batch_size * client.above_zero("computation") / 1000 * self.slowdown
        return Speed(step, self.slowdown, client.above_zero("communication") / 1000, self.network_slowdown)

    @functools.cached_property
    def _clients(self) -> Clients:
        return Clients(self.path)
