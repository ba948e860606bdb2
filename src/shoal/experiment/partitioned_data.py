"""The data of an experiment, and the samples that each node holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import (
    Augmentation,
    Data,
    Dataset,
    Indices,
    OwnerPartition,
    Partition,
    Rescaling,
    Samples,
    Shift,
    ShiftingPartition,
)
from shoal.data.validation import Validation, draw_stratified
from shoal.errors import DataError, ExperimentError
from shoal.experiment.experiment import Experiment
from shoal.experiment.shared_memory import share_samples
from shoal.randomness import generator
from shoal.training.normalisation import example_inputs
from shoal.traits import traits_of


@dataclass(frozen=True)
class PartitionedData:
    """A data set, partitioned over the nodes of an experiment."""

    data: Data
    """With evaluation.split = "validation", the validation samples are in place of its test samples."""
    parts: list[Indices]
    """The training samples of each node."""
    test: Samples
    """The samples that models are evaluated on."""
    test_parts: list[Indices] | None
    """The samples of `test` that each node is evaluated on; None if every node is evaluated on all of them."""
    shifts: list[Shift | None] | None
    """The transformation of each node's inputs; None if no node has one."""
    augmentations: list[Augmentation]
    """The transformations of training batches, in order."""

    def label_counts(self) -> NDArray[np.int64]:
        """Return the number of training samples of each class on each node: nodes × classes."""
        return _label_counts(self.data, self.parts)


def load_data(experiment: Experiment, shared: bool = False) -> PartitionedData:
    """Load the data set and partition it. With `shared`, put it into memory that forked processes share."""
    dataset: Dataset = experiment.dataset.build()
    partition: Partition | OwnerPartition = experiment.partition.build()
    data, parts, test_parts = _split(partition, dataset.load(experiment.seed), experiment)
    data, augmentations = _augmentations(data, parts, experiment)
    if shared:
        data = replace(data, train=share_samples(data.train), test=share_samples(data.test))
    selected = _select_test_samples(len(data.test), experiment)
    test = data.test if selected is None else data.test[selected]
    plan, validation = experiment.evaluation, _validation(experiment)
    if plan.split == "validation" and validation is not None and validation.per == "node":
        own = _among(test_parts or [], selected)
    elif plan.data == "own":
        own = _own_test_parts(data, parts, test, test_parts, selected, experiment)
    else:
        own = None
    return PartitionedData(data, parts, test, own, _shifts(partition, data, experiment), augmentations)


# Training and validation samples


def _validation(experiment: Experiment) -> Validation | None:
    given = experiment.validation
    return Validation(given) if isinstance(given, float) else given


def _split(
    partition: Partition | OwnerPartition, data: Data, experiment: Experiment
) -> tuple[Data, list[Indices], list[Indices] | None]:
    """Return the data, the training samples of each node and, if nodes have some, its own test samples.

    No training sample is a validation sample. With evaluation.split = "validation", the validation samples are the test
    samples.
    """
    validation = _validation(experiment)
    if validation is None:
        return data, *_partition(partition, data, None, experiment)
    validates = experiment.evaluation.split == "validation"
    if validation.per == "node":
        parts, test_parts = _partition(partition, data, None, experiment)
        parts, held_out = _hold_out_per_node(data, parts, validation.fraction, experiment)
        if validates:
            data = replace(data, test=data.train[np.concatenate(held_out)])
            test_parts = np.split(np.arange(len(data.test)), np.cumsum([len(own) for own in held_out])[:-1])
        return data, parts, test_parts
    drawn = draw_stratified(_strata(data), validation.fraction, generator(experiment.seed, "validation"))
    _require_validation(len(drawn), f"the data set has {len(data.train)} training samples", experiment)
    kept = np.setdiff1d(np.arange(len(data.train)), drawn)
    if validates:
        data = replace(data, test=data.train[drawn])
    parts, test_parts = _partition(partition, data, kept, experiment)
    return data, [kept[part] for part in parts], test_parts


def _partition(
    partition: Partition | OwnerPartition, data: Data, kept: Indices | None, experiment: Experiment
) -> tuple[list[Indices], list[Indices] | None]:
    """Return the training samples of each node, as indices into `kept`, and its test samples if samples have owners.

    None keeps all training samples.
    """
    rng = generator(experiment.seed, "partition")
    if isinstance(partition, OwnerPartition):
        train = data.train if kept is None else data.train[kept]
        return partition.split_owned(train, data.test, experiment.nodes, rng)
    # Other partitions use the number of labels only.
    labels = data.labels if traits_of(partition, "partition").splits_by_class else _strata(data)
    return partition.split(labels if kept is None else labels[kept], experiment.nodes, rng), None


def _hold_out_per_node(
    data: Data, parts: list[Indices], fraction: float, experiment: Experiment
) -> tuple[list[Indices], list[Indices]]:
    """Return the training samples and the validation samples of each node; a node with one sample has no second."""
    strata, kept, held_out = _strata(data), [], []
    for node, part in enumerate(parts):
        drawn = draw_stratified(strata[part], fraction, generator(experiment.seed, "validation", node))
        held_out.append(part[drawn])
        kept.append(np.delete(part, drawn))
    _require_validation(sum(map(len, held_out)), "no node has more than one training sample", experiment)
    return kept, held_out


def _strata(data: Data) -> NDArray[np.int64]:
    """Return the class of each training sample, or one class for all if there are none."""
    return data.train.y if data.task == "classification" else np.zeros(len(data.train), np.int64)


def _require_validation(count: int, reason: str, experiment: Experiment) -> None:
    if not count:
        problem = f"dataset.validation: {reason}, so none can be held out; remove it, or use a larger data set"
        raise ExperimentError([problem], experiment.name)


# Test samples


def _select_test_samples(available: int, experiment: Experiment) -> Indices | None:
    """Draw the test samples that models are evaluated on; None selects all."""
    wanted = experiment.evaluation.samples
    if wanted is None or wanted >= available:
        return None
    return np.sort(generator(experiment.seed, "test samples").choice(available, wanted, replace=False))


def _own_test_parts(
    data: Data,
    parts: list[Indices],
    test: Samples,
    test_parts: list[Indices] | None,
    selected: Indices | None,
    experiment: Experiment,
) -> list[Indices]:
    """Return the test samples of each node, as indices into the selected samples `test`."""
    if test_parts is None:
        if data.task != "classification":
            problem = (
                f"evaluation.data = 'own': with partition {experiment.partition.name!r}, a node's own test samples "
                f"have the proportions of its classes, but a {data.task} task has no classes; use 'natural', or "
                "evaluation.data = 'all'"
            )
            raise ExperimentError([problem], experiment.name)
        counts = _label_counts(data, parts)
        rngs = (generator(experiment.seed, "own test samples", node) for node in range(len(parts)))
        return [proportional_samples(test.y, own, rng) for own, rng in zip(counts, rngs, strict=True)]
    if not any(map(len, test_parts)):
        problem = (
            "evaluation.data = 'own': this data set has no test samples of the users whose data the nodes hold; "
            "use evaluation.data = 'all'"
        )
        raise ExperimentError([problem], experiment.name)
    return _among(test_parts, selected)


def _among(test_parts: list[Indices], selected: Indices | None) -> list[Indices]:
    """Return the test samples of each node as indices into the selected samples."""
    if selected is None:
        return test_parts
    return [np.flatnonzero(np.isin(selected, own)) for own in test_parts]


def proportional_samples(labels: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> Indices:
    """Draw the largest subset of samples with these `labels` whose classes have the proportions of `counts`.

    With s the largest real number such that no class c needs more than its samples, class c has s·counts[c]/total
    samples, rounded to the nearest integer. A class without samples is left out. All samples if every class is.
    """
    available = np.bincount(labels, minlength=len(counts))
    shares = np.where(available > 0, counts, 0)
    if not shares.any():
        return np.arange(len(labels))
    held = np.flatnonzero(shares)
    scale = (available[held] / shares[held]).min()
    wanted = np.rint(scale * shares[held]).astype(np.int64)
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:k] for c, k in zip(held, wanted, strict=True)]
    return np.sort(np.concatenate(drawn))


def _label_counts(data: Data, parts: Sequence[Indices]) -> NDArray[np.int64]:
    labels, classes = data.labels, data.classes
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


# Inputs


def _shifts(partition: Partition | OwnerPartition, data: Data, experiment: Experiment) -> list[Shift | None] | None:
    if not isinstance(partition, ShiftingPartition):
        return None
    if data.sizes:
        raise DataError(
            f"partition {experiment.partition.name!r}: the inputs of this data set are ids, which cannot be shifted"
        )
    return partition.shifts(experiment.nodes, data.shape, generator(experiment.seed, "shifts"))


def _augmentations(data: Data, parts: list[Indices], experiment: Experiment) -> tuple[Data, list[Augmentation]]:
    """Return the data with its scaling, and the augmentations. Raises ExperimentError if one does not fit the data."""
    entries = [component.build() for component in experiment.augmentation]
    problems = []
    for i, entry in enumerate(entries):
        if isinstance(entry, Rescaling):
            try:
                data = replace(data, scaling=entry.input_scaling(data, np.concatenate(parts)))
            except ValueError as error:
                problems.append(f"{_place(i, experiment)}: {error}")
    augmentations = {i: entry for i, entry in enumerate(entries) if not isinstance(entry, Rescaling)}
    for i, augmentation in augmentations.items():
        if (problem := _augmentation_problem(augmentation, data)) is not None:
            problems.append(f"{_place(i, experiment)}: {problem}")
    if problems:
        raise ExperimentError(problems, experiment.name)
    return data, list(augmentations.values())


def _place(i: int, experiment: Experiment) -> str:
    return f"dataset.augmentation[{i}] = {experiment.augmentation[i].name!r}"


def _augmentation_problem(augmentation: Augmentation, data: Data) -> str | None:
    """Apply an augmentation to two inputs, and describe what is wrong with the result."""
    import torch

    if not callable(getattr(augmentation, "apply", None)):
        return "it has no method apply(x, rng); see shoal.data.Augmentation"
    if data.sizes:
        return "the inputs of this data set are ids, which cannot be transformed"
    torch.set_num_threads(1)  # a pool of threads must not exist when nodes are forked
    inputs = example_inputs(data, torch.device("cpu")).float()
    try:
        outputs = augmentation.apply(inputs.clone(), generator(0, "augmentation"))
    except ValueError as error:
        return str(error)
    except Exception as error:  # a plug-in may raise anything
        return f"apply raised {type(error).__name__}: {error}"
    if not isinstance(outputs, torch.Tensor) or outputs.shape != inputs.shape or outputs.dtype != inputs.dtype:
        found = f"{outputs.dtype} of shape {list(outputs.shape)}" if isinstance(outputs, torch.Tensor) else outputs
        return f"apply returned {found} for {inputs.dtype} of shape {list(inputs.shape)}; expected the same"
    return None
