"""For algorithms that send a model in parts: which parameters are in which part, and averages of what has come."""

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
    """The parameters of a model, each in one of several fragments. All nodes know them, so only values are sent."""

    positions: tuple[NDArray[np.intp], ...]
    """Of each fragment: where its parameters lie in the flat vector, in ascending order. Some may be empty, where there
    are more fragments than a tensor has values."""

    def __len__(self) -> int:
        return len(self.positions)

    def payload(self, params: Params, number: int) -> Payload:
        """Fragment `number` of a model, as it is sent; its values are read-only, so that all recipients share them."""
        values = params.take(self.positions[number])
        values.flags.writeable = False
        return Payload({VALUES: values}, {NUMBER: number})

    def check(self, payload: Payload, expected: int | None = None) -> None:
        """Raise `MessageError` for what is no fragment of this model, or another than the one expected."""
        number = payload.fields.get(NUMBER)
        if type(number) is not int or not 0 <= number < len(self):
            raise MessageError(f"{NUMBER} = {number!r}: expected a number from 0 to {len(self) - 1}")
        if expected is not None and number != expected:
            raise MessageError(f"{NUMBER} = {number}: expected {expected}")
        check_vectors(payload, self.positions[number].size, (VALUES,))

    def average(self, own: Params, received: Mapping[int, Sequence[Params]]) -> Params:
        """`own`, each parameter averaged alike with all values that came for it; `received` is by fragment.

        x[p] ← (x[p] + Σ v[p]) / (1 + how many cover p). Who covers one parameter of a fragment covers all of it, so
        there is one count for each fragment.
        """
        averaged = own.copy()
        for number, several in received.items():
            if several:
                positions = self.positions[number]
                total = own.take(positions).astype(np.float64)  # where the sum of finite values is finite
                for values in several:
                    total += values
                averaged[positions] = total / (1 + len(several))
        return averaged


@lru_cache(maxsize=8)
def cut(shapes: tuple[tuple[int, ...], ...], count: int, seed: int) -> Fragments:
    """`count` fragments of a model with tensors of these shapes: the same wherever the seed is.

    Every tensor is permuted by a permutation of its own and cut into `count` parts, whose sizes differ by one at most;
    a fragment has one part of each tensor.
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
        each.flags.writeable = False
    return Fragments(tuple(positions))
