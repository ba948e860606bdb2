"""Real numbers as integers modulo 2³² or 2⁶⁴: their sums are exact in any order, so masks cancel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.types import Params

RingVector: TypeAlias = NDArray[Any]
"""Integers modulo 2³² or 2⁶⁴, as uint32 or uint64."""


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point numbers of `bits` bits for values from −`range` to `range`.

    A value v becomes the integer closest to v · 2^(bits − 2) / range. One bit is the sign. One bit stays free: a sum
    whose weights add up to at most 1 cannot wrap, even with the rounding error of up to 2^(bits − 2) terms. The error
    of a 32-bit term is at most half of 2^−30 of the range. The error of a 64-bit term is that of its product in double
    precision, at most 2^−53 of the range.
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
        """Return a value that cannot be encoded: the largest one, or NaN. None if all can be encoded."""
        if values.size == 0:
            return None
        least, most = float(values.min()), float(values.max())
        if max(most, -least) <= self.range:
            return None
        if np.isnan(most):
            return most
        return most if most >= -least else least

    def encode(self, values: Params, weight: float) -> RingVector:
        """Return `weight` (0 to 1) times `values`. No value may be `outside`."""
        scaled = np.multiply(values, weight * self.scale, dtype=np.float64)
        np.rint(scaled, out=scaled)
        return scaled.astype(f"<i{self.bits // 8}").view(self.dtype)

    def decode(self, encoded: RingVector) -> NDArray[np.float64]:
        signed = encoded.view(f"<i{self.bits // 8}")
        return signed / np.float64(self.scale)
