"""Slices of a model in messages: how they are encoded, checked and averaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload, Scalar
from shoal.types import NodeId, Params

ABSENT, SAMPLES = "absent", "samples"
PARTITIONS, VALUES, WEIGHTS = "partitions", "values", "weights"
MAX_WEIGHT = 2**53
"""The largest weight: the product with any float32 is finite as a float64."""


@dataclass(frozen=True)
class Update:
    """The slices that a node sends after training."""

    absent: frozenset[NodeId]
    """The nodes that the sender takes to be absent. It assigns the roles of this round without them."""
    weight: float
    slices: Mapping[int, Params]


@dataclass(frozen=True)
class WeightedSlices:
    """Averages of slices and the total weight behind each, by partition.

    An average and its weight hold the same information as a sum and its weight, and cannot overflow.
    """

    slices: Mapping[int, Params]
    weights: Mapping[int, float]

    def payload(self, partitions: Iterable[int]) -> Payload:
        """Encode the available slices among `partitions`."""
        slices = {p: self.slices[p] for p in sorted(partitions) if p in self.slices}
        weights = np.array([self.weights[p] for p in slices])
        return Payload({**_encode(slices), WEIGHTS: weights} if slices else {})


def average(received: Mapping[NodeId, WeightedSlices]) -> WeightedSlices:
    """Average by weight, in ascending order of nodes, so that all replicas of a partition get the same bits."""
    totals: dict[int, NDArray[np.float64]] = {}
    weights: dict[int, float] = {}
    for _, each in sorted(received.items()):
        for p, values in each.slices.items():
            weighted = values.astype(np.float64) * each.weights[p]
            totals[p] = totals[p] + weighted if p in totals else weighted
            weights[p] = weights.get(p, 0.0) + each.weights[p]
    return WeightedSlices({p: (total / weights[p]).astype(np.float32) for p, total in totals.items()}, weights)


class Partitioning:
    """A model of `size` parameters, cut into partitions of nearly equal size, for `nodes` nodes."""

    def __init__(self, size: int, partitions: int, nodes: int) -> None:
        self.count = partitions
        self._nodes = nodes
        self._bounds = [p * size // partitions for p in range(partitions + 1)]

    def slice(self, params: Params, partition: int) -> Params:
        """Return the part of `params` in `partition`: a view."""
        return params[self._bounds[partition] : self._bounds[partition + 1]]

    def slices(self, params: Params, partitions: Iterable[int]) -> dict[int, Params]:
        return {p: self.slice(params, p) for p in partitions}

    def encode_update(self, update: Update, *, with_samples: bool) -> Payload:
        fields: dict[str, Scalar] = {SAMPLES: int(update.weight)} if with_samples else {}
        absent = {ABSENT: self._encode_absent(update.absent)} if update.absent else {}
        return Payload({**_encode(update.slices), **absent}, fields)

    def decode_weight(self, payload: Payload) -> int:
        """Return the sender's number of samples. Raises `MessageError`."""
        samples = payload.fields.get(SAMPLES)
        if type(samples) is not int or not 1 <= samples <= MAX_WEIGHT:
            raise MessageError(f"samples = {samples!r}: expected an integer, at least 1")
        return samples

    def decode_absent(self, payload: Payload) -> frozenset[NodeId]:
        """Return the nodes that the sender takes to be absent. Raises `MessageError`."""
        bits = payload.arrays.get(ABSENT)
        if bits is None:
            return frozenset()
        if bits.dtype != np.uint8 or bits.shape != ((self._nodes + 7) // 8,):
            raise MessageError(f"expected one bit of {ABSENT!r} for each of {self._nodes} nodes")
        return frozenset(np.flatnonzero(np.unpackbits(bits, count=self._nodes)).tolist())

    def decode_weighted(self, payload: Payload, expected: Collection[int]) -> WeightedSlices:
        """Return slices of the `expected` partitions with their weights. Raises `MessageError`."""
        slices = self.decode_slices(payload, expected)
        weights = payload.arrays.get(WEIGHTS, np.empty(0))
        if weights.dtype != np.float64 or weights.shape != (len(slices),):
            raise MessageError(f"expected {len(slices)} float64 weights")
        if not ((weights > 0) & (weights <= MAX_WEIGHT)).all():
            raise MessageError(f"expected weights above 0 and at most {MAX_WEIGHT}")
        return WeightedSlices(slices, dict(zip(slices, weights.tolist(), strict=True)))

    def decode_slices(self, payload: Payload, expected: Collection[int]) -> dict[int, Params]:
        """Return the slices by partition, in ascending order: all, some or none of those `expected`.

        Raises `MessageError`.
        """
        if PARTITIONS not in payload.arrays:
            return {}
        numbers, values = payload.arrays[PARTITIONS], payload.arrays.get(VALUES)
        if numbers.dtype != np.int32 or numbers.ndim != 1:
            raise MessageError("expected partitions as an int32 vector")
        partitions: list[int] = numbers.tolist()  # a short list: faster than NumPy
        if any(p >= after for p, after in pairwise(partitions)):
            raise MessageError("expected partitions in ascending order")
        if unexpected := set(partitions).difference(expected):
            raise MessageError(f"partition {min(unexpected)}: not expected from this sender")
        ends = [*accumulate((self._bounds[p + 1] - self._bounds[p] for p in partitions), initial=0)]
        if values is None or values.dtype != np.float32 or values.shape != (ends[-1],):
            raise MessageError(f"expected {ends[-1]} float32 values for {len(partitions)} partitions")
        return {p: values[start:end] for p, (start, end) in zip(partitions, pairwise(ends), strict=True)}

    def _encode_absent(self, absent: frozenset[NodeId]) -> NDArray[np.uint8]:
        """Encode a set of nodes as one bit per node."""
        marked = np.zeros(self._nodes, np.bool_)
        marked[list(absent)] = True
        return np.packbits(marked)


def _encode(slices: Mapping[int, Params]) -> dict[str, NDArray[Any]]:
    """Encode slices in ascending order of partitions. No slices take no arrays."""
    if not slices:
        return {}
    partitions = sorted(slices)
    return {PARTITIONS: np.array(partitions, np.int32), VALUES: np.concatenate([slices[p] for p in partitions])}
