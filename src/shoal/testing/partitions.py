"""The conformance suite of partitions. A partition that passes works with every data set.

    def test_my_partition():
        check_partition(MyPartition(alpha=0.3), labels=np.arange(1000) % 10, nodes=20)

Failures are AssertionErrors that name the node and the problem.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, OwnerPartition, Partition, Samples
from shoal.errors import DataError
from shoal.randomness import generator


def check_partition(
    partition: Partition | OwnerPartition,
    labels: NDArray[np.int64],
    nodes: int,
    seed: int = 0,
    covering: bool = True,
    owners: Indices | None = None,
) -> None:
    """Assert that `partition` keeps its contract for these labels, which it must be able to split.

    With `covering`, every sample must belong to a node. `owners` are the owners of the samples, for a partition that
    uses them; by default every sample has its own owner.
    """
    owners = np.arange(len(labels)) if owners is None else owners
    test_owners = np.append(
        owners[::3], owners.max(initial=0) + 1
    )  # some owners lack test samples, one lacks training samples
    parts, tests = _split(partition, labels, owners, test_owners, nodes, seed)
    assert len(parts) == nodes, f"{partition} made {len(parts)} parts for {nodes} nodes"
    for node, indices in enumerate(parts):
        _check_indices(f"{partition}, node {node}", indices, len(labels))
        assert len(indices), f"{partition}, node {node}: it has no sample"

    holders = np.bincount(np.concatenate(parts), minlength=len(labels))
    shared = np.flatnonzero(holders > 1)
    assert not len(shared), f"{partition} gave {len(shared)} samples to more than one node: {_first_few(shared)}"
    unowned = np.flatnonzero(holders == 0)
    assert not covering or not len(unowned), (
        f"{partition} gave {len(unowned)} samples to no node: {_first_few(unowned)}"
    )
    if tests is not None:
        _check_tests(partition, parts, tests, owners, test_owners)

    again = _split(partition, labels, owners, test_owners, nodes, seed)
    for kind, first, second in (("parts", parts, again[0]), ("test samples", tests or [], again[1] or [])):
        for node, (before, after) in enumerate(zip(first, second, strict=True)):
            assert np.array_equal(before, after), (
                f"{partition}, node {node}: split twice from seed {seed}, {kind} differ"
            )

    too_few = labels[: nodes - 1]
    try:
        _split(partition, too_few, owners[: nodes - 1], test_owners, nodes, seed)
    except DataError:
        return
    raise AssertionError(f"{partition} split {len(too_few)} samples over {nodes} nodes; expected a DataError")


def _split(
    partition: Partition | OwnerPartition,
    labels: NDArray[np.int64],
    owners: Indices,
    test_owners: Indices,
    nodes: int,
    seed: int,
) -> tuple[list[Indices], list[Indices] | None]:
    given, rng = labels.copy(), generator(seed, "partition")
    tests = None
    if isinstance(partition, OwnerPartition):
        train = Samples(np.zeros((len(labels), 1), np.float32), given, owners.copy())
        test = Samples(np.zeros((len(test_owners), 1), np.float32), np.zeros(len(test_owners), np.int64), test_owners)
        parts, tests = partition.split_owned(train, test, nodes, rng)
        assert train.owner is None or np.array_equal(train.owner, owners), f"{partition} changed the owners"
    else:
        parts = partition.split(given, nodes, rng)
    assert np.array_equal(given, labels), f"{partition} changed the labels it was given"
    return parts, tests


def _check_tests(
    partition: OwnerPartition | Partition,
    parts: list[Indices],
    tests: list[Indices],
    owners: Indices,
    test_owners: Indices,
) -> None:
    assert len(tests) == len(parts), f"{partition} gave test samples to {len(tests)} nodes, of {len(parts)}"
    for node, (part, own) in enumerate(zip(parts, tests, strict=True)):
        _check_indices(f"{partition}, test samples of node {node}", own, len(test_owners))
        foreign = np.setdiff1d(test_owners[own], owners[part])
        assert not len(foreign), (
            f"{partition}, node {node}: it has test samples of {_first_few(foreign)}, but no training samples of them"
        )
    holders = np.bincount(np.concatenate(tests), minlength=len(test_owners))
    shared = np.flatnonzero(holders > 1)
    assert not len(shared), f"{partition} gave {len(shared)} test samples to more than one node: {_first_few(shared)}"


def _check_indices(who: str, indices: Indices, samples: int) -> None:
    assert isinstance(indices, np.ndarray), f"{who}: a part is a {type(indices).__name__}; expected an array"
    assert indices.ndim == 1, f"{who}: indices have shape {indices.shape}; expected one dimension"
    assert indices.dtype == np.int64, f"{who}: indices are {indices.dtype}; expected int64"
    if len(indices):
        lowest, highest = indices.min(), indices.max()
        assert lowest >= 0, f"{who}: index {lowest} is below 0"
        assert highest < samples, f"{who}: index {highest}; there are {samples} samples"


def _first_few(indices: Indices) -> str:
    return ", ".join(map(str, indices[:5])) + (", …" if len(indices) > 5 else "")
