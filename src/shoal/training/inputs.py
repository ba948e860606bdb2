"""What trainers are built from: the data, its partition and the model of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.augmentations import augment
from shoal.data.dataset import Augmentation, Data, Indices, Samples, Shift
from shoal.randomness import derived_seed
from shoal.training.batches import FineTuning
from shoal.training.metrics import Metrics, add_sums
from shoal.training.normalisation import MeanAndStd, normalise, scaling_arrays
from shoal.training.settings import Training
from shoal.traits import ComponentView
from shoal.types import NodeId

EVALUATION_BATCH = 1024
"""Test samples that `TrainerInputs.scores` evaluates at once."""


@dataclass(frozen=True)
class TrainerInputs:
    """The data of a run, the samples of every node, and the experiment's model and settings."""

    seed: int
    data: Data
    parts: Sequence[Indices]
    """The training samples of each node. Service nodes have none and come after the last entry."""
    test_parts: Sequence[Indices] | None
    """The test samples of each node, as indices into `test`; None if every node is evaluated on all of them."""
    shifts: Sequence[Shift | None] | None
    """The transformation of each node's inputs."""
    test: Samples
    metrics: Metrics
    model: ComponentView
    training: Training
    """The settings of nodes that are in no group."""
    augmentations: Sequence[Augmentation] = ()
    """The transformations of training batches, in order."""
    fine_tune: int = 0
    """Steps that a copy of a node's model takes before its evaluation."""

    def part(self, node: NodeId) -> Indices:
        """Return the indices of the node's training samples."""
        return self.parts[node] if node < len(self.parts) else self.parts[0][:0]

    def part_of_test(self, node: NodeId | None) -> Indices:
        """Return the indices of the test samples that a node is evaluated on: its own, or all. None means all."""
        if node is None or self.test_parts is None or node >= len(self.test_parts):
            return np.arange(len(self.test))
        return self.test_parts[node]

    def fine_tuning(self, node: NodeId) -> FineTuning | None:
        """Return the steps before an evaluation of the node; None if there are none, or it has no training samples."""
        if not self.fine_tune or not len(self.part(node)):
            return None
        return FineTuning(self.fine_tune, derived_seed(self.seed, "fine-tuning", node))

    def scores(
        self,
        node: NodeId | None,
        predict: Callable[[NDArray[Any]], NDArray[np.float32]],
        loss: Callable[[NDArray[np.float32], NDArray[Any]], float],
    ) -> dict[str, float]:
        """Return the experiment's metrics of a model on the node's test samples; None takes all of them, unshifted.

        `predict` returns one row of outputs for each input, with one column per class. `loss` returns the mean over
        outputs and targets.
        """
        import torch

        numbers, totals = self.part_of_test(node), dict[str, Any]()
        for start in range(0, len(numbers), EVALUATION_BATCH):
            test = self.test_batch(node, numbers[start : start + EVALUATION_BATCH])
            outputs = predict(test.x)
            mean_loss = torch.tensor(float(loss(outputs, test.y)))
            add_sums(totals, self.metrics.batch_sums(torch.tensor(outputs), torch.tensor(test.y), mean_loss))
        return self.metrics.scores(totals)

    def batch(self, node: NodeId, numbers: Indices, rng: np.random.Generator | None = None) -> Samples:
        """Return training samples as the node's model takes them: float32, normalised and shifted; ids unchanged.

        With `rng`, they are augmented.
        """
        samples = self._prepared(node, self.data.train[numbers], numbers)
        if rng is None or not self.augmentations:
            return samples
        import torch

        x = augment(torch.tensor(samples.x), self.augmentations, rng)
        return Samples(x.numpy(), samples.y)

    def test_batch(self, node: NodeId | None, numbers: Indices) -> Samples:
        """Return test samples in the same way; None does not shift them."""
        return self._prepared(node, self.test[numbers], -1 - numbers)

    @cached_property
    def _scaling(self) -> MeanAndStd[NDArray[np.float32]]:
        return scaling_arrays(self.data)

    def _prepared(self, node: NodeId | None, samples: Samples, numbers: Indices) -> Samples:
        if self.data.sizes:
            return samples
        x = normalise(samples.x.astype(np.float32), self._scaling)
        shift = self.shifts[node] if self.shifts is not None and node is not None and node < len(self.shifts) else None
        if shift is not None:
            import torch

            x = shift.apply(torch.from_numpy(x), torch.from_numpy(numbers)).numpy()
        return Samples(x, samples.y)
