"""scikit-learn behind the trainer contract: linear models, trained by its own SGD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Samples
from shoal.errors import ExperimentError
from shoal.training.batch_trainer import BatchTrainer
from shoal.training.factory import reject_unused_settings
from shoal.training.inputs import TrainerInputs
from shoal.training.settings import Training
from shoal.training.trainer import Trained
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params


@dataclass(frozen=True)
class ScikitBackend:
    """scikit-learn's SGDClassifier: a linear model, one class against the rest, with `partial_fit` on each batch.

    The step size is `training.lr`. Within a batch it takes one step per sample.
    """

    loss: Literal["log_loss", "hinge"] = "log_loss"
    penalty: Literal["l2", "l1", "elasticnet"] = "l2"
    alpha: Annotated[float, Bounds(at_least=0)] = 0.0001
    l1_ratio: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.15

    traits: ClassVar[Traits] = Traits(augments=True, fine_tunes=True, reports_metrics=True, limits_threads=True)

    def create_factory(self, inputs: TrainerInputs) -> ScikitTrainerFactory:
        if inputs.data.task != "classification" or inputs.data.sizes:
            raise ExperimentError(
                ["trainer = 'scikit': it needs class labels and inputs that are not ids; use other data"]
            )
        return ScikitTrainerFactory(self, inputs)


class ScikitTrainerFactory:
    """The flat vector is `coef_`, then `intercept_`: one row per class, and a single row for two classes."""

    def __init__(self, backend: ScikitBackend, inputs: TrainerInputs) -> None:
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)  # a node is one thread
        self.backend, self.inputs = backend, inputs
        self.rows = inputs.data.classes if inputs.data.classes > 2 else 1
        values = int(np.prod(inputs.data.shape))
        self.shapes: tuple[tuple[int, ...], ...] = ((self.rows, values), (self.rows,))
        self.initial: Params = np.zeros(self.rows * values + self.rows, np.float32)

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> ScikitTrainer:
        used = {"lr", "batch_size", "local_steps", "local_epochs"}
        reject_unused_settings(training, used, "scikit", "see the options of the trainer")
        return ScikitTrainer(self, node, training, step_seconds)

    def evaluate(self, params: Params, node: NodeId | None = None) -> dict[str, float]:
        return self.inputs.scores(node, lambda x: self.outputs(params, x), self.loss)

    def warm_up(self, node: NodeId, training: Training) -> None:
        if node == 0:
            self.trainer(node, training, 0.0).train(self.initial, 1)
            self.evaluate(self.initial)

    def outputs(self, params: Params, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return one column per class. With two classes, the first column is 0."""
        scores: NDArray[np.float32] = x.reshape(len(x), -1) @ self.coef(params).T + params[-self.rows :]
        return scores if self.rows > 1 else np.hstack([np.zeros_like(scores), scores])

    def loss(self, outputs: NDArray[np.float32], y: NDArray[Any]) -> float:
        """Return the loss of SGDClassifier without the penalty: the mean over samples of the sum over classes."""
        margins = np.where(y[:, None] == np.arange(outputs.shape[1]), outputs, -outputs)[:, -self.rows :]
        losses = np.logaddexp(0, -margins) if self.backend.loss == "log_loss" else np.maximum(0, 1 - margins)
        return float(losses.sum(1).mean())

    def coef(self, params: Params) -> NDArray[np.float32]:
        return params[: -self.rows].reshape(self.shapes[0])


class ScikitTrainer(BatchTrainer):
    """Trains a linear model on the samples of one node."""

    def __init__(self, factory: ScikitTrainerFactory, node: NodeId, training: Training, step_seconds: float) -> None:
        from sklearn.linear_model import SGDClassifier

        super().__init__(factory.inputs, node, training, step_seconds)
        options = {**asdict(factory.backend), "learning_rate": "constant", "eta0": training.lr}
        self._factory, self._model = factory, SGDClassifier(**options, shuffle=False, random_state=0)
        self._model.partial_fit(
            np.zeros((1, factory.shapes[0][1])), [0], classes=np.arange(factory.inputs.data.classes)
        )

    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        factory, model, losses = self._factory, self._model, []
        model.coef_[:], model.intercept_[:] = factory.coef(params), params[-factory.rows :]
        for batch in batches:
            losses.append(factory.loss(factory.outputs(params, batch.x), batch.y))
            model.partial_fit(batch.x.reshape(len(batch), -1).astype(np.float64), batch.y)
            params = np.concatenate([model.coef_.ravel(), model.intercept_]).astype(np.float32)
        return Trained(params, float(np.mean(losses)))

    def evaluate(self, params: Params) -> dict[str, float]:
        return self._factory.evaluate(self.fine_tuned(params), self.node)
