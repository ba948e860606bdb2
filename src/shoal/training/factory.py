"""What makes the trainers of all nodes that live in one process.

A `TrainerBackend` is a recipe, named in an experiment: `trainer = { name = "torch" }`. It opens a `TrainerFactory` on
the data of a run, once per process. The workshop makes a `Trainer` for each node. A trainer is five
methods, and its model one flat vector: enough to put anybody's training code behind.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Indices, Samples, Shift
from shoal.errors import ExperimentError, NodeError
from shoal.randomness import generator
from shoal.state import State
from shoal.training.metrics import Metrics
from shoal.training.trainer import Batches, Trained, Trainer, Training
from shoal.traits import ComponentView
from shoal.types import NodeId, Params

TESTED_AT_ONCE = 1024
"""Samples."""


@dataclass(frozen=True)
class TrainerInputs:
    """What trainers stand on: the data, who holds what of it, and the model that the experiment names."""

    seed: int
    data: Data
    parts: Sequence[Indices]
    """The training samples of each node, and none for those that serve."""
    tests: Sequence[Indices] | None
    """The test samples that are each node's own, as numbers in `test`; None when all are tested on all."""
    shifts: Sequence[Shift | None] | None
    """How each node sees its inputs."""
    test: Samples
    metrics: Metrics
    model: ComponentView
    training: Training
    """What holds for nodes of no group."""

    def part(self, node: NodeId) -> Indices:
        """The numbers of the training samples that a node holds."""
        return self.parts[node] if node < len(self.parts) else self.parts[0][:0]

    def part_of_test(self, node: NodeId | None) -> Indices:
        """The numbers of the test samples that a node is tested on: its own, or all."""
        if node is None or self.tests is None or node >= len(self.tests):
            return np.arange(len(self.test))
        return self.tests[node]

    def scores(
        self,
        node: NodeId | None,
        predict: Callable[[NDArray[Any]], NDArray[np.float32]],
        loss: Callable[[NDArray[np.float32], NDArray[Any]], float],
    ) -> dict[str, float]:
        """What the experiment measures of a model, on what a node is tested on; None is all of it, as it is.

        `predict` gives a row of outputs for each input, one for each class; `loss` is the mean over outputs and
        targets.
        """
        import torch

        numbers, totals = self.part_of_test(node), dict[str, Any]()
        for start in range(0, len(numbers), TESTED_AT_ONCE):
            test = self.test_batch(node, numbers[start : start + TESTED_AT_ONCE])
            outputs = predict(test.x)
            cost = torch.tensor(float(loss(outputs, test.y)))
            for name, value in self.metrics.tally(torch.tensor(outputs), torch.tensor(test.y), cost).items():
                totals[name] = totals.get(name, 0) + value
        return self.metrics.scores(totals)

    def batch(self, node: NodeId, numbers: Indices) -> Samples:
        """Training samples as a node sees them: inputs in float32, scaled and shifted; ids as they are."""
        return self._seen(node, self.data.train[numbers], numbers)

    def test_batch(self, node: NodeId | None, numbers: Indices) -> Samples:
        """Test samples alike; None sees them as they are."""
        return self._seen(node, self.test[numbers], -1 - numbers)

    def _seen(self, node: NodeId | None, samples: Samples, numbers: Indices) -> Samples:
        if self.data.sizes:
            return samples
        x = samples.x.astype(np.float32)
        if (scaling := self.data.scaling) is not None:
            shape = (-1, *[1] * max(0, x.ndim - 2)) if len(scaling.mean) > 1 else (1,)
            mean, std = (np.array(v, np.float32).reshape(shape) for v in (scaling.mean, scaling.std))
            x = (x - mean) / std
        shift = self.shifts[node] if self.shifts is not None and node is not None and node < len(self.shifts) else None
        if shift is not None:
            import torch

            x = shift.apply(torch.from_numpy(x), torch.from_numpy(numbers)).numpy()
        return Samples(x, samples.y)


class TrainerFactory(Protocol):
    """Makes trainers. All state that nodes do not share is in the trainers."""

    @property
    def initial(self) -> Params:
        """The model that every node starts from; the same in every process."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that lie behind each other in the flat vector."""
        ...

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> Trainer: ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Scores of any parameters on the common test samples."""
        ...

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Whatever is best done once, before nodes are forked from this process."""
        ...


class TrainerBackend(Protocol):
    """A recipe for a workshop; its parameters are those of its constructor."""

    def create_factory(self, inputs: TrainerInputs) -> TrainerFactory: ...


class BatchTrainer(ABC):
    """A trainer that lacks only `learn` and `evaluate`: its batches are those that torch's would draw."""

    def __init__(self, inputs: TrainerInputs, node: NodeId, training: Training, step_seconds: float) -> None:
        self.inputs, self.node, self.training = inputs, node, training
        self.step_seconds, self.cpu_seconds = step_seconds, 0.0
        self._part = inputs.part(node)
        self._batches = Batches(self._part, training.batch_size, generator(inputs.seed, "training", node))

    @abstractmethod
    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        """`params` after a step on each of `batches`."""

    @property
    def samples(self) -> int:
        return len(self._part)

    def steps(self, steps: int | None) -> int:
        return self.training.steps(len(self._part)) if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        if not len(self._part):
            raise NodeError("this node holds no data to train on: it serves the others")
        started = time.thread_time()
        drawn = self._batches.take(self.steps(steps))
        trained = self.learn(params, (self.inputs.batch(self.node, numbers) for numbers in drawn))
        self.cpu_seconds += time.thread_time() - started
        return trained

    def state(self) -> State:
        return self._batches.state()

    def restore(self, state: State) -> None:
        self._batches.restore(state)


def refuse_others(training: Training, used: Collection[str], trainer: str, advice: str) -> None:
    """Raises for what `training` sets and a trainer would not look at."""
    problems = []
    for field in fields(Training):
        value = getattr(training, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in used and value != default:
            problems.append(f"training.{field.name} = {value!r}: trainer {trainer!r} does not look at it; {advice}")
    if problems:
        raise ExperimentError(problems)
