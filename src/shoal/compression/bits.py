"""Integers of a few bits, packed into bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError

Bytes: TypeAlias = NDArray[np.uint8]


def packed_size(count: int, width: int) -> int:
    """Return the bytes that `count` numbers of `width` bits need."""
    return (count * width + 7) // 8


def pack(numbers: NDArray[Any], width: int) -> Bytes:
    """Return integers from 0 to 2**width - 1 as `packed_size` bytes; `width` is at most 64.

    The whole bytes of all numbers come first, the least significant byte of all before the next one. Then come the
    remaining bits of all numbers: for each such bit, 8 numbers need one byte.
    """
    if width == 8:
        return numbers.astype(np.uint8)
    whole, rest = divmod(width, 8)
    numbers = numbers.astype(np.uint8 if width <= 8 else np.uint64)
    parts = [(numbers >> 8 * i).astype(np.uint8) for i in range(whole)]
    if rest:
        lanes = np.zeros(-(-numbers.size // 8) * 8, np.uint8)
        lanes[: numbers.size] = numbers >> 8 * whole
        narrow = _fold(lanes.view("<u8"), rest).view(np.uint8).reshape(-1, 8)[:, :rest].reshape(-1)
        parts.append(narrow[: packed_size(numbers.size, rest)])
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def unpack(code: Bytes, count: int, width: int) -> NDArray[np.unsignedinteger]:
    """Return the numbers that `pack` wrote. Raises `MessageError` for a wrong length or non-zero padding bits."""
    if code.size != packed_size(count, width):
        raise MessageError(f"{code.size} bytes, expected {packed_size(count, width)}: {count} numbers of {width} bits")
    whole, rest = divmod(width, 8)
    planes: list[Bytes] = [code[i * count : (i + 1) * count] for i in range(whole)]
    if rest:
        groups = -(-count // 8)
        narrow = np.zeros(groups * rest, np.uint8)
        narrow[: code.size - whole * count] = code[whole * count :]
        words = np.zeros((groups, 8), np.uint8)
        words[:, :rest] = narrow.reshape(-1, rest)
        lanes = _unfold(words.view("<u8").reshape(-1), rest).view(np.uint8)
        if lanes[count:].any():
            raise MessageError(f"bits are set after the last of {count} numbers")
        planes.append(lanes[:count])
    if len(planes) == 1:
        return planes[0]
    numbers = np.zeros(count, np.uint64)
    for i, plane in enumerate(planes):
        numbers |= plane.astype(np.uint64) << np.uint64(8 * i)
    return numbers


def _fold(words: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Move the used `width` bits of the 8 bytes of each word together: in pairs, then pairs of pairs, then all."""
    for field, mask in _FIELDS:
        words = (words & mask) | (((words >> np.uint64(field)) & mask) << np.uint64(field // 8 * width))
    return words


def _unfold(words: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Invert `_fold`."""
    for field, mask in reversed(_FIELDS):
        used = field // 8 * width
        kept = mask & (mask >> np.uint64(field - used))
        words = (words & kept) | (((words >> np.uint64(used)) & kept) << np.uint64(field))
    return words


_FIELDS = tuple(
    (bits, np.uint64(mask))
    for bits, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
)
"""Field widths in bits, and a mask of every other field of that width."""
