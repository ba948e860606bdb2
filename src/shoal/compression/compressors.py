"""A vector as a small payload, and the payload as an approximation of the vector.

Sharings that say a part of a model, or a coarse picture of one, put it together from these: codecs of values and of
positions, and the choice of coordinates. `SparseCode` and `DrawnCode` say values at some positions, and which; the
compressors choose them as well.

What comes from the network is checked as it is unfolded. Positions are distinct and within the vector, there are as
many values as positions, and arrays are of the type and size that the codec writes: anything else raises
`MessageError`. Values may be all that their codec carries. That includes NaN for codecs of plain floats, as in full
sharing: a model that has diverged is seen to have.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.compression.floats import Float32, FloatCodec, Int8, given
from shoal.compression.indices import GolombRice, IndexCodec, Positions
from shoal.compression.sparse import share_of, top_positions
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.types import Bounds, Nested, Params

Fraction: TypeAlias = Annotated[float, Bounds(above=0, at_most=1)]
Values: TypeAlias = Annotated[FloatCodec, Nested("values")]
Indices: TypeAlias = Annotated[IndexCodec, Nested("indices")]


@dataclass(frozen=True)
class Part:
    """Values at some positions of a vector, which increase; at all of them where `positions` is None.

    Read-only: the values may lie in a message that others hold too.
    """

    values: Params
    positions: Positions | None = None

    def add_to(self, target: Params, weight: float = 1.0) -> None:
        """target += weight · part, in place, where the part is zero at all other positions."""
        values = self.values if weight == 1.0 else self.values * np.float32(weight)
        if self.positions is None:
            target += values
        else:
            np.add.at(target, self.positions, values)  # in one pass, where += gathers and scatters


def kept(size: int, fraction: float) -> int:
    """How many of `size` parameters are `fraction` of them, rounded down. Raises ValueError where that is none."""
    if size * fraction < 1:
        smallest = math.ceil(1e6 / size) / 1e6 if size <= 10**5 else 1.01 / size
        raise ValueError(
            f"fraction = {fraction:g} keeps none of the model's {size} parameters; "
            f"the smallest that keeps one is {smallest:g}"
        )
    return share_of(size, fraction)


# Some coordinates


@dataclass(frozen=True)
class SparseCode:
    """Values at positions that the sender chose: both are coded, and their number travels beside them."""

    values: FloatCodec
    indices: IndexCodec

    def pack(self, part: Part, size: int, rng: np.random.Generator | None) -> Payload:
        """What to send of a vector of `size`; `rng` is for codecs of values that are `by_chance`."""
        assert part.positions is not None
        arrays = {
            "positions": self.indices.encode(part.positions, size),
            **self.values.encode(part.values, rng),
        }
        return Payload(sealed(arrays, part.values), {"count": part.positions.size})

    def unpack(self, payload: Payload, size: int) -> Part:
        """What `pack` was given, as far as the codec of values keeps it. Raises `MessageError`."""
        count = _count(payload, size)
        code = payload.arrays.get("positions")
        if code is None:
            raise MessageError("no array 'positions'")
        return Part(self.values.decode(payload.arrays, count), _decoded(self.indices, code, count, size))


_known: dict[int, tuple[weakref.ref[NDArray[Any]], tuple[IndexCodec, int, int], Positions]] = {}
"""Codes that are still about, by identity, and their positions."""


def _decoded(indices: IndexCodec, code: NDArray[Any], count: int, size: int) -> Positions:
    """The positions, read-only. In the simulation all receivers hold one message: it is decoded once."""
    key, how = id(code), (indices, count, size)
    known = _known.get(key)
    if known is not None and known[0]() is code and known[1] == how:
        return known[2]
    positions = indices.decode(code, count, size)
    positions.flags.writeable = False
    if not code.flags.writeable:
        _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), how, positions
    return positions


@dataclass(frozen=True)
class DrawnCode:
    """Values at positions that chance chose: the number they follow from travels, the positions do not."""

    values: FloatCodec

    def pack(self, vector: Params, count: int, seed: int, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        """What to send, and which part of it that is: `vector` at the `count` positions that `seed` stands for.

        `seed` is a number of 63 bits; `rng` is for codecs of values that are `by_chance`.
        """
        positions = drawn(seed, vector.size, count)
        part = Part(vector[positions], positions)
        return Payload(sealed(self.values.encode(part.values, rng)), {"count": count, "seed": seed}), part

    def unpack(self, payload: Payload, size: int) -> Part:
        """The values and their positions. Raises `MessageError`."""
        count = _count(payload, size)
        seed = payload.fields.get("seed")
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise MessageError(f"field 'seed' is {seed!r}, expected a number of 63 bits")
        values = self.values.decode(payload.arrays, count)
        return Part(values, drawn(seed, size, count))


@functools.lru_cache(maxsize=8)  # when all nodes of a process draw alike, one draw serves them all
def drawn(seed: int, size: int, count: int) -> Positions:
    """`count` of `size` positions in increasing order, every such set as likely as any other. Read-only."""
    rng = np.random.Generator(np.random.PCG64(seed))
    positions = rng.choice(size, count, replace=False, shuffle=False)
    if size < 2**31:  # smaller numbers are sorted in half the time
        positions = positions.astype(np.int32)
    positions.sort()
    positions = positions.astype(np.int64, copy=False)
    positions.flags.writeable = False
    return positions


# Compressors


class Compressor(Protocol):
    """Turns a vector into a payload, and payloads into approximations. Has no state: one instance serves all nodes."""

    @property
    def by_chance(self) -> bool:
        """Whether `compress` draws from its generator; if not, that may be None."""
        ...

    def fit(self, size: int) -> None:
        """Raise ValueError if vectors of `size` cannot be compressed, with the reason."""
        ...

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        """What to send for `vector`, and the approximation that others read in it.

        It is never further from `vector` than zero is. Neither of the two changes when `vector` does, and chance comes
        from `rng` alone.
        """
        ...

    def decompress(self, payload: Payload, size: int) -> Part:
        """The approximation of a vector of `size` that is in `payload`, which may come from the network.

        Raises `MessageError` for what `compress` would not have made. Other arrays and fields may lie beside.
        """
        ...


@dataclass(frozen=True)
class TopKCompressor:
    """The `fraction` of coordinates with the largest magnitudes; the others are taken to be zero."""

    fraction: Fraction = 0.1
    values: Values = Float32()
    indices: Indices = GolombRice()

    @property
    def by_chance(self) -> bool:
        return self.values.by_chance

    def fit(self, size: int) -> None:
        kept(size, self.fraction)

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        positions = top_positions(vector, kept(vector.size, self.fraction))
        exact = Part(vector[positions], positions)
        return _shrunk(SparseCode(self.values, self.indices).pack(exact, vector.size, rng), exact, self.values)

    def decompress(self, payload: Payload, size: int) -> Part:
        return _scaled(payload, SparseCode(self.values, self.indices).unpack(payload, size), self.values)


@dataclass(frozen=True)
class RandomCompressor:
    """A random `fraction` of coordinates, by a seed in the message; the others are taken to be zero.

    They are not scaled up to make the mean right: CHOCO and DeepSqueeze want a compressor that brings the vector
    closer, and remember what it left out.
    """

    by_chance: ClassVar[bool] = True

    fraction: Fraction = 0.1
    values: Values = Float32()

    def fit(self, size: int) -> None:
        kept(size, self.fraction)

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        seed, count = int(given(rng).integers(2**63)), kept(vector.size, self.fraction)
        payload, exact = DrawnCode(self.values).pack(vector, count, seed, rng)
        return _shrunk(payload, exact, self.values)

    def decompress(self, payload: Payload, size: int) -> Part:
        return _scaled(payload, DrawnCode(self.values).unpack(payload, size), self.values)


@dataclass(frozen=True)
class QuantizedCompressor:
    """Every coordinate, its value coded by `values`."""

    values: Values = Int8()

    @property
    def by_chance(self) -> bool:
        return self.values.by_chance

    def fit(self, size: int) -> None:
        """Every size will do."""

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        payload = Payload(sealed(self.values.encode(vector, rng), vector))
        return _shrunk(payload, Part(vector), self.values)

    def decompress(self, payload: Payload, size: int) -> Part:
        return _scaled(payload, Part(self.values.decode(payload.arrays, size)), self.values)


def _shrunk(payload: Payload, exact: Part, codec: FloatCodec) -> tuple[Payload, Part]:
    """The payload with the factor that brings its values closest to the exact ones, and what others read in it.

    Rounding by chance to a few levels may add more than the vector itself, and an error that is fed back would then
    grow from round to round. The 2019 paper on CHOCO divides by a bound of that noise. Here the sender, who sees both,
    takes the best factor: <v, C(v)> / <C(v), C(v)>, within 0 and 1. No error is then larger than the vector.
    """
    rounded = codec.decode(payload.arrays, exact.values.size)
    if codec.lossless:
        return payload, Part(rounded, exact.positions)
    factor = _best_factor(exact.values, rounded)
    payload = Payload(payload.arrays, {**payload.fields, "factor": factor})
    return payload, _scaled(payload, Part(rounded, exact.positions), codec)


def _best_factor(exact: Params, rounded: Params) -> float:
    """The multiple, of 0 to 1, of `rounded` that is closest to `exact`; 1 where there is nothing finite to compare."""
    # In doubles, which take longer, where squares leave the range of floats.
    for precision, least in ((np.float32, 1e-30), (np.float64, 0.0)):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            power = float(np.multiply(rounded, rounded, dtype=precision).sum())
            if least < power < math.inf:
                return min(1.0, max(0.0, float(np.multiply(exact, rounded, dtype=precision).sum()) / power))
    return 1.0


def _scaled(payload: Payload, part: Part, codec: FloatCodec) -> Part:
    """The part as its sender has shrunk it. Raises `MessageError` where it does not say how far."""
    if codec.lossless:
        return part
    factor = payload.fields.get("factor")
    if type(factor) is not float or not 0 <= factor <= 1:
        raise MessageError(f"field 'factor' is {factor!r}, expected a number from 0 to 1")
    return part if factor == 1.0 else Part(part.values * np.float32(factor), part.positions)


def _count(payload: Payload, size: int) -> int:
    count = payload.fields.get("count")
    if type(count) is not int or not 0 <= count <= size:
        raise MessageError(f"field 'count' is {count!r}, expected 0 to {size}")
    return count


def sealed(arrays: Mapping[str, NDArray[Any]], source: Params | None = None) -> dict[str, NDArray[Any]]:
    """The arrays, read-only, so that a message takes them without a copy; copied where they may be of `source`."""
    read_only = {}
    for name, array in arrays.items():
        if source is not None and np.may_share_memory(array, source):
            array = array.copy()
        array.flags.writeable = False
        read_only[name] = array
    return read_only
