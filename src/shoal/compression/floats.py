"""The interface of value codecs, and the codecs that keep floats: 32 bits, half precision, bfloat16.

A codec is either `lossless` or documents how much a value may change. Quantizers are in `quantizers`, codecs that use a
compression library in `libraries`.

Non-finite values: the codecs here and the lossless ones keep NaN and infinities. Codecs that encode a value relative to
others send NaN for its whole block. So a diverged model is visible as one, as in full sharing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.types import Params

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT16_MAX = np.finfo(np.float16).max


class FloatCodec(Protocol):
    """Encodes float32 values. It has no state: one instance serves all nodes."""

    @property
    def lossless(self) -> bool:
        """Whether `decode` restores every bit, including those of NaN."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether `encode` draws from its generator. If not, callers save the time to create one: that of 8 copies."""
        ...

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        """Return the arrays to send for a vector, all of types that a message can carry.

        `rng` may be None if the codec is not `stochastic`.
        """
        ...

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        """Return the `count` values in `arrays`. The result may share their memory; other arrays are ignored.

        Raises `MessageError` for arrays that `encode` does not produce for `count` values. The memory is proportional
        to `count` and to the size of the arrays, whatever decompressed size they claim.
        """
        ...


@dataclass(frozen=True)
class Float32:
    """Unchanged values, 4 bytes each, without a copy."""

    lossless: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        return {"values": values}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        return read_row(arrays, "values", "<f4", count)


@dataclass(frozen=True)
class Float16:
    """IEEE half precision: 11 significant bits; finite values beyond ±65,504 become ±65,504.

    They saturate because an infinity would spread to all neighbours in the next average. Values below 6.1e-5 keep
    fewer bits, and values below 3e-8 none.
    """

    lossless: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        torch = _torch()
        halves: NDArray[np.float16] = torch.from_numpy(_native(values)).to(torch.float16).numpy()
        if _has_non_finite(halves, 0x7C00):
            overflown = np.isinf(halves) & np.isfinite(values)
            halves[overflown] = np.copysign(FLOAT16_MAX, values[overflown])
        return {"values": halves.astype("<f2", copy=False)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        torch = _torch()
        values: Params = torch.from_numpy(_native(read_row(arrays, "values", "<f2", count))).to(torch.float32).numpy()
        return values


@dataclass(frozen=True)
class BFloat16:
    """The upper half of a float32: its range, 8 significant bits, rounded to nearest even."""

    lossless: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        torch = _torch()
        halves: NDArray[np.uint16] = torch.from_numpy(_native(values)).to(torch.bfloat16).view(torch.uint16).numpy()
        if _has_non_finite(halves, 0x7F80):
            halves = (round_mantissa(values, 7) >> np.uint32(16)).astype(np.uint16)
        return {"values": halves.astype("<u2", copy=False)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        halves = read_row(arrays, "values", "<u2", count)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def read_row(arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, size: int | None) -> NDArray[Any]:
    """Return the array `name`. Raises `MessageError` unless it is a vector of `size` (None: any) numbers of `dtype`."""
    array = arrays.get(name)
    if array is None:
        raise MessageError(f"no array {name!r}")
    if array.dtype != np.dtype(dtype) or array.ndim != 1 or (size is not None and array.size != size):
        wanted = f"a vector of {'' if size is None else f'{size} '}{np.dtype(dtype).name}"
        raise MessageError(f"array {name!r} is {array.dtype.name} of shape {array.shape}, expected {wanted}")
    return np.ascontiguousarray(array)


def round_mantissa(values: Params, bits: int) -> NDArray[np.uint32]:
    """Return the bits of `values`, rounded to nearest even with a mantissa of `bits`. Finite values and NaN stay so."""
    cut = np.uint32(23 - bits)
    infinity = np.uint32(0x7F800000)
    words = np.ascontiguousarray(values).view(np.uint32)
    kept = words + np.uint32((1 << (22 - bits)) - 1) + ((words >> cut) & np.uint32(1))
    kept = kept >> cut << cut
    special = np.flatnonzero(((kept & infinity) == infinity) | ((words & infinity) == infinity))
    if special.size:
        few = words[special]
        sign, magnitude = few & np.uint32(0x80000000), few & np.uint32(0x7FFFFFFF)
        largest, nan = (infinity - np.uint32(1)) >> cut << cut, np.uint32(0x7FC00000)
        kept[special] = sign | np.where(magnitude < infinity, largest, np.where(magnitude > infinity, nan, infinity))
    return kept


@functools.cache
def _torch() -> Any:
    """Return PyTorch, which converts floats with vector instructions that NumPy does not use.

    It warns once per process that it could write to a read-only array; the conversions here never write.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(np.frombuffer(bytes(4), np.float32))
    return torch


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values contiguous and in native byte order, as PyTorch needs them; usually without a copy."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("="))


def _has_non_finite(halves: NDArray[Any], infinity: int) -> bool:
    """Return whether 16-bit floats contain NaN or infinities; `infinity` has the bits of the positive one."""
    return bool(
        halves.view(np.int16).max(initial=0) >= infinity or halves.view(np.uint16).max(initial=0) >= infinity + 0x8000
    )
