"""A keyed permutation of 0 … size - 1 that computes single values, forwards and backwards.

A Feistel network on the row and column of a number in a near-square table of at least `size` cells. A result of `size`
or more passes through the network again until it is below ("cycle walking"). Black and Rogaway: Ciphers with Arbitrary
Finite Domains, CT-RSA 2002. It mixes well; it is not cryptographically secure.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = tuple[int, int, int, int]
"""One 32-bit key for each round of the network."""

_UINT64_MASK = (1 << 64) - 1


def hash32(x: Any) -> Any:
    """Hash a 32-bit integer, or each in an array of uint64, to 32 bits, with the multipliers of murmur3."""
    x = x * 0xFF51AFD7ED558CCD & _UINT64_MASK
    x = (x ^ (x >> 32)) * 0xC4CEB9FE1A85EC53 & _UINT64_MASK
    return x >> 32


class Permutation:
    """The permutation of `range(size)` with these keys."""

    def __init__(self, size: int, keys: Keys) -> None:
        self.size = size
        self._keys = keys
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)

    def forward(self, x: int) -> int:
        x = self._forward(x)
        while x >= self.size:
            x = self._forward(x)
        return x

    def inverse(self, x: int) -> int:
        x = self._inverse(x)
        while x >= self.size:
            x = self._inverse(x)
        return x

    def all_values(self) -> npt.NDArray[np.int64]:
        """Return `forward` of every value."""
        x: npt.NDArray[np.uint64] = self._forward(np.arange(self.size, dtype=np.uint64))
        outside = np.flatnonzero(x >= self.size)
        while outside.size:
            x[outside] = self._forward(x[outside])
            outside = outside[x[outside] >= self.size]
        return x.astype(np.int64)

    def _forward(self, x: Any) -> Any:
        """Pass an integer or an array of uint64 through the network once."""
        rows, columns = self._rows, self._columns
        k0, k1, k2, k3 = self._keys
        row, column = x // columns, x % columns
        row = (row + hash32(column ^ k0)) % rows
        column = (column + hash32(row ^ k1)) % columns
        row = (row + hash32(column ^ k2)) % rows
        column = (column + hash32(row ^ k3)) % columns
        return row * columns + column

    def _inverse(self, x: int) -> int:
        rows, columns = self._rows, self._columns
        k0, k1, k2, k3 = self._keys
        row, column = divmod(x, columns)
        column = (column - hash32(row ^ k3)) % columns
        row = (row - hash32(column ^ k2)) % rows
        column = (column - hash32(row ^ k1)) % columns
        row = (row - hash32(column ^ k0)) % rows
        return int(row * columns + column)
