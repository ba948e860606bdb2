"""Real numbers as whole ones modulo 2³² or 2⁶⁴: sums of these are exact, whatever their order, so masks cancel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.types import Params

Words: TypeAlias = NDArray[Any]
"""Elements of a ring: uint32 or uint64, whose arithmetic is that modulo 2³² or 2⁶⁴."""


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point numbers of `bits` bits for values of −`range` to `range`.

    A value v is the whole number next to v · 2^(bits − 2) / range. One bit is the sign's; one is left free, so that a
    sum whose weights add up to 1 at most cannot wrap, not even with what rounding adds to each of up to 2^(bits − 2)
    terms. A term of 32 bits is off by half of 2^−30 of the range, at most; one of 64 by what its product in double
    precision is off, at most 2^−53 of the range.
    """

    bits: Literal[32, 64]
    range: float

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def scale(self) -> float:
        return 2.0 ** (self.bits - 2) / self.range

    def outside(self, values: Params) -> float | None:
        """A value that cannot be encoded: the largest, or one that is not a number. None where all can."""
        if values.size == 0:
            return None
        least, most = float(values.min()), float(values.max())
        if max(most, -least) <= self.range:
            return None
        if np.isnan(most):
            return most
        return most if most >= -least else least

    def encode(self, values: Params, weight: float) -> Words:
        """`weight` (0 to 1) times `values`, none of which is `outside`."""
        scaled = np.multiply(values, weight * self.scale, dtype=np.float64)
        np.rint(scaled, out=scaled)
        return scaled.astype(f"<i{self.bits // 8}").view(self.dtype)

    def decode(self, words: Words) -> NDArray[np.float64]:
        signed = words.view(f"<i{self.bits // 8}")
        return signed / np.float64(self.scale)
