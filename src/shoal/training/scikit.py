"""scikit-learn behind the contract of a trainer: linear models that its own SGD trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Samples
from shoal.errors import ExperimentError
from shoal.training.factory import BatchTrainer, TrainerInputs, refuse_others
from shoal.training.trainer import Trained, Training
from shoal.types import Bounds, NodeId, Params


@dataclass(frozen=True)
class ScikitBackend:
    """scikit-learn's SGDClassifier: a linear model, one class against the rest, by `partial_fit` on each batch.

    Its step size is `training.lr`. In a batch it takes one sample after another.
    """

    loss: Literal["log_loss", "hinge"] = "log_loss"
    penalty: Literal["l2", "l1", "elasticnet"] = "l2"
    alpha: Annotated[float, Bounds(at_least=0)] = 0.0001
    l1_ratio: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.15

    def create_factory(self, inputs: TrainerInputs) -> ScikitTrainerFactory:
        if inputs.data.task != "classification" or inputs.data.sizes:
            raise ExperimentError(["trainer = 'scikit': it tells classes apart by measurements; use another data set"])
        return ScikitTrainerFactory(self, inputs)


class ScikitTrainerFactory:
    """The flat vector is `coef_`, then `intercept_`: a row for each class, and one alone for two classes."""

    def __init__(self, recipe: ScikitBackend, inputs: TrainerInputs) -> None:
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)  # a node is one thread
        self.recipe, self.inputs = recipe, inputs
        self.rows, values = (
            inputs.data.classes if inputs.data.classes > 2 else 1,
            int(np.prod(inputs.data.shape)),
        )
        self.shapes: tuple[tuple[int, ...], ...] = ((self.rows, values), (self.rows,))
        self.initial: Params = np.zeros(self.rows * values + self.rows, np.float32)

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> ScikitTrainer:
        refuse_others(training, {"lr", "batch_size", "local_steps", "local_epochs"}, "scikit", "see its parameters")
        return ScikitTrainer(self, node, training, step_seconds)

    def evaluate(self, params: Params, node: NodeId | None = None) -> dict[str, float]:
        return self.inputs.scores(node, lambda x: self.outputs(params, x), self.loss)

    def warm_up(self, node: NodeId, training: Training) -> None:
        if node == 0:
            self.trainer(node, training, 0.0).train(self.initial, 1)
            self.evaluate(self.initial)

    def outputs(self, params: Params, x: NDArray[Any]) -> NDArray[np.float32]:
        """A column for each class; where there are two, that of the first is 0."""
        scores: NDArray[np.float32] = x.reshape(len(x), -1) @ self.coef(params).T + params[-self.rows :]
        return scores if self.rows > 1 else np.hstack([np.zeros_like(scores), scores])

    def loss(self, outputs: NDArray[np.float32], y: NDArray[Any]) -> float:
        """What SGDClassifier minimises, without the penalty: the mean over samples of the sum over classes."""
        margins = np.where(y[:, None] == np.arange(outputs.shape[1]), outputs, -outputs)[:, -self.rows :]
        costs = np.logaddexp(0, -margins) if self.recipe.loss == "log_loss" else np.maximum(0, 1 - margins)
        return float(costs.sum(1).mean())

    def coef(self, params: Params) -> NDArray[np.float32]:
        return params[: -self.rows].reshape(self.shapes[0])


class ScikitTrainer(BatchTrainer):
    def __init__(self, shop: ScikitTrainerFactory, node: NodeId, training: Training, step_seconds: float) -> None:
        from sklearn.linear_model import SGDClassifier

        super().__init__(shop.inputs, node, training, step_seconds)
        options = {**asdict(shop.recipe), "learning_rate": "constant", "eta0": training.lr}
        self._shop, self._model = shop, SGDClassifier(**options, shuffle=False, random_state=0)
        self._model.partial_fit(np.zeros((1, shop.shapes[0][1])), [0], classes=np.arange(shop.inputs.data.classes))

    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        shop, model, losses = self._shop, self._model, []
        model.coef_[:], model.intercept_[:] = shop.coef(params), params[-shop.rows :]
        for batch in batches:
            losses.append(shop.loss(shop.outputs(params, batch.x), batch.y))
            model.partial_fit(batch.x.reshape(len(batch), -1).astype(np.float64), batch.y)
            params = np.concatenate([model.coef_.ravel(), model.intercept_]).astype(np.float32)
        return Trained(params, float(np.mean(losses)))

    def evaluate(self, params: Params) -> dict[str, float]:
        return self._shop.evaluate(params, self.node)
