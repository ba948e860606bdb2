"""Codecs of float32 values that use a compression library: Zstandard, Blosc2 and zfp.

A library is imported when a codec first needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.compression.bits import packed_size
from shoal.compression.floats import read_row, round_mantissa
from shoal.errors import MessageError
from shoal.types import Bounds, Params


@dataclass(frozen=True)
class Zstd:
    """Lossless: the first bytes of all values, then their second bytes, and so on, compressed by Zstandard."""

    lossless: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False

    level: Annotated[int, Bounds(at_least=-7, at_most=19)] = 1

    def __post_init__(self) -> None:
        _require("zstandard")

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        import zstandard

        if not values.size:
            return {"values": np.empty(0, np.uint8)}
        planes = np.ascontiguousarray(np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T)
        # One context per call: a lasting one would cost every node a megabyte between rounds.
        return {"values": np.frombuffer(zstandard.ZstdCompressor(level=self.level).compress(planes.data), np.uint8)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        import zstandard

        code = read_row(arrays, "values", "|u1", None if count else 0)
        if not count:
            return np.empty(0, np.float32)
        try:
            claimed = zstandard.get_frame_parameters(code.data).content_size
            if claimed != 4 * count:
                raise MessageError(f"array 'values' decompresses to {claimed} bytes, expected {4 * count}")
            decompressed = zstandard.ZstdDecompressor().decompress(code.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MessageError(f"array 'values' is not a Zstandard frame: {error}") from error
        planes = np.frombuffer(decompressed, np.uint8).reshape(4, count)
        words = np.zeros(count, np.uint32)
        for plane in planes[::-1]:
            words <<= np.uint32(8)
            words |= plane
        return words.view(np.float32)


@dataclass(frozen=True)
class Blosc2:
    """Blosc2: groups bits or bytes of equal significance, then compresses fast; `bits` rounds the mantissa first.

    With `bits` from 0 to 22, a value keeps that many bits after its leading one, rounded to nearest even. It changes by
    at most 2**-(bits+1) of itself (below 1e-38, of 1e-38). With 23, the default, the codec is lossless. The import of
    the library takes 0.2 s and 20 MB in every process.
    """

    stochastic: ClassVar[bool] = False

    codec: Literal["lz4", "zstd"] = "lz4"
    shuffle: Literal["bits", "bytes", "none"] = "bits"
    level: Annotated[int, Bounds(at_least=1, at_most=9)] = 5
    bits: Annotated[int, Bounds(at_least=0, at_most=23)] = 23

    def __post_init__(self) -> None:
        _require("blosc2")

    @property
    def lossless(self) -> bool:
        return self.bits == 23

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        import blosc2

        if not values.size:
            return {"values": np.empty(0, np.uint8)}
        kept = np.ascontiguousarray(values) if self.lossless else round_mantissa(values, self.bits)
        code = blosc2.compress2(
            kept,
            codec=blosc2.Codec[self.codec.upper()],
            filters=[_BLOSC_FILTERS[self.shuffle]],
            filters_meta=[0],
            clevel=self.level,
            typesize=4,
            nthreads=1,
        )
        return {"values": np.frombuffer(code, np.uint8)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        import blosc2

        code = read_row(arrays, "values", "|u1", None if count else 0)
        if not count:
            return np.empty(0, np.float32)
        self._check_header(code, 4 * count)
        values = np.empty(count, np.float32)
        try:
            blosc2.decompress2(code.tobytes(), values, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise MessageError(f"array 'values' is not a Blosc2 chunk: {error}") from error
        return values

    def _check_header(self, code: NDArray[np.uint8], size: int) -> None:
        """Reject chunks that `encode` does not produce.

        A header can name filters and compressors that the library would load, and chunks that leave memory
        uninitialised. So the 32 bytes are checked first, as c-blosc2's README_CHUNK_FORMAT describes them.
        """
        if code.size < 32:
            raise MessageError(f"array 'values' has {code.size} bytes, expected a Blosc2 chunk of at least 32")
        number, form = {"lz4": (1, 1), "zstd": (5, 4)}[self.codec]  # in the library, and in the chunk's flags
        decompressed, block, length = (int(n) for n in code[4:16].view("<i4"))
        pipeline = bytes([_BLOSC_FILTERS[self.shuffle], 0, 0, 0, 0, 0, number]) + bytes(8)
        as_encoded = (
            (code[2] & 0b1110_0101 == form << 5 | 0b101 or code[2] & 0b1110_0111 == 0b111)  # or stored uncompressed
            and code[3] == 4
            and code[16:31].tobytes() == pipeline
            and code[31] in (0x00, 0x10)  # a regular chunk, or all zeros
        )
        if not as_encoded or length != code.size or decompressed != size or not 0 < block <= size:
            raise MessageError(f"array 'values' is not a Blosc2 chunk of {size} bytes in the form that {self} produces")


_BLOSC_FILTERS = {"none": 0, "bytes": 1, "bits": 2}


@dataclass(frozen=True)
class Zfp:
    """Lindstrom 2014, zfp: blocks of 4 values share an exponent; accurate to `tolerance`, or lossless if that is 0.

    The error stays within `tolerance` if that is at least 2**-22 of the largest value of a block. zfp is made for
    smooth fields; neighbouring weights of a model are not similar, so it compresses them little.
    """

    stochastic: ClassVar[bool] = False

    tolerance: Annotated[float, Bounds(at_least=0)] = 1e-3

    def __post_init__(self) -> None:
        _require("zfpy")

    @property
    def lossless(self) -> bool:
        return self.tolerance == 0

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        import zfpy

        if not values.size:
            return {"values": np.empty(0, np.uint8)}
        values = np.ascontiguousarray(values)
        if self.lossless:
            code = zfpy.compress_numpy(values, write_header=False)
        else:
            if not np.isfinite(values).all():
                return {"values": np.frombuffer(values.tobytes(), np.uint8), "plain": np.ones(1, np.bool_)}
            code = zfpy.compress_numpy(values, tolerance=self.tolerance, write_header=False)
        return {"values": np.frombuffer(code, np.uint8)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        import zfpy

        if "plain" in arrays and not self.lossless:
            return read_row(arrays, "values", "|u1", 4 * count).view(np.float32)
        code = read_row(arrays, "values", "|u1", None if count else 0)
        if not count:
            return np.empty(0, np.float32)
        # Without a header there is no claimed size. The decoder does not check the end of its input, but reads at most
        # 18 bytes for 4 values, whatever they contain: with this padding it stays within the buffer.
        blocks = -(-count // 4)
        shortest, longest = packed_size(blocks, 1), 24 * blocks + 64
        if count < 0 or not shortest <= code.size <= longest:
            raise MessageError(f"{code.size} bytes of 'values', expected {shortest} to {longest} for {count} values")
        buffer = np.zeros(longest, np.uint8)
        buffer[: code.size] = code
        tolerance = -1 if self.lossless else self.tolerance
        kind = zfpy.dtype_to_ztype(np.dtype(np.float32))
        values: Params = zfpy._decompress(buffer.tobytes(), kind, (count,), tolerance=tolerance)
        return values


def _require(library: str) -> None:
    """Raise ValueError if `library` is not installed, without importing it."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"the library {library!r} is not installed; pip install {library}")
