"""The conformance suite of partitions: run it on yours, and it works with every data set.

    def test_my_partition():
        check_partition(MyPartition(alpha=0.3), labels=np.arange(1000) % 10, nodes=20)

Failures are AssertionErrors that name the node and what was found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, Partition
from shoal.errors import DataError
from shoal.randomness import generator


def check_partition(
    partition: Partition, labels: NDArray[np.int64], nodes: int, seed: int = 0, covering: bool = True
) -> None:
    """Assert that `partition` keeps its contract for these labels, which it must be able to split.

    `covering` is for labels of which it says that every sample is given to someone.
    """
    parts = _split(partition, labels, nodes, seed)
    assert len(parts) == nodes, f"{partition} made {len(parts)} parts for {nodes} nodes"
    for node, indices in enumerate(parts):
        _check_indices(f"{partition}, node {node}", indices, len(labels))

    owners = np.bincount(np.concatenate(parts), minlength=len(labels))
    shared = np.flatnonzero(owners > 1)
    assert not len(shared), f"{partition} gave {len(shared)} samples to more than one node: {_some(shared)}"
    unowned = np.flatnonzero(owners == 0)
    assert not covering or not len(unowned), f"{partition} gave {len(unowned)} samples to nobody: {_some(unowned)}"

    again = _split(partition, labels, nodes, seed)
    for node, (before, after) in enumerate(zip(parts, again, strict=True)):
        assert np.array_equal(before, after), f"{partition}, node {node}: split twice from seed {seed}, parts differ"

    too_few = labels[: nodes - 1]
    try:
        _split(partition, too_few, nodes, seed)
    except DataError:
        return
    raise AssertionError(f"{partition} split {len(too_few)} samples over {nodes} nodes; expected a DataError")


def _split(partition: Partition, labels: NDArray[np.int64], nodes: int, seed: int) -> list[Indices]:
    given = labels.copy()
    parts = partition.split(given, nodes, generator(seed, "partition"))
    assert np.array_equal(given, labels), f"{partition} changed the labels it was given"
    return parts


def _check_indices(who: str, indices: Indices, samples: int) -> None:
    assert isinstance(indices, np.ndarray), f"{who}: a part is a {type(indices).__name__}; expected an array"
    assert indices.ndim == 1, f"{who}: indices have shape {indices.shape}; expected one dimension"
    assert indices.dtype == np.int64, f"{who}: indices are {indices.dtype}; expected int64"
    assert len(indices), f"{who}: it holds no sample"
    lowest, highest = indices.min(), indices.max()
    assert lowest >= 0, f"{who}: index {lowest} is below 0"
    assert highest < samples, f"{who}: index {highest}; there are {samples} samples"


def _some(indices: Indices) -> str:
    return ", ".join(map(str, indices[:5])) + (", …" if len(indices) > 5 else "")
