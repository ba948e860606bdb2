"""A trainer: how nodes train and evaluate. This one needs no model: it is softmax regression in NumPy."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from shoal import Bounds, NodeId, Params, Traits
from shoal.data import Samples
from shoal.training import BatchTrainer, Trained, TrainerInputs, Training, reject_unused_settings

USED = ("lr", "schedule", "batch_size", "local_steps", "local_epochs")  # keys of the table `training`


@dataclass(frozen=True)
class PluginName:
    """Softmax regression with stochastic gradient descent: `training.lr` and `training.schedule` set the step size."""

    # What it does of the options that not every trainer has: see the docs of trainers.
    traits: ClassVar[Traits] = Traits(
        augments=True, fine_tunes=True, reports_metrics=True, training_options=frozenset(["schedule"])
    )

    decay: Annotated[float, Bounds(at_least=0)] = 0.0  # an experiment sets it: trainer = { name = …, decay = 0.01 }

    def create_factory(self, inputs: TrainerInputs) -> "Factory":
        return Factory(inputs, self.decay)


class Factory:
    """Creates one trainer per node. A model is one flat float32 vector: a row of weights and a bias per class."""

    def __init__(self, inputs: TrainerInputs, decay: float) -> None:
        self.inputs, self.decay = inputs, decay
        self.shapes: tuple[tuple[int, ...], ...] = ((inputs.data.classes, math.prod(inputs.data.shape) + 1),)
        self.initial: Params = np.zeros(math.prod(self.shapes[0]), np.float32)  # every node starts from it

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> "OneNode":
        reject_unused_settings(training, USED, Path(__file__).name, "remove it")
        return OneNode(self, node, training, step_seconds)

    def evaluate(self, params: Params, node: NodeId | None = None) -> dict[str, float]:
        """The experiment's metrics on the test samples of a node, or on all of them."""
        return self.inputs.scores(node, lambda x: self.outputs(params, x), mean_loss)

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Called before processes are forked, for work that all nodes can share. There is none."""

    def outputs(self, params: Params, x: NDArray[Any]) -> NDArray[np.float32]:
        weights = params.reshape(self.shapes[0])
        outputs: NDArray[np.float32] = x.reshape(len(x), -1) @ weights[:, :-1].T + weights[:, -1]
        return outputs


class OneNode(BatchTrainer):
    """Trains one node. `BatchTrainer` draws the batches, and saves its generator in checkpoints."""

    def __init__(self, factory: Factory, node: NodeId, training: Training, step_seconds: float) -> None:
        super().__init__(factory.inputs, node, training, step_seconds)
        self.factory = factory

    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        losses = []
        for batch, rate in zip(batches, self.rates, strict=True):
            outputs = self.factory.outputs(params, batch.x)
            losses.append(mean_loss(outputs, batch.y))
            slope = softmax(outputs)
            slope[np.arange(len(batch)), batch.y] -= 1
            x = np.hstack([batch.x.reshape(len(batch), -1), np.ones((len(batch), 1), np.float32)])
            gradient = (slope.T @ x / len(batch)).ravel() + self.factory.decay * params
            params = (params - rate * gradient).astype(np.float32)
        return Trained(params, float(np.mean(losses)))

    def evaluate(self, params: Params) -> dict[str, float]:
        return self.factory.evaluate(self.fine_tuned(params), self.node)


def softmax(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    exponentials = np.exp(outputs - outputs.max(1, keepdims=True))
    probabilities: NDArray[np.float32] = exponentials / exponentials.sum(1, keepdims=True)
    return probabilities


def mean_loss(outputs: NDArray[np.float32], y: NDArray[Any]) -> float:
    return float(-np.log(softmax(outputs)[np.arange(len(y)), y] + 1e-9).mean())
