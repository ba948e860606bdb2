"""The trainer of torch modules."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shoal.data.dataset import Indices, Shift
from shoal.data.local import NodeData
from shoal.state import State
from shoal.training.batches import Batches, FineTuning
from shoal.training.gradients import LOSS_SCALE
from shoal.training.learner import Learner
from shoal.training.module_draws import NotStackableError
from shoal.training.optimizers import OptimizerState, arrays_to_tensors, state_signature, tensors_to_arrays
from shoal.training.trainer import Trained, require_samples
from shoal.types import Params

if TYPE_CHECKING:
    import torch


class TorchTrainer:
    """Trains a torch module on the samples of one node. Nodes with the same learner can be batched."""

    def __init__(
        self,
        learner: Learner,
        samples: Indices,
        rng: np.random.Generator,
        step_seconds: float,
        tests: Indices | None = None,
        shift: Shift | None = None,
        fine_tuning: FineTuning | None = None,
    ) -> None:
        """`tests` are the node's own test samples; None evaluates on all. `shift` transforms the node's inputs."""
        self._fine_tuning = fine_tuning
        self.learner = learner
        self.step_seconds = step_seconds
        self.cpu_seconds = 0.0
        self._tests = tests
        self._shift = shift
        self.data = NodeData(learner.data, samples)
        self._rng = rng
        self._batches = Batches(samples, learner.training.batch_size, rng)
        self._state: OptimizerState = {}
        self._buffers: dict[str, torch.Tensor] | None = None
        self._progress = (0, 0)
        self._alone = False
        self._evaluated_alone = False

    @property
    def samples(self) -> int:
        return len(self.data)

    def steps(self, steps: int | None) -> int:
        return self.learner.training.steps(self.data) if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        started = time.thread_time()
        trained = self._train_on(params, *self.draw(self.steps(steps)))
        self.cpu_seconds += time.thread_time() - started
        return trained

    def _train_on(self, params: Params, batches: Indices, seed: int) -> Trained:
        learner = self.learner
        rates = self._rates(len(batches))
        trained, state = learner.train(
            params, self._state, batches, seed, self.data.added, self._shift, self._buffers, rates
        )
        self._keep(state)
        if learner.flat.local_buffers:
            self._buffers = learner.flat.read_local()
        return trained

    def evaluate(self, params: Params) -> dict[str, float]:
        params, buffers = self._fine_tuned(params)
        return self.learner.evaluate(params, self._tests, self._shift, buffers)

    # The learning rate: see `ScheduledTrainer`

    def set_progress(self, round: int, step: int) -> None:
        self._progress = round, step

    def learning_rate(self, round: int, step: int) -> float:
        return self.learner.learning_rate.at(round, step)

    def _rates(self, steps: int) -> tuple[float, ...] | None:
        """Return the learning rates of the next steps; None if the rate is constant."""
        rate = self.learner.learning_rate
        return tuple(rate.of_steps(*self._progress, steps)) if rate.changes else None

    # Batching: see `BatchableTrainer`

    def train_key(self, steps: int | None) -> Hashable | None:
        """Nodes are stacked if they train on unchanged samples, with equal rates, and their optimizers are in step.

        A node is never stacked again after a stack whose results had to be discarded.
        """
        if self._alone or not self.learner.trains_stacked or self.data.added is not None or self._shift is not None:
            return None
        count = self.steps(steps)
        return (id(self.learner), count, state_signature(self._state), self._rates(count))

    def evaluate_key(self) -> Hashable | None:
        """Nodes are stacked if they are evaluated on the same, unchanged samples.

        A node is never stacked again after a stack whose scores had to be discarded.
        """
        if self._tests is not None or self._shift is not None or self._fine_tuning is not None:
            return None
        if self._evaluated_alone or not self.learner.evaluates_stacked:
            return None
        return id(self.learner)

    @staticmethod
    def train_batch(
        trainers: Sequence[TorchTrainer], params: Sequence[Params], steps: int | None = None
    ) -> list[Trained]:
        started = time.thread_time()
        count = trainers[0].steps(steps)
        drawn = [trainer.draw(count) for trainer in trainers]
        learner = trainers[0].learner
        reason = ""
        try:
            results, states = learner.stacked(
                lambda: learner.train_stacked(
                    params,
                    [trainer._state for trainer in trainers],
                    np.stack([batches for batches, _ in drawn]),
                    trainers[0]._rates(count),
                    [seed for _, seed in drawn],
                )
            )
            for trainer, state in zip(trainers, states, strict=True):
                trainer._keep(state)
        except NotStackableError as error:
            reason = str(error)
        if reason:
            results = [
                trainer._train_alone(own, *batches, reason)
                for trainer, own, batches in zip(trainers, params, drawn, strict=True)
            ]
        share = (time.thread_time() - started) / len(trainers)
        for trainer in trainers:
            trainer.cpu_seconds += share
        return results

    @staticmethod
    def evaluate_batch(trainers: Sequence[TorchTrainer], params: Sequence[Params]) -> list[dict[str, float]]:
        learner = trainers[0].learner
        try:
            return learner.stacked(lambda: learner.evaluate_stacked(params))
        except NotStackableError:
            for trainer in trainers:
                trainer._evaluated_alone = True
            raise

    # State

    def state(self) -> State:
        """Return the optimizer's state, the node's buffers, the position in the batches and samples received.

        `alone` and `evaluated_alone` are True for a node that is not stacked any more in trainings or evaluations, so
        that a resumed run computes it in the same way.
        """
        return {
            "optimizer": tensors_to_arrays(self._state),
            "buffers": tensors_to_arrays(self._buffers or {}),
            "batches": self._batches.state(),
            "data": self.data.state(),
            "alone": self._alone,
            "evaluated_alone": self._evaluated_alone,
        }

    def restore(self, state: State) -> None:
        self.data.restore(state["data"])
        self._batches.restore(state["batches"])
        self._state = arrays_to_tensors(state["optimizer"], self.learner.device)
        self._buffers = arrays_to_tensors(state["buffers"], self.learner.device) or None
        self._alone = state.get("alone", False)  # earlier versions had neither
        self._evaluated_alone = state.get("evaluated_alone", False)

    def draw(self, steps: int) -> tuple[Indices, int]:
        """Draw the next batches, and a seed for random draws in the module (dropout)."""
        require_samples(len(self.data))
        self._batches.samples = self.data.held
        return self._batches.take(steps), int(self._rng.integers(2**63))

    def _fine_tuned(self, params: Params) -> tuple[Params, dict[str, torch.Tensor] | None]:
        """Return the model to evaluate and its buffers: after fine-tuning, copies that the node does not keep."""
        if self._fine_tuning is None:
            return params, self._buffers
        learner = self.learner
        batches, seed = self._fine_tuning.draw(self.data.held, learner.training.batch_size)
        rates = [learner.learning_rate.at(*self._progress)] * len(batches)
        trained, _ = learner.train(params, {}, batches, seed, self.data.added, self._shift, self._buffers, rates)
        return trained.params, learner.flat.read_local()

    def _train_alone(self, params: Params, batches: Indices, seed: int, reason: str) -> Trained:
        """Train after an attempt to train in a stack, which is not repeated."""
        self._alone = True
        return msgspec.structs.replace(self._train_on(params, batches, seed), not_batched=reason)

    def _keep(self, state: OptimizerState) -> None:
        if self.learner.training.keep_state is not False:
            self._state = state
        elif LOSS_SCALE in state:  # it belongs to the number format, not to the optimizer
            self._state = {LOSS_SCALE: state[LOSS_SCALE]}
