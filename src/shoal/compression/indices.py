"""Codecs of sets of positions.

A set of positions is encoded by its gaps. Sender and receiver know the number of positions and the size of the vector,
so the code contains neither. A code is accepted only if it is exactly the one that `encode` writes for its positions.

No function loops over positions: data of variable length is split into a section of unary lengths, whose ends one bit
search finds, and sections of plain bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.compression.bits import Bytes, packed_size
from shoal.errors import MessageError

Positions: TypeAlias = NDArray[np.int64]

_Number = TypeVar("_Number", int, NDArray[np.int64])

MAX_SIZE = 2**48
"""Positions lie below this, so that sums of gaps are exact in doubles."""


class IndexCodec(Protocol):
    """Encodes a set of positions. It has no state: one instance serves all nodes."""

    def encode(self, positions: Positions, size: int) -> Bytes:
        """Return the code of `positions`. Raises ValueError unless they strictly increase within [0, size)."""
        ...

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        """Return the `count` positions below `size` that `encode` turned into `code`.

        `code` and `count` may come from the network; `size` is the receiver's own. Raises `MessageError` for anything
        that `encode` does not write. The memory is at most proportional to `size`.
        """
        ...


@dataclass(frozen=True)
class GolombRice:
    """Rice 1979: each gap as a quotient in unary and a remainder in bits; each run of about 64 gaps has its own width.

    The code is within 3 % of the entropy of a random set, and no set of equal count needs much more. Sets that are
    dense in some places and sparse in others, such as the largest changes of a model, need less. If more than half of
    all positions are in the set, the missing ones are encoded, so that all positions, like none, need no byte.

    The code, in bits: for each run its number of remainder bits, the lowest bits of all first; bit 0 of the remainders
    that have one, then bit 1, and so on, runs with the most bits first; the quotients. Runs have equal length, except
    the last one, whose remainders are padded with zeros.
    """

    RUN: ClassVar[int] = 64

    def encode(self, positions: Positions, size: int) -> Bytes:
        gaps = _gaps(positions, size)
        if 2 * positions.size > size:
            positions = _complement(positions, size)
            gaps = _gaps(positions, size)
        if not gaps.size:
            return np.empty(0, np.uint8)
        runs, length = self._runs(gaps.size)
        widths = self._widths(positions)
        order, having = _by_width(widths)
        filled = np.zeros((runs, length), np.int64)
        rest = np.subtract(gaps, 1, out=filled.reshape(-1)[: gaps.size])
        sections = [((widths >> np.arange(self._width_bits(size))[:, None]) & 1).astype(np.uint8).reshape(-1)]
        for bit, some in enumerate(having):
            if bit % 8 == 0:
                octets = (filled >> bit).astype(np.uint8)[order]
            sections.append((octets[:some] & np.uint8(1 << bit % 8)).reshape(-1))  # packbits: non-zero is one
        sections.append(_unary(rest >> np.repeat(widths, length)[: gaps.size]))
        return np.packbits(np.concatenate(sections))

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        _check(code, count, size)
        if 2 * count > size:
            return _complement(self._decode_sparse(code, size - count, size), size)
        return self._decode_sparse(code, count, size)

    def _decode_sparse(self, code: Bytes, count: int, size: int) -> Positions:
        if not count:
            _expect_size(code, 0)
            return np.empty(0, np.int64)
        (runs, length), width_bits = self._runs(count), self._width_bits(size)
        shortest = packed_size(runs * width_bits, 1)
        longest = packed_size(runs * width_bits + 2 * size, 1)  # a gap of n needs at most 2n bits
        if not shortest <= code.size <= longest:
            raise MessageError(f"{code.size} bytes, expected {shortest} to {longest}")
        bits = np.unpackbits(code)
        at = runs * width_bits
        widths = (1 << np.arange(width_bits)) @ bits[:at].reshape(width_bits, runs).astype(np.int64)
        order, having = _by_width(widths)
        if len(having) > _rice_width(1, size):
            raise MessageError(f"remainders of {len(having)} bits, expected at most {_rice_width(1, size)}")
        if at + length * sum(having) > bits.size:
            raise MessageError(f"the code ends early: {length * sum(having)} bits expected after bit {at}")
        ordered = np.zeros((runs, length), np.uint8 if len(having) <= 8 else np.int64)
        for bit, some in enumerate(having):
            plane = bits[at : at + some * length].reshape(some, length)
            ordered[:some] |= np.left_shift(plane, bit, dtype=ordered.dtype)
            at += plane.size
        filled = np.empty_like(ordered)
        filled[order] = ordered
        remainders, none = filled.reshape(-1)[:count], filled.reshape(-1)[count:]
        ends = np.flatnonzero(bits[at:].view(np.bool_))  # six times as fast as among numbers
        if ends.size != count or bits.size - at - ends[-1] > 8 or none.any():
            raise MessageError(f"{ends.size} quotients in {bits.size - at} bits, expected {count} and zero padding")
        quotients, each = _lengths(ends), np.repeat(widths, length)[:count]
        if int(quotients.max()) << len(having) > size and (quotients > size >> each).any():  # shifts could wrap around
            raise MessageError(f"a gap wider than {size}, the number of positions")
        gaps = quotients << each
        gaps += remainders
        gaps += 1
        positions = _positions(gaps, size)
        if (self._widths(positions) != widths).any():
            raise MessageError("the widths of remainders do not match the gaps")
        return positions

    def _runs(self, count: int) -> tuple[int, int]:
        """Return the number of runs and their length. The last run is shorter by less than the number of runs."""
        runs = -(-count // self.RUN)
        return runs, -(-count // runs)

    def _widths(self, positions: Positions) -> NDArray[np.int64]:
        """Return the remainder bits of each run."""
        runs, length = self._runs(positions.size)
        edges = np.empty(runs + 1, np.int64)
        edges[0] = -1
        edges[1:-1] = positions[length - 1 : length * (runs - 1) : length]
        edges[-1] = positions[-1]
        counts = np.full(runs, length)
        counts[-1] -= runs * length - positions.size
        return _bit_lengths(_rice_ratio(counts, edges[1:] - edges[:-1]))

    @staticmethod
    def _width_bits(size: int) -> int:
        return _rice_width(1, size).bit_length()


@dataclass(frozen=True)
class EliasGamma:
    """Elias 1975, gamma: the length of each gap in unary, then its bits; good for mostly tiny gaps."""

    def encode(self, positions: Positions, size: int) -> Bytes:
        gaps = _gaps(positions, size)
        return np.packbits(np.concatenate(_gamma(gaps)))

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        _check(code, count, size)
        reader = _BitReader(code, longest=min(count * (2 * size.bit_length() - 1), 2 * size))
        gaps = reader.gamma(count, size.bit_length() - 1)
        reader.finish()
        return _positions(gaps, size)


@dataclass(frozen=True)
class EliasDelta:
    """Elias 1975, delta: the length of each gap in gamma code, then its bits; good for gaps of very different sizes."""

    def encode(self, positions: Positions, size: int) -> Bytes:
        gaps = _gaps(positions, size)
        lengths = _bit_lengths(gaps)
        return np.packbits(np.concatenate([*_gamma(lengths), *_planes(gaps, lengths - 1)]))

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        _check(code, count, size)
        widest = size.bit_length()
        reader = _BitReader(code, longest=min(count * (2 * widest.bit_length() - 1 + widest - 1), 2 * size))
        lengths = reader.gamma(count, widest.bit_length() - 1)
        if count and lengths.max() > widest:
            raise MessageError(f"a gap of {lengths.max()} bits, expected at most {widest}: positions lie below {size}")
        gaps = reader.planes(lengths - 1)
        reader.finish()
        return _positions(gaps, size)


@dataclass(frozen=True)
class Bitmap:
    """One bit for each possible position; the shortest code for sets of about half of them."""

    def encode(self, positions: Positions, size: int) -> Bytes:
        _gaps(positions, size)
        return np.packbits(_mask(positions, size))

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        _check(code, count, size)
        _expect_size(code, packed_size(size, 1))
        positions = np.flatnonzero(np.unpackbits(code).view(np.bool_))
        if positions.size != count:
            raise MessageError(f"{positions.size} positions in the bitmap, expected {count}")
        return _within(positions, size)


@dataclass(frozen=True)
class Raw:
    """Each position as a 16-bit number, or a 32-bit number if positions exceed 65,535."""

    def encode(self, positions: Positions, size: int) -> Bytes:
        _gaps(positions, size)
        return positions.astype(_raw_dtype(size)).view(np.uint8)

    def decode(self, code: Bytes, count: int, size: int) -> Positions:
        _check(code, count, size)
        dtype = _raw_dtype(size)
        _expect_size(code, count * dtype.itemsize)
        positions = np.ascontiguousarray(code).view(dtype).astype(np.int64)
        if (np.diff(positions) <= 0).any():
            raise MessageError("positions repeat or are out of order, expected increasing positions")
        return _within(positions, size)


# Encoding: positions to gaps of at least 1


def _gaps(positions: Positions, size: int) -> NDArray[np.int64]:
    """Return the distance of each position from the previous one; the first counts from -1."""
    if not 0 <= size < MAX_SIZE:
        raise ValueError(f"size is {size}, expected 0 to 2**48 - 1")
    gaps = np.array(positions, np.int64)
    gaps[1:] -= positions[:-1]
    gaps[:1] += 1
    if positions.size and (gaps.min() < 1 or positions[-1] >= size):
        raise ValueError(f"positions must strictly increase within [0, {size})")
    return gaps


def _mask(positions: Positions, size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[positions] = True
    return mask


def _complement(positions: Positions, size: int) -> Positions:
    return np.flatnonzero(~_mask(positions, size))


def _rice_ratio(count: _Number, size: _Number) -> _Number:
    """Return a number whose bit length is the best remainder width for `count` gaps that sum to `size`.

    More than k bits pay off while q**(2**k) exceeds the inverse of the golden ratio, where q is the probability that a
    position is not in the set (Kiely 2004). Here -1 / ln q is approximated by size/count - 1/2, in integers: sender and
    receiver must agree.
    """
    return (4812 * (2 * size - count) - 1) // (20000 * count)


def _rice_width(count: int, size: int) -> int:
    return _rice_ratio(count, size).bit_length()


def _by_width(widths: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """Return the runs in order of decreasing width, and for each bit the number of runs that have it."""
    fewer = itertools.accumulate(np.bincount(widths).tolist())  # the number of runs of at most 0, 1, … bits
    return np.argsort(-widths, kind="stable"), [widths.size - runs for runs in fewer][:-1]


def _unary(numbers: NDArray[np.int64]) -> Bytes:
    """Return bits: each number as that many zeros and a one."""
    ends = np.add.accumulate(numbers + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.uint8)
    bits[ends] = 1
    return bits


def _gamma(numbers: NDArray[np.int64]) -> list[Bytes]:
    """Return bits: all lengths in unary, then all numbers without their leading one."""
    widths = _bit_lengths(numbers) - 1
    return [_unary(widths), *_planes(numbers, widths)]


def _planes(numbers: NDArray[np.int64], widths: NDArray[np.int64]) -> list[Bytes]:
    """Return the lowest `widths` bits of each number: bit 0 of all that have one, then bit 1, and so on."""
    planes = []
    for bit in range(int(widths.max(initial=0))):
        planes.append(((numbers[widths > bit] >> bit) & 1).astype(np.uint8))
    return planes


def _bit_lengths(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bit length of each number. Numbers must be below 2**53, where doubles are exact."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)


def _raw_dtype(size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if size <= 2**16 else "<u4" if size <= 2**32 else "<u8")


# Decoding: bytes from the network


class _BitReader:
    """Reads sections of bits in order. `longest` is the most bits that the code can have.

    This is at most twice the size: gamma and delta encode a gap of n in at most 2n bits.
    """

    def __init__(self, code: Bytes, longest: int) -> None:
        if code.size > packed_size(longest, 1):
            raise MessageError(f"{code.size} bytes, expected at most {packed_size(longest, 1)}")
        self._bits = np.unpackbits(code)
        self._at = 0

    def gamma(self, count: int, widest: int) -> NDArray[np.int64]:
        """Read `count` numbers of up to `widest` bits after the leading one."""
        bits = self._bits[self._at :].view(np.bool_)
        ends = np.flatnonzero(bits)[:count]  # the first ones end the unary lengths
        if ends.size != count:
            raise MessageError(f"{ends.size} lengths in the code, expected {count}")
        if not count:
            return np.empty(0, np.int64)
        widths = _lengths(ends)
        if widths.max() > widest:
            raise MessageError(f"a number of {widths.max() + 1} bits in the code, expected at most {widest + 1}")
        self._at += int(ends[-1]) + 1
        return self.planes(widths)

    def planes(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read one number for each width: that many bits after a leading one."""
        if self._at + int(widths.sum()) > self._bits.size:
            raise MessageError(f"the code ends early: {widths.sum()} bits expected after bit {self._at}")
        numbers = np.left_shift(1, widths)
        for bit in range(int(widths.max(initial=0))):
            chosen = widths > bit
            end = self._at + int(np.count_nonzero(chosen))
            numbers[chosen] |= self._bits[self._at : end].astype(np.int64) << bit
            self._at = end
        return numbers

    def finish(self) -> None:
        rest = self._bits[self._at :]
        if rest.size > 7 or rest.any():
            raise MessageError(f"{rest.size} bits after the last position, expected fewer than 8, all zero")


def _check(code: Bytes, count: int, size: int) -> None:
    if not isinstance(code, np.ndarray) or code.dtype != np.uint8 or code.ndim != 1:
        raise MessageError("expected the code of positions as a vector of uint8")
    if not 0 <= size < MAX_SIZE:
        raise ValueError(f"size is {size}, expected 0 to 2**48 - 1")
    if not isinstance(count, int | np.integer) or not 0 <= count <= size:
        raise MessageError(f"{count!r} positions, expected 0 to {size}")


def _expect_size(code: Bytes, size: int) -> None:
    if code.size != size:
        raise MessageError(f"{code.size} bytes of positions, expected {size}")


def _lengths(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the unary numbers whose ones are at `ends`."""
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    lengths[1:] -= 1
    return lengths


def _positions(gaps: NDArray[np.int64], size: int) -> Positions:
    """Return the positions of at most `size` gaps, each from 1 to 2 `size`."""
    # The sum of integers might wrap around; doubles do not, and they are exact in the range that matters.
    if size >= 2**31 and gaps.sum(dtype=np.float64) > size:
        raise MessageError(f"the gaps add up to more than {size}, expected positions below {size}")
    positions = np.add.accumulate(gaps)
    positions -= 1
    return _within(positions, size)


def _within(positions: Positions, size: int) -> Positions:
    """Return increasing positions. Raises `MessageError` unless the last one is below `size`."""
    if positions.size and positions[-1] >= size:
        raise MessageError(f"position {positions[-1]}, expected positions below {size}")
    return positions
