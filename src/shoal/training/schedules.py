"""Schedules of the learning rate: components with one pure method.

    training = { lr = 0.1, schedule = { name = "cosine", length = 200, warmup = 10 } }

The learning rate at time t is `training.lr` · `scale(t)`. With `by` = "rounds", t is the round of the node's algorithm;
a node that restarts, joins late or misses rounds has the rate of the others. With `by` = "steps", t is the number of
local steps that the node has taken. Both begin at 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

from shoal.training.settings import Training
from shoal.types import Bounds

Unit: TypeAlias = Literal["rounds", "steps"]

SCHEDULES: dict[str, str] = {
    "constant": "shoal.training.schedules:Constant",
    "step": "shoal.training.schedules:Step",
    "multi-step": "shoal.training.schedules:MultiStep",
    "cosine": "shoal.training.schedules:Cosine",
    "linear": "shoal.training.schedules:Linear",
}


class Schedule(Protocol):
    """The contract of a schedule. A class without `by` counts rounds."""

    def scale(self, t: int) -> float:
        """Return the factor of the base learning rate at time `t`."""
        ...


@dataclass(frozen=True)
class WarmUp(ABC):
    """A schedule that begins with a linear increase: (t + 1) / `warmup` of the base rate for t < `warmup`."""

    warmup: Annotated[int, Bounds(at_least=0)] = 0
    by: Unit = "rounds"

    def scale(self, t: int) -> float:
        return (t + 1) / self.warmup if t < self.warmup else self.decay(t)

    @abstractmethod
    def decay(self, t: int) -> float:
        """Return the factor at time `t`, which is at least `warmup`."""


@dataclass(frozen=True)
class Constant(WarmUp):
    """The base rate, after the warm-up."""

    def decay(self, t: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Step(WarmUp):
    """The rate is multiplied by `factor` at t = `every`, 2 · `every`, …; the warm-up counts as part of t."""

    every: Annotated[int, Bounds(at_least=1)]
    factor: Annotated[float, Bounds(above=0)] = 0.1

    def decay(self, t: int) -> float:
        return self.factor ** (t // self.every)


@dataclass(frozen=True, kw_only=True)
class MultiStep(WarmUp):
    """The rate is multiplied by `factor` at each t in `at`; the warm-up counts as part of t."""

    at: tuple[Annotated[int, Bounds(at_least=1)], ...]
    factor: Annotated[float, Bounds(above=0)] = 0.1

    def decay(self, t: int) -> float:
        return self.factor ** sum(t >= milestone for milestone in self.at)


@dataclass(frozen=True, kw_only=True)
class _Falling(WarmUp):
    """A schedule that falls from 1 after the warm-up to `minimum` at t = `length`, and stays there."""

    length: Annotated[int, Bounds(at_least=1)]
    minimum: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.0

    def __post_init__(self) -> None:
        if self.warmup >= self.length:
            raise ValueError(f"warmup = {self.warmup}: expected less than length = {self.length}")

    def decay(self, t: int) -> float:
        passed = min(1.0, (t - self.warmup) / (self.length - self.warmup))
        return self.minimum + (1.0 - self.minimum) * self.remaining(passed)

    @abstractmethod
    def remaining(self, passed: float) -> float:
        """Return the part of the way from 1 to the minimum that is left, after the part `passed` of the time."""


@dataclass(frozen=True, kw_only=True)
class Cosine(_Falling):
    """Half a cosine from the base rate after the warm-up to `minimum` of it at t = `length` (Loshchilov 2017)."""

    def remaining(self, passed: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * passed))


@dataclass(frozen=True, kw_only=True)
class Linear(_Falling):
    """A straight line from the base rate after the warm-up to `minimum` of it at t = `length`."""

    def remaining(self, passed: float) -> float:
        return 1.0 - passed


class LearningRate:
    """The learning rate of a node with these settings."""

    def __init__(self, training: Training) -> None:
        self._base = training.step_size
        schedule = training.schedule
        self._schedule: Schedule | None = schedule.build() if hasattr(schedule, "build") else schedule
        self._by_steps = getattr(self._schedule, "by", "rounds") == "steps"

    @property
    def changes(self) -> bool:
        return self._schedule is not None

    def at(self, round: int, step: int) -> float:
        """Return the rate of a step in `round`, after `step` local steps."""
        if self._schedule is None:
            return self._base
        return self._base * self._schedule.scale(step if self._by_steps else round)

    def of_steps(self, round: int, step: int, count: int) -> list[float]:
        """Return the rates of the next `count` steps."""
        if not self._by_steps:
            return [self.at(round, step)] * count
        return [self.at(round, step + i) for i in range(count)]
