"""Server optimizers: plain averaging, momentum, and the adaptive methods of FedOpt.

The average of the clients' steps is a direction Δ, the negated pseudo-gradient. The server takes a step along it as an
optimizer does along −∇F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

import numpy as np

from shoal.types import Bounds, Params

Memory: TypeAlias = dict[str, Params]
"""The state of an optimizer: vectors by name, empty before the first step."""
Rate: TypeAlias = Annotated[float, Bounds(above=0)]
Decay: TypeAlias = Annotated[float, Bounds(at_least=0, below=1)]


class ServerOptimizer(Protocol):
    """A rule for the server's step. It has no state of its own: it keeps state in `memory`."""

    def step(self, params: Params, direction: Params, memory: Memory) -> Params:
        """Return the server's next model, a new vector."""
        ...


@dataclass(frozen=True)
class ServerSGD:
    """x ← x + lr·Δ: with lr = 1 the average of the clients' models, as in FedAvg (McMahan et al. 2017)."""

    lr: Rate = 1.0

    def step(self, params: Params, direction: Params, memory: Memory) -> Params:
        return params + self.lr * direction


@dataclass(frozen=True)
class Momentum:
    """v ← momentum·v + Δ, x ← x + lr·v: FedAvgM (Hsu et al. 2019)."""

    lr: Rate = 1.0
    momentum: Decay = 0.9

    def step(self, params: Params, direction: Params, memory: Memory) -> Params:
        memory["v"] = self.momentum * memory.get("v", np.zeros_like(direction)) + direction
        return params + self.lr * memory["v"]


@dataclass(frozen=True)
class Adam:
    """m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)Δ², x ← x + lr·m/(√v + τ): FedAdam (Reddi et al. 2021).

    As in the paper, the bias of the first steps is not corrected: v starts at τ². A large τ adapts little.
    """

    lr: Rate = 0.03
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Rate = 0.001

    def step(self, params: Params, direction: Params, memory: Memory) -> Params:
        square = direction * direction
        memory["m"] = self.beta1 * memory.get("m", np.zeros_like(direction)) + (1 - self.beta1) * direction
        memory["v"] = self.second_moment(memory.get("v", np.full_like(direction, self.tau**2)), square)
        return _adapted(params, self.lr, memory, self.tau)

    def second_moment(self, v: Params, square: Params) -> Params:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(Adam):
    """As adam, with v ← v − (1 − β₂)Δ²·sign(v − Δ²), which shrinks more slowly: FedYogi (Reddi et al. 2021)."""

    def second_moment(self, v: Params, square: Params) -> Params:
        sign: Params = np.sign(v - square)
        return v - (1 - self.beta2) * square * sign


@dataclass(frozen=True)
class Adagrad:
    """m ← β₁m + (1 − β₁)Δ, v ← v + Δ², x ← x + lr·m/(√v + τ): FedAdagrad (Reddi et al. 2021)."""

    lr: Rate = 0.1
    beta1: Decay = 0.0
    tau: Rate = 0.001

    def step(self, params: Params, direction: Params, memory: Memory) -> Params:
        memory["m"] = self.beta1 * memory.get("m", np.zeros_like(direction)) + (1 - self.beta1) * direction
        memory["v"] = memory.get("v", np.full_like(direction, self.tau**2)) + direction * direction
        return _adapted(params, self.lr, memory, self.tau)


def _adapted(params: Params, lr: float, memory: Memory, tau: float) -> Params:
    """Return x + lr·m/(√v + τ), with m and v from `memory`."""
    scale: Params = np.sqrt(memory["v"]) + np.float32(tau)
    step: Params = memory["m"] / scale
    return params + lr * step


SERVER_OPTIMIZERS: dict[str, str] = {
    "average": "shoal.algorithms.support.server_optimizers:ServerSGD",
    "momentum": "shoal.algorithms.support.server_optimizers:Momentum",
    "adam": "shoal.algorithms.support.server_optimizers:Adam",
    "yogi": "shoal.algorithms.support.server_optimizers:Yogi",
    "adagrad": "shoal.algorithms.support.server_optimizers:Adagrad",
}
