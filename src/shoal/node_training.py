"""The local training of one node: where in its training it is, its learning rate and its latest loss."""

from __future__ import annotations

import math

import numpy as np

from shoal.runtime import Runtime
from shoal.state import State
from shoal.training.trainer import Evaluate, ScheduledTrainer, Train, Trained, Trainer
from shoal.types import Params


class NodeTraining:
    """Trains with the node's trainer and follows it."""

    def __init__(self, trainer: Trainer, learning_rate: float) -> None:
        self._trainer = trainer
        self._learning_rate = learning_rate
        self._steps = 0
        self.round = 0
        """The current round of the node's algorithm. It is not the number of trainings: a node may miss rounds."""
        self.loss: float | None = None
        """The loss of the latest training."""
        self.diverged = False
        """Whether a training gave a loss that is not finite."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        if isinstance(self._trainer, ScheduledTrainer):
            return self._trainer.learning_rate(self.round, self._steps)
        return self._learning_rate

    async def train(self, runtime: Runtime, params: Params, steps: int | None) -> Trained:
        work = Train(self._trainer, params, steps, self.round, self._steps)
        trained = await runtime.compute(work)
        self._steps += self._trainer.steps(steps)
        self.loss = trained.loss
        return trained

    @property
    def progress(self) -> tuple[int, int]:
        """The round, and the number of local steps so far."""
        return self.round, self._steps

    def evaluation(self, params: Params, progress: tuple[int, int]) -> Evaluate:
        """Return the work of evaluating `params`, a model of the node at this `progress`."""
        return Evaluate(self._trainer, params, *progress)

    def newly_diverged(self, trained: Trained) -> bool:
        """Return whether this is the node's first training that diverged.

        A trainer that does not know its loss reports NaN, with parameters that are finite.
        """
        if self.diverged or math.isfinite(trained.loss):
            return False
        self.diverged = math.isinf(trained.loss) or not np.isfinite(trained.params).all()
        return self.diverged

    def state(self) -> State:
        return {"loss": self.loss, "steps": self._steps, "diverged": self.diverged}

    def restore(self, state: State) -> None:
        self.loss = state["loss"]
        self._steps = state.get("steps", 0)  # states of earlier versions have neither this nor the next entry
        self.diverged = state.get("diverged", self.loss is not None and math.isinf(self.loss))
