"""Compressors: a vector as a small payload, and the payload as an approximation of the vector.

Sharings that send a part or an approximation of a model use these. `SparseCode` and `SeededCode` encode values at given
positions; compressors choose the positions as well.

Decoding checks all data from the network. Positions are distinct and within the vector, there are as many values as
positions, and arrays have the type and size that the codec writes: anything else raises `MessageError`. Values may be
anything that their codec carries. For codecs of plain floats this includes NaN, as in full sharing: a diverged model is
visible as one.
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

from shoal.compression.floats import Float32, FloatCodec
from shoal.compression.indices import GolombRice, IndexCodec, Positions
from shoal.compression.quantizers import Int8, require_generator
from shoal.compression.sparse import kept_count, top_positions
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.types import Bounds, Nested, Params

Fraction: TypeAlias = Annotated[float, Bounds(above=0, at_most=1)]
Values: TypeAlias = Annotated[FloatCodec, Nested("values")]
Indices: TypeAlias = Annotated[IndexCodec, Nested("indices")]


@dataclass(frozen=True)
class Part:
    """Values at increasing positions of a vector; at all positions if `positions` is None.

    Read-only: the values may belong to a message that other nodes hold too.
    """

    values: Params
    positions: Positions | None = None

    def add_to(self, target: NDArray[np.floating], weight: float = 1.0) -> None:
        """Add weight · part to `target`, in place, in its precision. The part is zero at all other positions."""
        values = self.values if weight == 1.0 else np.multiply(self.values, weight, dtype=target.dtype)
        if self.positions is None:
            target += values
        else:
            np.add.at(target, self.positions, values)  # one pass; += would gather and scatter


# Some coordinates


@dataclass(frozen=True)
class SparseCode:
    """Values at positions that the sender chooses. Values, positions and their number are sent."""

    values: FloatCodec
    indices: IndexCodec

    def pack(self, part: Part, size: int, rng: np.random.Generator | None) -> Payload:
        """Return the payload for a part of a vector of `size`. Stochastic value codecs need `rng`."""
        assert part.positions is not None
        arrays = {
            "positions": self.indices.encode(part.positions, size),
            **self.values.encode(part.values, rng),
        }
        return Payload(read_only(arrays, part.values), {"count": part.positions.size})

    def unpack(self, payload: Payload, size: int) -> Part:
        """Return the part that `pack` encoded, to the accuracy of the value codec. Raises `MessageError`."""
        count = _count(payload, size)
        code = payload.arrays.get("positions")
        if code is None:
            raise MessageError("no array 'positions'")
        return Part(self.values.decode(payload.arrays, count), _decoded(self.indices, code, count, size))


_known: dict[int, tuple[weakref.ref[NDArray[Any]], tuple[IndexCodec, int, int], Positions]] = {}
"""The positions of codes that still exist, by identity."""


def _decoded(indices: IndexCodec, code: NDArray[Any], count: int, size: int) -> Positions:
    """Return the positions, read-only. In the simulation all receivers share one message: it is decoded once."""
    key, how = id(code), (indices, count, size)
    known = _known.get(key)
    if known is not None and known[0]() is code and known[1] == how:
        return known[2]
    positions = indices.decode(code, count, size)
    positions.setflags(write=False)
    if not code.flags.writeable:
        _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), how, positions
    return positions


@dataclass(frozen=True)
class SeededCode:
    """Values at random positions. The seed of the positions is sent, and not the positions."""

    values: FloatCodec

    def pack(self, vector: Params, count: int, seed: int, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        """Return the payload and the part it encodes: `vector` at the `count` positions of `seed`.

        `seed` has 63 bits. Stochastic value codecs need `rng`.
        """
        positions = random_positions(seed, vector.size, count)
        part = Part(vector[positions], positions)
        return Payload(read_only(self.values.encode(part.values, rng)), {"count": count, "seed": seed}), part

    def unpack(self, payload: Payload, size: int) -> Part:
        """Return the values and their positions. Raises `MessageError`."""
        count = _count(payload, size)
        seed = payload.fields.get("seed")
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise MessageError(f"field 'seed' is {seed!r}, expected an integer of 63 bits")
        values = self.values.decode(payload.arrays, count)
        return Part(values, random_positions(seed, size, count))


@functools.lru_cache(maxsize=8)  # nodes of one process with equal seeds share one draw
def random_positions(seed: int, size: int, count: int) -> Positions:
    """Return `count` of `size` positions in increasing order, all sets equally likely. Read-only."""
    rng = np.random.Generator(np.random.PCG64(seed))
    positions = rng.choice(size, count, replace=False, shuffle=False)
    if size < 2**31:  # half the time to sort
        positions = positions.astype(np.int32)
    positions.sort()
    positions = positions.astype(np.int64, copy=False)
    positions.setflags(write=False)
    return positions


# Compressors


class Compressor(Protocol):
    """Turns vectors into payloads, and payloads into approximations. One instance, without state, serves all nodes."""

    @property
    def stochastic(self) -> bool:
        """Whether `compress` draws from its generator. If not, the generator may be None."""
        ...

    def fit(self, size: int) -> None:
        """Raise ValueError with the reason if vectors of `size` cannot be compressed."""
        ...

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        """Return the payload for `vector`, and the approximation that receivers decode.

        The approximation is never further from `vector` than zero is. Later changes of `vector` affect neither of the
        two. Random numbers come from `rng` alone.
        """
        ...

    def decompress(self, payload: Payload, size: int) -> Part:
        """Return the approximation of a vector of `size` in `payload`, which may come from the network.

        Raises `MessageError` for a payload that `compress` does not produce. Other arrays and fields are ignored.
        """
        ...


@dataclass(frozen=True)
class TopKCompressor:
    """The `fraction` of coordinates with the largest magnitudes; the others count as zero."""

    fraction: Fraction = 0.1
    values: Values = Float32()
    indices: Indices = GolombRice()

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    def fit(self, size: int) -> None:
        kept_count(size, self.fraction)

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        positions = top_positions(vector, kept_count(vector.size, self.fraction))
        exact = Part(vector[positions], positions)
        return _with_best_factor(
            SparseCode(self.values, self.indices).pack(exact, vector.size, rng), exact, self.values
        )

    def decompress(self, payload: Payload, size: int) -> Part:
        return _apply_factor(payload, SparseCode(self.values, self.indices).unpack(payload, size), self.values)


@dataclass(frozen=True)
class RandomCompressor:
    """A random `fraction` of coordinates, with their seed in the message; the others count as zero.

    Values are not scaled up to an unbiased estimate: CHOCO and DeepSqueeze need a compressor that reduces the distance
    to the vector, and they keep the error.
    """

    stochastic: ClassVar[bool] = True

    fraction: Fraction = 0.1
    values: Values = Float32()

    def fit(self, size: int) -> None:
        kept_count(size, self.fraction)

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        seed, count = int(require_generator(rng).integers(2**63)), kept_count(vector.size, self.fraction)
        payload, exact = SeededCode(self.values).pack(vector, count, seed, rng)
        return _with_best_factor(payload, exact, self.values)

    def decompress(self, payload: Payload, size: int) -> Part:
        return _apply_factor(payload, SeededCode(self.values).unpack(payload, size), self.values)


@dataclass(frozen=True)
class QuantizedCompressor:
    """All coordinates, with values encoded by `values`."""

    values: Values = Int8()

    @property
    def stochastic(self) -> bool:
        return self.values.stochastic

    def fit(self, size: int) -> None:
        """Accept every size."""

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        payload = Payload(read_only(self.values.encode(vector, rng), vector))
        return _with_best_factor(payload, Part(vector), self.values)

    def decompress(self, payload: Payload, size: int) -> Part:
        return _apply_factor(payload, Part(self.values.decode(payload.arrays, size)), self.values)


def _with_best_factor(payload: Payload, exact: Part, codec: FloatCodec) -> tuple[Payload, Part]:
    """Return the payload with the factor that brings its values closest to the exact ones, and its approximation.

    Stochastic rounding to a few levels may add noise that is larger than the vector, and with error feedback the error
    would grow from round to round. The 2019 paper on CHOCO divides by a bound of that noise. Here the sender, who knows
    both, uses the best factor: <v, C(v)> / <C(v), C(v)>, within 0 and 1. Then no error is larger than the vector.
    """
    rounded = codec.decode(payload.arrays, exact.values.size)
    if codec.lossless:
        return payload, Part(rounded, exact.positions)
    factor = _best_factor(exact.values, rounded)
    payload = payload.with_field("factor", factor)
    return payload, _apply_factor(payload, Part(rounded, exact.positions), codec)


def _best_factor(exact: Params, rounded: Params) -> float:
    """Return the factor from 0 to 1 that brings `rounded` closest to `exact`; 1 if nothing is finite."""
    # Doubles, which are slower, serve only if squares exceed the range of floats.
    for precision, least in ((np.float32, 1e-30), (np.float64, 0.0)):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            power = float(np.multiply(rounded, rounded, dtype=precision).sum())
            if least < power < math.inf:
                return min(1.0, max(0.0, float(np.multiply(exact, rounded, dtype=precision).sum()) / power))
    return 1.0


def _apply_factor(payload: Payload, part: Part, codec: FloatCodec) -> Part:
    """Return the part times the factor in the payload. Raises `MessageError` if the factor is missing or invalid."""
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


def read_only(arrays: Mapping[str, NDArray[Any]], source: Params | None = None) -> dict[str, NDArray[Any]]:
    """Make arrays read-only, so that a message can use them without a copy; copies arrays that may share `source`."""
    result = {}
    for name, array in arrays.items():
        if source is not None and np.may_share_memory(array, source):
            array = array.copy()
        array.setflags(write=False)
        result[name] = array
    return result
