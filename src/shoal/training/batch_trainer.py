"""A base class for trainers that learn from batches of NumPy arrays."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from shoal.data.dataset import Indices, Samples
from shoal.randomness import generator
from shoal.state import State
from shoal.training.batches import Batches
from shoal.training.inputs import TrainerInputs
from shoal.training.schedules import LearningRate
from shoal.training.settings import Training
from shoal.training.trainer import Trained, require_samples
from shoal.types import NodeId, Params


class BatchTrainer(ABC):
    """A trainer that lacks only `learn` and `evaluate`. It draws its batches as the torch trainer draws them.

    Both draw from one generator of the node. The torch trainer draws a seed from it after the batches of each training,
    this one only if batches are augmented. So augmentation changes which batches are drawn after the first pass over
    the samples: with it, they are those of the torch trainer; without it, only the first pass is.
    """

    def __init__(self, inputs: TrainerInputs, node: NodeId, training: Training, step_seconds: float) -> None:
        self.inputs, self.node, self.training = inputs, node, training
        self.step_seconds, self.cpu_seconds = step_seconds, 0.0
        self.rates: Sequence[float] = ()
        """The learning rate of each step of the current training, for `learn`."""
        self._rate, self._progress = LearningRate(training), (0, 0)
        self._part = inputs.part(node)
        self._batch_rng = generator(inputs.seed, "training", node)
        self._batches = Batches(self._part, training.batch_size, self._batch_rng)
        self._fine_tuning = inputs.fine_tuning(node)

    @abstractmethod
    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        """Take one step on each of `batches`, starting from `params`."""

    @property
    def samples(self) -> int:
        return len(self._part)

    def steps(self, steps: int | None) -> int:
        return self.training.steps(self._part) if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        require_samples(len(self._part))
        started = time.thread_time()
        drawn = self._batches.take(self.steps(steps))
        seed = int(self._batch_rng.integers(2**63)) if self.inputs.augmentations else 0
        self.rates = self._rate.of_steps(*self._progress, len(drawn))
        trained = self.learn(params, self._drawn_samples(drawn, seed))
        self.cpu_seconds += time.thread_time() - started
        return trained

    def set_progress(self, round: int, step: int) -> None:
        self._progress = round, step

    def learning_rate(self, round: int, step: int) -> float:
        return self._rate.at(round, step)

    def fine_tuned(self, params: Params) -> Params:
        """Return the parameters to evaluate: `params`, or a copy that took the steps of `evaluation.fine_tune`.

        A class whose `evaluate` calls this declares `Traits(fine_tunes=True)` in its backend.
        """
        if self._fine_tuning is None:
            return params
        drawn, seed = self._fine_tuning.draw(self._part, self.training.batch_size)
        self.rates = [self._rate.at(*self._progress)] * len(drawn)
        return self.learn(params, self._drawn_samples(drawn, seed)).params

    def _drawn_samples(self, drawn: Indices, seed: int) -> Iterator[Samples]:
        """Yield the batches with these indices, augmented if the experiment has augmentations."""
        rng = generator(seed, "augmentation") if self.inputs.augmentations else None
        return (self.inputs.batch(self.node, numbers, rng) for numbers in drawn)

    def state(self) -> State:
        return self._batches.state()

    def restore(self, state: State) -> None:
        self._batches.restore(state)
