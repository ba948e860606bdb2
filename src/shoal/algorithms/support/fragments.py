"""Fragments of a model, for algorithms that send a model in parts: their parameters, payloads and averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.randomness import generator
from shoal.types import Params

NUMBER = "fragment"
VALUES = "values"


@dataclass(frozen=True, eq=False)
class Fragments:
    """A partition of a model's parameters into fragments. All nodes know it, so only values are sent."""

    positions: tuple[NDArray[np.intp], ...]
    """The positions of each fragment's parameters in the flat vector, in ascending order. A fragment may be empty if
    every tensor has fewer values than there are fragments."""

    def __len__(self) -> int:
        return len(self.positions)

    def payload(self, params: Params, number: int) -> Payload:
        """Return fragment `number` of a model as a payload. Its read-only values are shared by all receivers."""
        values = params.take(self.positions[number])
        values.setflags(write=False)
        return Payload({VALUES: values}, {NUMBER: number})

    def check(self, payload: Payload, expected: int | None = None) -> None:
        """Raise `MessageError` unless the payload is a fragment of this model, and the expected one."""
        number = payload.fields.get(NUMBER)
        if type(number) is not int or not 0 <= number < len(self):
            raise MessageError(f"{NUMBER} = {number!r}: expected a number from 0 to {len(self) - 1}")
        if expected is not None and number != expected:
            raise MessageError(f"{NUMBER} = {number}: expected {expected}")
        check_vectors(payload, self.positions[number].size, (VALUES,))

    def average(self, own: Params, received: Mapping[int, Sequence[Params]]) -> Params:
        """Average each parameter of `own` with its received values, with equal weights; `received` is by fragment.

        x[p] ← (x[p] + Σ v[p]) / (1 + number of values of p). A sender of one parameter of a fragment sends all of them,
        so there is one count per fragment.
        """
        averaged = own.copy()
        for number, several in received.items():
            if several:
                positions = self.positions[number]
                total = own.take(positions).astype(np.float64)  # so that sums of finite values stay finite
                for values in several:
                    total += values
                averaged[positions] = total / (1 + len(several))
        return averaged


@lru_cache(maxsize=8)
def cut(shapes: tuple[tuple[int, ...], ...], count: int, seed: int) -> Fragments:
    """Cut a model with tensors of these shapes into `count` fragments, the same on every node with this seed.

    Every tensor is permuted by its own permutation and cut into `count` parts, whose sizes differ by at most one; a
    fragment has one part of each tensor.
    """
    sizes = [math.prod(shape) for shape in shapes]
    fragment_of = np.empty(sum(sizes), np.int64)
    start = 0
    for tensor, size in enumerate(sizes):
        order = generator(seed, "fragments", tensor).permutation(size)
        fragment_of[start + order] = np.arange(size) * count // max(1, size)
        start += size
    ends = np.cumsum(np.bincount(fragment_of, minlength=count))
    positions = np.split(np.argsort(fragment_of, kind="stable"), ends[:-1])
    for each in positions:
        each.setflags(write=False)
    return Fragments(tuple(positions))
