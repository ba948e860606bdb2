"""A keyed permutation of 0 … size - 1 that can be asked for one value at a time, forwards and backwards.

A Feistel network on the row and column of a number in a near-square table of at least `size` places; what
lands at `size` or beyond is sent through again until it lands below ("cycle walking"). Black and Rogaway:
Ciphers with Arbitrary Finite Domains, CT-RSA 2002. It mixes well; it keeps no secrets.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = tuple[int, int, int, int]
"""One for each round of the network, of 32 bits."""

_WORD = (1 << 64) - 1


def scramble(x: Any) -> Any:
    """32 well-mixed bits of a 32-bit integer, or of each in an array of uint64; murmur3's multipliers."""
    x = x * 0xFF51AFD7ED558CCD & _WORD
    x = (x ^ (x >> 32)) * 0xC4CEB9FE1A85EC53 & _WORD
    return x >> 32


class Permutation:
    """The permutation of `range(size)` that these keys choose."""

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

    def to_table(self) -> npt.NDArray[np.int64]:
        """`forward` of every value at once."""
        x: npt.NDArray[np.uint64] = self._forward(np.arange(self.size, dtype=np.uint64))
        outside = np.flatnonzero(x >= self.size)
        while outside.size:
            x[outside] = self._forward(x[outside])
            outside = outside[x[outside] >= self.size]
        return x.astype(np.int64)

    def _forward(self, x: Any) -> Any:
        """One pass through the network, of an integer or of an array of uint64."""
        rows, columns = self._rows, self._columns
        k0, k1, k2, k3 = self._keys
        row, column = x // columns, x % columns
        row = (row + scramble(column ^ k0)) % rows
        column = (column + scramble(row ^ k1)) % columns
        row = (row + scramble(column ^ k2)) % rows
        column = (column + scramble(row ^ k3)) % columns
        return row * columns + column

    def _inverse(self, x: int) -> int:
        rows, columns = self._rows, self._columns
        k0, k1, k2, k3 = self._keys
        row, column = divmod(x, columns)
        column = (column - scramble(row ^ k3)) % columns
        row = (row - scramble(column ^ k2)) % rows
        column = (column - scramble(row ^ k1)) % columns
        row = (row - scramble(column ^ k0)) % rows
        return int(row * columns + column)
