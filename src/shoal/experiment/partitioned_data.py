"""The data of an experiment, and the samples that each node holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Dataset, Indices, OwnerPartition, Partition, Samples, Shift, ShiftingPartition
from shoal.errors import DataError, ExperimentError
from shoal.experiment.experiment import Experiment
from shoal.experiment.shared_memory import share_samples
from shoal.randomness import generator
from shoal.traits import traits_of


@dataclass(frozen=True)
class PartitionedData:
    """A data set, partitioned over the nodes of an experiment."""

    data: Data
    parts: list[Indices]
    """The training samples of each node."""
    test: Samples
    """The test samples that models are evaluated on."""
    test_parts: list[Indices] | None
    """The samples of `test` that each node is evaluated on; None if every node is evaluated on all of them."""
    shifts: list[Shift | None] | None
    """The transformation of each node's inputs; None if no node has one."""

    def label_counts(self) -> NDArray[np.int64]:
        """Return the number of training samples of each class on each node: nodes × classes."""
        labels, classes = self.data.labels, self.data.classes
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.parts])


def load_data(experiment: Experiment, shared: bool = False) -> PartitionedData:
    """Load the data set and partition it. With `shared`, put it into memory that forked processes share."""
    dataset: Dataset = experiment.dataset.build()
    data = dataset.load(experiment.seed)
    if shared:
        data = replace(data, train=share_samples(data.train), test=share_samples(data.test))
    partition: Partition | OwnerPartition = experiment.partition.build()
    parts, test_parts = _split(partition, data, experiment)
    selected = _select_test_samples(len(data.test), experiment)
    return PartitionedData(
        data,
        parts,
        test=data.test if selected is None else data.test[selected],
        test_parts=_own_test_parts(test_parts, selected, experiment) if experiment.evaluation.data == "own" else None,
        shifts=_shifts(partition, data, experiment),
    )


def _split(
    partition: Partition | OwnerPartition, data: Data, experiment: Experiment
) -> tuple[list[Indices], list[Indices] | None]:
    """Return the training samples of each node and, if samples have owners, its test samples."""
    rng = generator(experiment.seed, "partition")
    if isinstance(partition, OwnerPartition):
        return partition.split_owned(data.train, data.test, experiment.nodes, rng)
    if traits_of(partition, "partition").splits_by_class:
        labels = data.labels
    else:  # only the number of labels matters
        labels = data.train.y if data.task == "classification" else np.zeros(len(data.train), np.int64)
    return partition.split(labels, experiment.nodes, rng), None


def _select_test_samples(available: int, experiment: Experiment) -> Indices | None:
    """Draw the test samples that models are evaluated on; None selects all."""
    wanted = experiment.evaluation.samples
    if wanted is None or wanted >= available:
        return None
    return np.sort(generator(experiment.seed, "test samples").choice(available, wanted, replace=False))


def _own_test_parts(
    test_parts: list[Indices] | None, selected: Indices | None, experiment: Experiment
) -> list[Indices]:
    """Return the test samples of each node, as indices into the selected samples."""
    if test_parts is None:
        problem = (
            f"evaluation.data = 'own': with partition {experiment.partition.name!r} nodes have no test samples of "
            "their own; use 'natural', or evaluation.data = 'all'"
        )
        raise ExperimentError([problem], experiment.name)
    if not any(map(len, test_parts)):
        problem = (
            "evaluation.data = 'own': this data set has no test samples of the users whose data the nodes hold; "
            "use evaluation.data = 'all'"
        )
        raise ExperimentError([problem], experiment.name)
    if selected is None:
        return test_parts
    return [np.flatnonzero(np.isin(selected, own)) for own in test_parts]


def _shifts(partition: Partition | OwnerPartition, data: Data, experiment: Experiment) -> list[Shift | None] | None:
    if not isinstance(partition, ShiftingPartition):
        return None
    if data.sizes:
        raise DataError(
            f"partition {experiment.partition.name!r}: the inputs of this data set are ids, which cannot be shifted"
        )
    return partition.shifts(experiment.nodes, data.shape, generator(experiment.seed, "shifts"))
