"""The data of an experiment, and the samples that each node holds."""

from __future__ import annotations

import warnings
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
    Scaling,
    Shift,
    ShiftingPartition,
    transforms_batches,
)
from shoal.data.validation import Validation, draw_stratified, take_stratified
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
    own = _own_test_parts(data, parts, test_parts, experiment)
    test, own = _limit_test_samples(data, own, experiment)
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
    drawn = draw_stratified(_strata(data, data.train), validation.fraction, generator(experiment.seed, "validation"))
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
        train = data.train if kept is None else _without_inputs(data.train, kept)
        return partition.split_owned(train, data.test, experiment.nodes, rng)
    # Other partitions use the number of labels only.
    labels = data.labels if traits_of(partition, "partition").splits_by_class else _strata(data, data.train)
    return partition.split(labels if kept is None else labels[kept], experiment.nodes, rng), None


def _hold_out_per_node(
    data: Data, parts: list[Indices], fraction: float, experiment: Experiment
) -> tuple[list[Indices], list[Indices]]:
    """Return the training samples and the validation samples of each node; a node with one sample has no second."""
    strata, kept, held_out = _strata(data, data.train), [], []
    for node, part in enumerate(parts):
        drawn = draw_stratified(strata[part], fraction, generator(experiment.seed, "validation", node))
        held_out.append(part[drawn])
        kept.append(np.delete(part, drawn))
    _require_validation(sum(map(len, held_out)), "no node has more than one training sample", experiment)
    return kept, held_out


def _without_inputs(samples: Samples, kept: Indices) -> Samples:
    """Return some of the samples with targets and owners only: inputs may be as large as the whole data set."""
    owner = None if samples.owner is None else samples.owner[kept]
    return Samples(np.empty((len(kept), 0), np.float32), samples.y[kept], owner)


def _strata(data: Data, samples: Samples) -> NDArray[np.int64]:
    """Return the class of each sample, or one class for all if there are none."""
    return samples.y if data.task == "classification" else np.zeros(len(samples), np.int64)


def _require_validation(count: int, reason: str, experiment: Experiment) -> None:
    if not count:
        problem = f"dataset.validation: {reason}, so none can be held out; remove it, or use a larger data set"
        raise ExperimentError([problem], experiment.name)


# Test samples


def _own_test_parts(
    data: Data, parts: list[Indices], test_parts: list[Indices] | None, experiment: Experiment
) -> list[Indices] | None:
    """Return the test samples of each node; None if every node is evaluated on all of them.

    `test_parts` are those of the users whose data a node holds, or the samples that it held out.
    """
    plan, validation = experiment.evaluation, _validation(experiment)
    held_out = plan.split == "validation" and validation is not None and validation.per == "node"
    if not held_out and plan.data == "all":
        return None
    own = _proportional_parts(data, parts, experiment) if test_parts is None else test_parts
    without = sum(not len(part) for part in own)
    if without == len(own):
        whose = "classes that the nodes hold" if test_parts is None else "users whose data the nodes hold"
        problem = f"evaluation.data = 'own': this data set has no {plan.split} samples of the {whose}; use "
        raise ExperimentError([problem + "evaluation.data = 'all'"], experiment.name)
    if without:
        warnings.warn(
            f"evaluation: {without} of {len(own)} nodes have no {plan.split} samples of their own, so they have no "
            "scores, and do not count in the mean",
            stacklevel=2,
        )
    return own


def _proportional_parts(data: Data, parts: list[Indices], experiment: Experiment) -> list[Indices]:
    """Return test samples of the classes that each node holds, in the same proportions."""
    if data.task != "classification":
        problem = (
            f"evaluation.data = 'own': with partition {experiment.partition.name!r}, a node's own test samples "
            f"have the proportions of its classes, but a {data.task} task has no classes; use 'natural', or "
            "evaluation.data = 'all'"
        )
        raise ExperimentError([problem], experiment.name)
    rngs = (generator(experiment.seed, "own test samples", node) for node in range(len(parts)))
    counts = _label_counts(data, parts)
    return [proportional_samples(data.test.y, own, rng) for own, rng in zip(counts, rngs, strict=True)]


def _limit_test_samples(
    data: Data, own: list[Indices] | None, experiment: Experiment
) -> tuple[Samples, list[Indices] | None]:
    """Return the samples of an evaluation, and those of each node as indices into them.

    evaluation.samples limits them: each node's own or, if nodes have none of their own, all of them. With a limit, the
    samples of an evaluation are those of any node.
    """
    wanted, test = experiment.evaluation.samples, data.test
    if wanted is None or wanted >= len(test):
        return test, own
    if own is None:
        drawn = generator(experiment.seed, "test samples").choice(len(test), wanted, replace=False)
        return test[np.sort(drawn)], None
    strata, limited = _strata(data, test), []
    for node, part in enumerate(own):
        if len(part) > wanted:
            part = part[take_stratified(strata[part], wanted, generator(experiment.seed, "test samples", node))]
        limited.append(part)
    used = np.unique(np.concatenate(limited))
    return test[used], [np.searchsorted(used, part) for part in limited]


def proportional_samples(labels: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> Indices:
    """Draw the largest subset of samples with these `labels` whose classes have the proportions of `counts`.

    With s the largest real number such that no class c needs more than its samples, class c has s·counts[c]/total
    samples, rounded to the nearest integer. A class without samples is left out. None if every class is.
    """
    available = np.bincount(labels, minlength=len(counts))
    shares = np.where(available > 0, counts, 0)
    if not shares.any():
        return np.arange(0)
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
            scaling = _new_scaling(entry, data, np.concatenate(parts))
            if isinstance(scaling, Scaling):
                data = replace(data, scaling=scaling)
            else:
                problems.append(f"{_place(i, experiment)}: {scaling}")
    augmentations = {i: entry for i, entry in enumerate(entries) if transforms_batches(entry)}
    for i, augmentation in augmentations.items():
        if (problem := _augmentation_problem(augmentation, data)) is not None:
            problems.append(f"{_place(i, experiment)}: {problem}")
    if problems:
        raise ExperimentError(problems, experiment.name)
    return data, list(augmentations.values())


def _new_scaling(entry: Rescaling, data: Data, samples: Indices) -> Scaling | str:
    """Return the scaling of all inputs, or what is wrong with it."""
    if data.sizes:
        return "the inputs of this data set are ids, which cannot be scaled"
    try:
        scaling = entry.input_scaling(data, samples)
    except ValueError as error:
        return str(error)
    except Exception as error:  # a plug-in may raise anything
        return f"input_scaling raised {type(error).__name__}: {error}"
    if not isinstance(scaling, Scaling):
        return f"input_scaling returned {scaling!r}; expected a shoal.data.Scaling"
    try:
        mean, std = np.array(scaling.mean, np.float64), np.array(scaling.std, np.float64)
    except (TypeError, ValueError):
        mean = std = np.array(np.nan)
    fits = mean.shape == std.shape and mean.shape in ((1,), data.shape[:1])
    if not fits or not (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all():
        return (
            f"input_scaling returned {scaling!r} for inputs of shape {list(data.shape)}; expected two tuples of finite "
            "numbers, one number for all values or one for each entry of the first axis, with std above 0"
        )
    return scaling


def _place(i: int, experiment: Experiment) -> str:
    return f"dataset.augmentation[{i}] = {experiment.augmentation[i].name!r}"


def _augmentation_problem(augmentation: Augmentation, data: Data) -> str | None:
    """Apply an augmentation to two inputs, and describe what is wrong with the result."""
    import torch

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
