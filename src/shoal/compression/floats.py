"""Lists of float32 as arrays that a message can carry.

A codec either keeps every bit (`lossless`) or says how far a value may move. `Int8` and `QSGD` round by chance, so
that the mean of what is heard is what was said; the generator they draw from is the sender's.

Non-finite values: the codecs that keep a float of some width (`Float32`, `Float16`, `BFloat16`, and the lossless
ones) keep NaN and infinities. Those that code a value relative to others say NaN for its whole block: a model that has
diverged is seen to have, as it is when the whole of it is shared.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.compression.bits import pack, packed_size, unpack
from shoal.errors import MessageError
from shoal.types import Bounds, Params

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT16_MAX = np.finfo(np.float16).max


class FloatCodec(Protocol):
    """Codes float32 values. Has no state: one instance serves all nodes."""

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back every bit, those of NaN included."""
        ...

    @property
    def by_chance(self) -> bool:
        """Whether `encode` draws from its generator. If not, none need be made, which takes as long as 8 copies."""
        ...

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        """The arrays to send for one row of `values`, all of types that a message carries.

        `rng` may be None where the codec is not `by_chance`.
        """
        ...

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        """The `count` values in `arrays`, which may hold other names beside. The result may share their memory.

        Raises `MessageError` for arrays that `encode` would not have made of `count` values. Takes memory in
        proportion to `count` and to what has arrived, whatever the arrays promise to unfold to.
        """
        ...


@dataclass(frozen=True)
class Float32:
    """The values as they are, 4 bytes each, without a copy."""

    lossless: ClassVar[bool] = True
    by_chance: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        return {"values": values}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        return _row(arrays, "values", "<f4", count)


@dataclass(frozen=True)
class Float16:
    """IEEE half precision: 11 significant bits; finite values beyond ±65,504 become ±65,504.

    They saturate because an infinity would spread to every neighbour at the next average. Values below 6.1e-5 keep
    fewer bits, and below 3e-8 none.
    """

    lossless: ClassVar[bool] = False
    by_chance: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        torch = _torch()
        halves: NDArray[np.float16] = torch.from_numpy(_native(values)).to(torch.float16).numpy()
        if _beyond(halves, 0x7C00):
            overflown = np.isinf(halves) & np.isfinite(values)
            halves[overflown] = np.copysign(FLOAT16_MAX, values[overflown])
        return {"values": halves.astype("<f2", copy=False)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        torch = _torch()
        values: Params = torch.from_numpy(_native(_row(arrays, "values", "<f2", count))).to(torch.float32).numpy()
        return values


@dataclass(frozen=True)
class BFloat16:
    """The upper half of a float32: its range, 8 significant bits, rounded to nearest even."""

    lossless: ClassVar[bool] = False
    by_chance: ClassVar[bool] = False

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        torch = _torch()
        halves: NDArray[np.uint16] = torch.from_numpy(_native(values)).to(torch.bfloat16).view(torch.uint16).numpy()
        if _beyond(halves, 0x7F80):
            halves = (_rounded(values, 7) >> np.uint32(16)).astype(np.uint16)
        return {"values": halves.astype("<u2", copy=False)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        halves = _row(arrays, "values", "<u2", count)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Int8:
    """Whole numbers of -127 to 127, relative to the largest magnitude of each block; unbiased by default.

    A value moves by less than 1/127 of its block's largest magnitude; with `unbiased = false`, which rounds to the
    nearest, by half of that.
    """

    lossless: ClassVar[bool] = False

    block: Annotated[int, Bounds(at_least=1)] = 256
    unbiased: bool = True

    @property
    def by_chance(self) -> bool:
        return self.unbiased

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        rows = _rows(values, self.block)
        rows, peaks, finite = _where_finite(rows, np.abs(rows).max(axis=1, initial=0))
        levels = _levels(rows, peaks, 127, given(rng) if self.unbiased else None)
        return {"values": levels.astype(np.int8)[: values.size], "scale": _marked(peaks, finite)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        codes = _row(arrays, "values", "|i1", count)
        peaks = _scale(arrays, count, self.block)
        if count and codes.min() < -127:
            raise MessageError("array 'values' holds -128, expected -127 to 127")
        return _scaled(codes.astype(np.float32), 127, peaks, self.block)


@dataclass(frozen=True)
class QSGD:
    """Alistarh et al. 2017, QSGD: each value as one of `levels` parts of its bucket's l2 norm, and a sign; unbiased.

    Takes 1 bit and those of `levels` for a value: 8 bits for 127 levels, 4 for 7. A value moves by less than
    1/levels of its bucket's norm. Levels are packed at equal width; the paper's Elias code of them is not used.
    """

    lossless: ClassVar[bool] = False
    by_chance: ClassVar[bool] = True

    levels: Annotated[int, Bounds(at_least=1, at_most=2**15 - 1)] = 127
    bucket: Annotated[int, Bounds(at_least=1)] = 512

    @property
    def width(self) -> int:
        """Bits for a value: its level, from -levels to levels."""
        return (2 * self.levels).bit_length()

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        rows = _rows(values, self.bucket)
        # Any norm of at least the largest magnitude keeps the rounding unbiased: so may one be cut to what float32 has,
        # and has to be above what rounding may have taken from it.
        rows, norms, finite = _where_finite(rows, _norms(rows))
        norms = np.minimum(norms * (1 + 2.0**-22), FLOAT32_MAX).astype(np.float32)
        codes = _levels(rows, norms, self.levels, given(rng))[: values.size]
        codes += np.float32(self.levels)
        return {"values": pack(codes, self.width), "scale": _marked(norms, finite)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        code = _row(arrays, "values", "|u1", packed_size(count, self.width))
        norms = _scale(arrays, count, self.bucket)
        codes = unpack(code, count, self.width)
        if count and codes.max() > 2 * self.levels:
            raise MessageError(f"array 'values' holds level {codes.max()}, expected at most {2 * self.levels}")
        return _scaled(codes.astype(np.float32) - np.float32(self.levels), self.levels, norms, self.bucket)


@dataclass(frozen=True)
class Zstd:
    """Every bit kept: the first bytes of all values, then their second bytes, and so on, compressed by Zstandard."""

    lossless: ClassVar[bool] = True
    by_chance: ClassVar[bool] = False

    level: Annotated[int, Bounds(at_least=-7, at_most=19)] = 1

    def __post_init__(self) -> None:
        _need("zstandard")

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        import zstandard

        if not values.size:
            return {"values": np.empty(0, np.uint8)}
        planes = np.ascontiguousarray(np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T)
        # A context is made for each call: kept, it would cost every node a megabyte between rounds.
        return {"values": np.frombuffer(zstandard.ZstdCompressor(level=self.level).compress(planes.data), np.uint8)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Params:
        import zstandard

        code = _row(arrays, "values", "|u1", None if count else 0)
        if not count:
            return np.empty(0, np.float32)
        try:
            promised = zstandard.get_frame_parameters(code.data).content_size
            if promised != 4 * count:
                raise MessageError(f"array 'values' unfolds to {promised} bytes, expected {4 * count}")
            unfolded = zstandard.ZstdDecompressor().decompress(code.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MessageError(f"array 'values' is not a Zstandard frame: {error}") from error
        planes = np.frombuffer(unfolded, np.uint8).reshape(4, count)
        words = np.zeros(count, np.uint32)
        for plane in planes[::-1]:
            words <<= np.uint32(8)
            words |= plane
        return words.view(np.float32)


@dataclass(frozen=True)
class Blosc2:
    """Blosc2: bits or bytes of like weight together, then a fast compressor; `bits` rounds the mantissa first.

    With `bits` of 0 to 22, a value keeps so many bits after its leading one, rounded to nearest even: it moves by
    at most 2**-(bits+1) of itself (below 1e-38, of 1e-38). With 23, the default, every bit is kept. Importing the
    library takes 0.2 s and 20 MB in every process.
    """

    by_chance: ClassVar[bool] = False

    codec: Literal["lz4", "zstd"] = "lz4"
    shuffle: Literal["bits", "bytes", "none"] = "bits"
    level: Annotated[int, Bounds(at_least=1, at_most=9)] = 5
    bits: Annotated[int, Bounds(at_least=0, at_most=23)] = 23

    def __post_init__(self) -> None:
        _need("blosc2")

    @property
    def lossless(self) -> bool:
        return self.bits == 23

    def encode(self, values: Params, rng: np.random.Generator | None) -> dict[str, NDArray[Any]]:
        import blosc2

        if not values.size:
            return {"values": np.empty(0, np.uint8)}
        kept = np.ascontiguousarray(values) if self.lossless else _rounded(values, self.bits)
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

        code = _row(arrays, "values", "|u1", None if count else 0)
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
        """Admit only chunks as `encode` makes them.

        A header can name filters and compressors that the library would look for outside, and chunks that leave
        memory as it was. So it is read here first: 32 bytes, as c-blosc2's README_CHUNK_FORMAT describes them.
        """
        if code.size < 32:
            raise MessageError(f"array 'values' has {code.size} bytes, expected a Blosc2 chunk of at least 32")
        number, form = {"lz4": (1, 1), "zstd": (5, 4)}[self.codec]  # in the library, and in the chunk's flags
        unfolded, block, length = (int(n) for n in code[4:16].view("<i4"))
        pipeline = bytes([_BLOSC_FILTERS[self.shuffle], 0, 0, 0, 0, 0, number]) + bytes(8)
        as_written = (
            (code[2] & 0b1110_0101 == form << 5 | 0b101 or code[2] & 0b1110_0111 == 0b111)  # or copied as it was
            and code[3] == 4
            and code[16:31].tobytes() == pipeline
            and code[31] in (0x00, 0x10)  # nothing special, or all zeros
        )
        if not as_written or length != code.size or unfolded != size or not 0 < block <= size:
            raise MessageError(f"array 'values' is not a Blosc2 chunk of {size} bytes as {self} writes it")


_BLOSC_FILTERS = {"none": 0, "bytes": 1, "bits": 2}


@dataclass(frozen=True)
class Zfp:
    """Lindstrom 2014, zfp: blocks of 4 values share an exponent; within `tolerance`, or every bit kept if that is 0.

    The error stays within `tolerance` as long as that is no finer than 2**-22 of the largest value of a block.
    Meant for smooth fields: neighbouring weights of a model tell it little.
    """

    by_chance: ClassVar[bool] = False

    tolerance: Annotated[float, Bounds(at_least=0)] = 1e-3

    def __post_init__(self) -> None:
        _need("zfpy")

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
            return _row(arrays, "values", "|u1", 4 * count).view(np.float32)
        code = _row(arrays, "values", "|u1", None if count else 0)
        if not count:
            return np.empty(0, np.float32)
        # Without a header there is no size to lie about. The decoder does not look where its input ends, but takes at
        # most 18 bytes for 4 values, whatever they hold: with so much behind it, it stays within the buffer.
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


# What they share


def _need(library: str) -> None:
    """Refuse to make a codec whose library is missing, without importing the library yet."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"the library {library!r} is not installed; pip install {library}")


def _row(arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, size: int | None) -> NDArray[Any]:
    """The array `name`, which must be one row of `size` numbers of `dtype`; of any size if that is None."""
    array = arrays.get(name)
    if array is None:
        raise MessageError(f"no array {name!r}")
    if array.dtype != np.dtype(dtype) or array.ndim != 1 or (size is not None and array.size != size):
        wanted = f"one row of {'' if size is None else f'{size} '}{np.dtype(dtype).name}"
        raise MessageError(f"array {name!r} is {array.dtype.name} of shape {array.shape}, expected {wanted}")
    return np.ascontiguousarray(array)


def _where_finite(rows: Params, scale: NDArray[Any]) -> tuple[Params, NDArray[Any], NDArray[np.bool_]]:
    """Rows and their scales, zeros in place of those that hold NaN or infinity; and which do not."""
    finite = np.isfinite(scale)
    if not finite.all():
        rows, scale = np.where(finite[:, None], rows, np.float32(0)), np.where(finite, scale, scale.dtype.type(0))
    return rows, scale, finite


def _marked(scale: Params, finite: NDArray[np.bool_]) -> Params:
    """NaN for rows that were not finite: what is read there is NaN too, and a model that has diverged is seen to."""
    return scale if finite.all() else np.where(finite, scale, np.float32(np.nan))


@functools.cache
def _torch() -> Any:
    """The library, which converts floats with the vector instructions that NumPy does not use.

    It warns, once in a process, that it could write into a read-only array; the conversions here do not.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(np.frombuffer(bytes(4), np.float32))
    return torch


def _native(values: NDArray[Any]) -> NDArray[Any]:
    """The values in one piece and in this machine's order of bytes, as torch wants them; mostly they are."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("="))


def _beyond(halves: NDArray[Any], infinity: int) -> bool:
    """Whether floats of 16 bits have NaN or an infinity among them, of which `infinity` is the positive one."""
    return bool(
        halves.view(np.int16).max(initial=0) >= infinity or halves.view(np.uint16).max(initial=0) >= infinity + 0x8000
    )


def _rounded(values: Params, bits: int) -> NDArray[np.uint32]:
    """The bits of `values` with a mantissa of `bits`, to nearest even. A finite value stays finite, NaN stays NaN."""
    cut = np.uint32(23 - bits)
    infinity = np.uint32(0x7F800000)
    words = np.ascontiguousarray(values).view(np.uint32)
    kept = words + np.uint32((1 << (22 - bits)) - 1) + ((words >> cut) & np.uint32(1))
    kept = kept >> cut << cut
    suspects = np.flatnonzero(((kept & infinity) == infinity) | ((words & infinity) == infinity))
    if suspects.size:
        few = words[suspects]
        sign, magnitude = few & np.uint32(0x80000000), few & np.uint32(0x7FFFFFFF)
        largest, nan = (infinity - np.uint32(1)) >> cut << cut, np.uint32(0x7FC00000)
        kept[suspects] = sign | np.where(magnitude < infinity, largest, np.where(magnitude > infinity, nan, infinity))
    return kept


def _rows(values: Params, width: int) -> Params:
    """`values` in rows of `width`, or of all values if they are fewer; zeros fill the last row."""
    width = min(width, max(1, values.size))
    rows = -(-values.size // width)
    if rows * width == values.size:
        return values.reshape(rows, width)
    padded = np.empty(rows * width, np.float32)
    padded[: values.size] = values
    padded[values.size :] = 0
    return padded.reshape(rows, width)


def _norms(rows: Params) -> NDArray[Any]:
    """The l2 norm of each row; in doubles, which take longer, where squares leave the range of floats."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares: NDArray[Any] = np.einsum("ij,ij->i", rows, rows)
        odd = ~((squares > 1e-30) & (squares <= FLOAT32_MAX))
        if odd.any():
            squares = squares.astype(np.float64)
            squares[odd] = np.einsum("ij,ij->i", rows[odd], rows[odd], dtype=np.float64, casting="unsafe")
        norms: NDArray[Any] = np.sqrt(squares)
    return norms


def given(rng: np.random.Generator | None) -> np.random.Generator:
    """The generator. Raises ValueError if there is none."""
    if rng is None:
        raise ValueError("what is `by_chance` needs a generator to draw from")
    return rng


def _levels(rows: Params, scale: Params, levels: int, rng: np.random.Generator | None) -> Params:
    """Each value as a whole number of -levels to levels, relative to the scale of its row, which none exceeds.

    All in one row. Rounded to the nearest; with `rng`, down, after a draw of 16 bits from 0 to 1 is added: that is up
    or down, with the chances that make the mean right to 2**-17 of a level, as near as float32 has the largest of 127.
    """
    tiny = scale < 2.0**-64
    if tiny.any():  # their inverse could be infinite, and that of 0 is: 1 will do, since its row is of zeros
        rows, scale = rows.copy(), scale.copy()
        rows[tiny] *= np.float32(2.0**64)
        scale[tiny] *= np.float32(2.0**64)
        scale[scale == 0] = 1
    parts = 1 if rng is None else 2**16
    factors = np.nextafter(np.float32(levels * parts) / scale, np.float32(0))  # no product will be above levels * parts
    numbers: Params = (rows * factors[:, None]).reshape(-1)
    if rng is None:
        return np.rint(numbers, out=numbers)
    words = rng.bit_generator.random_raw(-(-rows.size // 4)).astype("<u8", copy=False)
    numbers += words.view("<u2")[: rows.size]  # below 2**23, where float32 is exact to a half, for 127 levels
    numbers *= np.float32(1 / parts)
    np.floor(numbers, out=numbers)
    return numbers if levels <= 127 else np.minimum(numbers, np.float32(levels), out=numbers)


def _scale(arrays: Mapping[str, NDArray[Any]], count: int, block: int) -> Params:
    """The array 'scale': for each block of the values a number of at least 0, or NaN if its values were not finite."""
    scale = _row(arrays, "scale", "<f4", -(-count // block))
    if (scale < 0).any() or np.isinf(scale).any():
        raise MessageError("array 'scale' holds a number that is negative or infinite")
    return scale


def _scaled(numbers: Params, levels: int, scale: Params, block: int) -> Params:
    """The inverse of `_levels`, for rows of `block`. Writes into `numbers`, and returns them."""
    numbers /= np.float32(levels)  # before the scale, with which the product could overflow
    whole = numbers.size // block * block
    numbers[:whole].reshape(-1, block)[...] *= scale[: whole // block, None]
    numbers[whole:] *= scale[-1:]
    return numbers
