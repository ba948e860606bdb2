"""The contract between an experiment and a kind of trainer.

A `TrainerBackend` is a component of an experiment: `trainer = { name = "torch" }`. Once per process it creates a
`TrainerFactory` from the data of the run. The factory creates a `Trainer` for each node.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Protocol

from shoal.errors import ExperimentError
from shoal.training.inputs import TrainerInputs
from shoal.training.settings import Training
from shoal.training.trainer import Trainer
from shoal.types import NodeId, Params


class TrainerFactory(Protocol):
    """Creates trainers. State that differs between nodes lives in the trainers."""

    @property
    def initial(self) -> Params:
        """The initial model of every node; the same in every process."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors in the flat vector, in order."""
        ...

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> Trainer: ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return the scores of `params` on the common test samples."""
        ...

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Do once what every node would do otherwise, before nodes are forked from this process."""
        ...


class TrainerBackend(Protocol):
    """A component that creates a factory. The parameters of its constructor are its options."""

    def create_factory(self, inputs: TrainerInputs) -> TrainerFactory: ...


def reject_unused_settings(training: Training, used: Collection[str], trainer: str, advice: str) -> None:
    """Raise ExperimentError for every setting of `training` that differs from its default and is not in `used`."""
    problems = []
    for field in fields(Training):
        value = getattr(training, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name == "keep_state" and value is False:
            continue  # such a trainer has no optimizer state
        if field.name not in used and value != default:
            shown = getattr(value, "name", value)  # that of a component
            problems.append(f"training.{field.name} = {shown!r}: trainer {trainer!r} does not use it; {advice}")
    if problems:
        raise ExperimentError(problems)
