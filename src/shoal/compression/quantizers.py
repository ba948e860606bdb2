"""Codecs that round each value to a level relative to its block: `Int8` and `QSGD`.

By default they round stochastically, so that the expected decoded value is the encoded value. The random numbers come
from the sender's generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.compression.bits import pack, packed_size, unpack
from shoal.compression.floats import FLOAT32_MAX, read_row
from shoal.errors import MessageError
from shoal.types import Bounds, Params


@dataclass(frozen=True)
class Int8:
    """Integers from -127 to 127, relative to the largest magnitude of each block; unbiased by default.

    A value changes by less than 1/127 of the largest magnitude of its block. `unbiased = false` rounds to the nearest
    integer and halves that limit.
    """

    lossless: ClassVar[bool] = False

    block: Annotated[int, Bounds(at_least=1)] = 256
    unbiased: bool = True

    @property
    def stochastic(self) -> bool:
        return self.unbiased

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        rows = _to_rows(values, self.block)
        rows, peaks, finite = _zero_non_finite(rows, np.abs(rows).max(axis=1, initial=0))
        levels = _to_levels(rows, peaks, 127, require_generator(rng) if self.unbiased else None)
        return {"values": levels.astype(np.int8)[: values.size], "scale": _with_nan(peaks, finite)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        codes = read_row(arrays, "values", "|i1", count)
        peaks = _read_scale(arrays, count, self.block)
        if count and codes.min() < -127:
            raise MessageError("array 'values' holds -128, expected -127 to 127")
        return _apply_scale(codes.astype(np.float32), 127, peaks, self.block)


@dataclass(frozen=True)
class QSGD:
    """Alistarh et al. 2017, QSGD: a sign and one of `levels` fractions of the l2 norm of the bucket; unbiased.

    A value needs 1 bit plus the bits of `levels`: 8 bits for 127 levels, 4 for 7. It changes by less than 1/levels of
    its bucket's norm. Levels are packed with equal width; the Elias code of the paper is not used.
    """

    lossless: ClassVar[bool] = False
    stochastic: ClassVar[bool] = True

    levels: Annotated[int, Bounds(at_least=1, at_most=2**15 - 1)] = 127
    bucket: Annotated[int, Bounds(at_least=1)] = 512

    @property
    def width(self) -> int:
        """The bits of a value: its level, from -levels to levels."""
        return (2 * self.levels).bit_length()

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        rows = _to_rows(values, self.bucket)
        # The rounding is unbiased for any norm of at least the largest magnitude. So the norm may be limited to the
        # range of float32, and it is increased by more than its rounding error.
        rows, norms, finite = _zero_non_finite(rows, _norms(rows))
        norms = np.minimum(norms * (1 + 2.0**-22), FLOAT32_MAX).astype(np.float32)
        codes = _to_levels(rows, norms, self.levels, require_generator(rng))[: values.size]
        codes += np.float32(self.levels)
        return {"values": pack(codes, self.width), "scale": _with_nan(norms, finite)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        code = read_row(arrays, "values", "|u1", packed_size(count, self.width))
        norms = _read_scale(arrays, count, self.bucket)
        codes = unpack(code, count, self.width)
        if count and codes.max() > 2 * self.levels:
            raise MessageError(f"array 'values' holds level {codes.max()}, expected at most {2 * self.levels}")
        return _apply_scale(codes.astype(np.float32) - np.float32(self.levels), self.levels, norms, self.bucket)


def require_generator(rng: np.random.Generator | None) -> np.random.Generator:
    """Return `rng`. Raises ValueError if it is None."""
    if rng is None:
        raise ValueError("a stochastic codec needs a generator; rng is None")
    return rng


def _to_rows(values: Params, width: int) -> Params:
    """Return `values` in rows of `width`, or in one row if there are fewer; zeros fill the last row."""
    width = min(width, max(1, values.size))
    rows = -(-values.size // width)
    if rows * width == values.size:
        return values.reshape(rows, width)
    padded = np.empty(rows * width, np.float32)
    padded[: values.size] = values
    padded[values.size :] = 0
    return padded.reshape(rows, width)


def _zero_non_finite(rows: Params, scale: NDArray[Any]) -> tuple[Params, NDArray[Any], NDArray[np.bool_]]:
    """Replace rows with NaN or infinity, and their scales, by zeros. Returns which rows were finite as well."""
    finite = np.isfinite(scale)
    if not finite.all():
        rows, scale = np.where(finite[:, None], rows, np.float32(0)), np.where(finite, scale, scale.dtype.type(0))
    return rows, scale, finite


def _with_nan(scale: Params, finite: NDArray[np.bool_]) -> Params:
    """Set the scale of non-finite rows to NaN: they decode to NaN, so that a diverged model is visible."""
    return scale if finite.all() else np.where(finite, scale, np.float32(np.nan))


def _norms(rows: Params) -> NDArray[Any]:
    """Return the l2 norm of each row. Doubles, which are slower, serve only if squares exceed the range of floats."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares: NDArray[Any] = np.einsum("ij,ij->i", rows, rows)
        out_of_range = ~((squares > 1e-30) & (squares <= FLOAT32_MAX))
        if out_of_range.any():
            squares = squares.astype(np.float64)
            squares[out_of_range] = np.einsum(
                "ij,ij->i", rows[out_of_range], rows[out_of_range], dtype=np.float64, casting="unsafe"
            )
        norms: NDArray[Any] = np.sqrt(squares)
    return norms


def _to_levels(rows: Params, scale: Params, levels: int, rng: np.random.Generator | None) -> Params:
    """Return each value as an integer from -levels to levels, relative to the scale of its row, in one vector.

    No value may exceed its scale. Without `rng`, rounds to the nearest integer. With `rng`, adds a random number of 16
    bits from 0 to 1 and rounds down: the expected result is exact to 2**-17 of a level, the precision of float32 for
    127 levels.
    """
    tiny = scale < 2.0**-64
    if tiny.any():  # their inverse could be infinite; a scale of 0 becomes 1, as all values of its row are 0
        rows, scale = rows.copy(), scale.copy()
        rows[tiny] *= np.float32(2.0**64)
        scale[tiny] *= np.float32(2.0**64)
        scale[scale == 0] = 1
    parts = 1 if rng is None else 2**16
    factors = np.nextafter(np.float32(levels * parts) / scale, np.float32(0))  # no product exceeds levels * parts
    numbers: Params = (rows * factors[:, None]).reshape(-1)
    if rng is None:
        return np.rint(numbers, out=numbers)
    words = rng.bit_generator.random_raw(-(-rows.size // 4)).astype("<u8", copy=False)
    numbers += words.view("<u2")[: rows.size]  # below 2**23, where float32 is exact to a half, for 127 levels
    numbers *= np.float32(1 / parts)
    np.floor(numbers, out=numbers)
    return numbers if levels <= 127 else np.minimum(numbers, np.float32(levels), out=numbers)


def _read_scale(arrays: Mapping[str, NDArray[Any]], count: int, block: int) -> Params:
    """Return the array 'scale': a number of at least 0 for each block, or NaN if its values were not finite."""
    scale = read_row(arrays, "scale", "<f4", -(-count // block))
    if (scale < 0).any() or np.isinf(scale).any():
        raise MessageError("array 'scale' holds a number that is negative or infinite")
    return scale


def _apply_scale(numbers: Params, levels: int, scale: Params, block: int) -> Params:
    """Invert `_to_levels` for rows of `block`, in place. Returns `numbers`."""
    numbers /= np.float32(levels)  # before the scale, because the product could overflow
    whole = numbers.size // block * block
    numbers[:whole].reshape(-1, block)[...] *= scale[: whole // block, None]
    numbers[whole:] *= scale[-1:]
    return numbers
