"""The contract of a trainer, and the two works that a node gives its runtime: training and evaluation.

A `Trainer` trains and evaluates for one node. A `BatchableTrainer` can also compute for many nodes in one call, for
example with their parameters stacked in a matrix. The simulation uses that to save time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from shoal.data.dataset import LocalData
from shoal.errors import NodeError
from shoal.training.overrides import knows_overrides
from shoal.types import Params


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The outcome of local training: the new parameters and the mean loss of the batches."""

    params: Params
    loss: float
    steps_left_out: int = 0
    """Steps that did not change the parameters, because their gradients overflowed (`training.precision`)."""
    not_batched: str = ""
    """Why `train_batch` has trained this node alone; empty if it has not."""


class Trainer(Protocol):
    """Training and evaluation of one node.

    A trainer does not keep the parameters; it keeps the node's batches and optimizer state.
    """

    step_seconds: float
    """Virtual time that the node's device needs for one step."""
    cpu_seconds: float
    """Processor time spent in `train` so far."""

    @property
    def samples(self) -> int:
        """The number of samples that the node holds."""
        ...

    def steps(self, steps: int | None) -> int:
        """Return how many steps `train(params, steps)` takes."""
        ...

    def train(self, params: Params, steps: int | None = None) -> Trained:
        """Train from `params` and return new parameters. None takes the steps that the experiment sets."""
        ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return the scores of `params` on the node's test samples, by name."""
        ...


@runtime_checkable
class DataHolder(Protocol):
    """A trainer that gives access to the samples of its node."""

    @property
    def data(self) -> LocalData: ...


@runtime_checkable
class ScheduledTrainer(Protocol):
    """A trainer whose learning rate depends on the round, or on the number of local steps so far."""

    def set_progress(self, round: int, step: int) -> None:
        """Set the node's round and the number of its local steps so far.

        Called before each training and each evaluation.
        """
        ...

    def learning_rate(self, round: int, step: int) -> float:
        """Return the learning rate of a step in `round`, after `step` local steps."""
        ...


@runtime_checkable
class BatchableTrainer(Protocol):
    """A trainer that can compute for many nodes in one call.

    The trainers in one call are of one class and have equal keys. Results must equal those of `train` and `evaluate`
    within float tolerance.

    A class that inherits `train_batch` and defines anything that may change training, such as another `train` or
    `draw`, is trained one by one, because `train_batch` does not know of it; the same holds for `evaluate_batch`.
    """

    def train_key(self, steps: int | None) -> Hashable | None:
        """Return a key that trainers must share to be in one call of `train_batch`; None to be trained alone."""
        ...

    def evaluate_key(self) -> Hashable | None:
        """Return a key that trainers must share to be in one call of `evaluate_batch`; None to be evaluated alone."""
        ...

    @staticmethod
    def train_batch(trainers: Sequence[Any], params: Sequence[Params], steps: int | None = None) -> list[Trained]:
        """Return the result of `train` for every trainer. It has to add to each one's `cpu_seconds`."""
        ...

    @staticmethod
    def evaluate_batch(trainers: Sequence[Any], params: Sequence[Params]) -> list[dict[str, float]]:
        """Return the result of `evaluate` for every trainer.

        Raises `NotStackableError` if each of them must be evaluated alone, which the caller does then.
        """
        ...


UNRELATED_TO_TRAINING = frozenset(["train_key", "evaluate", "evaluate_key", "evaluate_batch"])
UNRELATED_TO_EVALUATION = frozenset(["evaluate_key", "train", "train_key", "train_batch"])
"""Methods that a class may define although it inherits `train_batch`, or `evaluate_batch`."""


class Train(msgspec.Struct, frozen=True, gc=False):
    """The work of local training of one node."""

    trainer: Trainer
    params: Params
    steps: int | None = None
    round: int = 0
    """The node's round."""
    step: int = 0
    """The number of the node's local steps so far."""

    @property
    def seconds(self) -> float:
        return self.trainer.steps(self.steps) * self.trainer.step_seconds

    @property
    def batch_key(self) -> Hashable:
        trainer = _prepared(self)
        key = None
        if _is_batchable(type(trainer)) and knows_overrides(trainer, "train_batch", UNRELATED_TO_TRAINING):
            key = cast(BatchableTrainer, trainer).train_key(self.steps)
        return object() if key is None else (Train, type(trainer), key)

    def run(self) -> Trained:
        return _prepared(self).train(self.params, self.steps)

    @staticmethod
    def run_batch(works: Sequence[Train]) -> list[Trained]:
        trainers = [_prepared(work) for work in works]
        return _batchable(trainers[0]).train_batch(trainers, [w.params for w in works], works[0].steps)


class Evaluate(msgspec.Struct, frozen=True, gc=False):
    """The work of evaluating one node. It takes no virtual time, because it is not part of the algorithm."""

    trainer: Trainer
    params: Params
    round: int = 0
    step: int = 0
    """The node's round and the number of its local steps so far, for fine-tuning before the evaluation."""

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def batch_key(self) -> Hashable:
        trainer = self.trainer
        key = None
        if _is_batchable(type(trainer)) and knows_overrides(trainer, "evaluate_batch", UNRELATED_TO_EVALUATION):
            key = cast(BatchableTrainer, trainer).evaluate_key()
        return object() if key is None else (Evaluate, type(trainer), key)

    def run(self) -> dict[str, float]:
        return _prepared(self).evaluate(self.params)

    @staticmethod
    def run_batch(works: Sequence[Evaluate]) -> list[dict[str, float]]:
        trainers = [_prepared(work) for work in works]
        return _batchable(trainers[0]).evaluate_batch(trainers, [w.params for w in works])


def require_samples(count: int) -> None:
    """Raise NodeError when a node without training samples is asked to train."""
    if not count:
        raise NodeError("this node holds no data to train on: it is a service node")


def _prepared(work: Train | Evaluate) -> Trainer:
    """Return the trainer of `work`, at the node's progress."""
    if _is_scheduled(type(work.trainer)):
        cast(ScheduledTrainer, work.trainer).set_progress(work.round, work.step)
    return work.trainer


@cache
def _is_scheduled(cls: type) -> bool:
    return issubclass(cls, ScheduledTrainer)


@cache
def _is_batchable(cls: type) -> bool:
    """Cached: the check of a protocol is slow."""
    return issubclass(cls, BatchableTrainer)


def _batchable(trainer: Trainer) -> BatchableTrainer:
    assert isinstance(trainer, BatchableTrainer)
    return trainer
