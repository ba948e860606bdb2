"""Codecs survive a round trip, keep their documented error, and reject what they would not have written."""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from shoal import schema
from shoal.compression import INDICES, VALUES, FloatCodec, IndexCodec, Positions
from shoal.compression.bits import pack, packed_size, unpack
from shoal.compression.floats import BFloat16, Float16, Float32
from shoal.compression.indices import Bitmap, EliasGamma, GolombRice, Raw
from shoal.compression.libraries import Blosc2, Zfp, Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.compression.sparse import fraction_count, top_positions
from shoal.errors import MessageError
from shoal.message import DTYPES, Message, Payload, decode

few = settings(max_examples=20, deadline=None)  # a first example may import a library, which takes its time


def make(registry: Mapping[str, str], name: str, **table: Any) -> Any:
    module, cls = registry[name].split(":")
    return getattr(importlib.import_module(module), cls)(**table)


def have(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


needs_blosc2 = pytest.mark.skipif(not have("blosc2"), reason="blosc2 is not installed: pip install blosc2")
needs_zfp = pytest.mark.skipif(not have("zfpy"), reason="zfpy is not installed: pip install zfpy")

index_codecs = pytest.mark.parametrize("codec", [make(INDICES, name) for name in INDICES], ids=list(INDICES))

CASES: dict[str, list[dict[str, Any]]] = {
    "float32": [{}],
    "float16": [{}],
    "bfloat16": [{}],
    "int8": [{}, {"block": 3}, {"block": 1000, "unbiased": False}],
    "qsgd": [{}, {"levels": 1, "bucket": 7}, {"levels": 7}, {"levels": 1000, "bucket": 5}],
    "zstd": [{}, {"level": 5}],
    "blosc2": [{}, {"codec": "zstd", "shuffle": "bytes"}, {"shuffle": "none"}, {"bits": 7}, {"bits": 0}],
    "zfp": [{}, {"tolerance": 0.0}, {"tolerance": 0.5}],
}
"""Each name of the registry, with tables as an experiment spells them."""

MARKS = {"blosc2": [needs_blosc2], "zfp": [needs_zfp]}
float_codecs = pytest.mark.parametrize(
    ("name", "table"),
    [pytest.param(n, t, marks=MARKS.get(n, []), id=f"{n}-{i}") for n in CASES for i, t in enumerate(CASES[n])],
)


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


# Bits


@few
@given(st.integers(0, 64), st.data())
def test_packed_numbers_survive_a_round_trip_in_the_fewest_bytes(width: int, data: st.DataObject) -> None:
    numbers = data.draw(hnp.arrays(np.uint64, st.integers(0, 40), elements=st.integers(0, 2**width - 1)))
    code = pack(numbers, width)
    assert code.size == packed_size(numbers.size, width) == math.ceil(numbers.size * width / 8)
    np.testing.assert_array_equal(unpack(code, numbers.size, width), numbers)


def test_bits_after_the_last_packed_number_are_rejected() -> None:
    code = pack(np.array([1, 2, 3]), 3)
    code[-1] |= 0x80
    with pytest.raises(MessageError, match="after the last of 3 numbers"):
        unpack(code, 3, 3)


# Sets of positions


@st.composite
def sets(draw: st.DrawFn) -> tuple[Positions, int]:
    """Positions and a size: sparse and dense, scattered and in clusters."""
    size = draw(st.integers(1, 3000))
    generator = rng(draw(st.integers(0, 2**32)))
    chances = generator.random(size) if draw(st.booleans()) else np.linspace(0, 1, size) ** 4
    chosen = generator.random(size) < chances * draw(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]))
    return np.flatnonzero(chosen), size


@index_codecs
@few
@given(sets())
@example((np.empty(0, np.int64), 0))
@example((np.empty(0, np.int64), 1))
@example((np.zeros(1, np.int64), 1))
@example((np.arange(1000), 1000))
@example((np.array([2**40]), 2**41))
@example((np.array([65535]), 65536))
@example((np.array([0, 65536]), 65537))
def test_positions_survive_a_round_trip(codec: IndexCodec, case: tuple[Positions, int]) -> None:
    positions, size = case
    if size > 2**32 and isinstance(codec, Bitmap):
        return
    code = codec.encode(positions, size)
    assert code.dtype == np.uint8
    assert code.ndim == 1
    back = codec.decode(code, positions.size, size)
    assert back.dtype == np.int64
    np.testing.assert_array_equal(back, positions)


def accepted(codec: IndexCodec, code: NDArray[np.uint8], count: int, size: int) -> None:
    """Check that a code is rejected, or is exactly the code of a valid set."""
    try:
        positions = codec.decode(code, count, size)
    except MessageError:
        return
    assert positions.dtype == np.int64
    assert positions.size == count
    assert (np.diff(positions) > 0).all()
    assert not count or (positions[0] >= 0 and positions[-1] < size)
    np.testing.assert_array_equal(codec.encode(positions, size), code)


@index_codecs
@few
@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 200))
def test_any_bytes_are_rejected_or_are_the_code_of_a_set(codec: IndexCodec, raw: bytes, count: int, size: int) -> None:
    accepted(codec, np.frombuffer(raw, np.uint8), count, size)


@index_codecs
@few
@given(sets(), st.data())
def test_damaged_codes_are_rejected_or_are_the_code_of_another_set(
    codec: IndexCodec, case: tuple[Positions, int], data: st.DataObject
) -> None:
    positions, size = case
    code = codec.encode(positions, size).copy()
    how = data.draw(st.sampled_from(["flip", "cut", "longer", "fewer", "more"]))
    count = positions.size + {"fewer": -1, "more": 1}.get(how, 0)
    if how == "flip" and code.size:
        code[data.draw(st.integers(0, code.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        code = code[: data.draw(st.integers(0, code.size))]
    elif how == "longer":
        code = np.append(code, np.uint8(data.draw(st.integers(0, 255))))
    accepted(codec, code, count, size)


@index_codecs
def test_codes_that_are_cut_or_have_bytes_after_them_are_rejected(codec: IndexCodec) -> None:
    positions = np.flatnonzero(rng().random(1000) < 0.2)
    code = codec.encode(positions, 1000)
    for wrong in (code[:-1], np.append(code, np.uint8(0)), np.append(code, np.uint8(255)), code[:0]):
        with pytest.raises(MessageError):
            codec.decode(wrong, positions.size, 1000)


@index_codecs
@pytest.mark.parametrize("count", [-1, 1001, 2**62, 2.0, "3", None])
def test_impossible_counts_are_rejected(codec: IndexCodec, count: Any) -> None:
    with pytest.raises(MessageError, match="expected 0 to 1000"):
        codec.decode(np.zeros(4, np.uint8), count, 1000)


@index_codecs
@pytest.mark.parametrize(
    "code",
    [np.zeros(4, np.int8), np.zeros((2, 2), np.uint8), np.zeros(4), b"\0\0\0\0"],
    ids=["int8", "matrix", "doubles", "bytes"],
)
def test_codes_that_are_not_rows_of_bytes_are_rejected(codec: IndexCodec, code: Any) -> None:
    with pytest.raises(MessageError, match="vector of uint8"):
        codec.decode(code, 2, 1000)


@index_codecs
@pytest.mark.parametrize(
    "positions", [[3, 3], [4, 3], [-1, 3], [3, 10]], ids=["twice", "falling", "negative", "beyond"]
)
def test_positions_that_are_no_set_are_never_coded(codec: IndexCodec, positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"strictly increase within \[0, 10\)"):
        codec.encode(np.array(positions), 10)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_tenth_of_a_model_takes_golomb_rice_less_than_5_bits_an_index_on_the_wire(seed: int) -> None:
    count, size = 8983, 89_834
    positions = np.sort(rng(seed).choice(size, count, replace=False))
    payload = Payload({"indices": GolombRice().encode(positions, size)}, {"count": count})
    without = Message(0, "model", 1, Payload({})).wire_size
    bits = 8 * (Message(0, "model", 1, payload).wire_size - without) / count
    assert bits <= 4.9, bits  # the entropy is 4.69


def test_no_set_takes_golomb_rice_much_more_than_a_random_one() -> None:
    size, count = 10_000, 1000
    for positions in (np.arange(count), np.arange(size - count, size), np.arange(0, size, 10), np.arange(9, size, 10)):
        assert 8 * GolombRice().encode(positions, size).size / count <= 5.3


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_golomb_rice_stays_near_the_entropy_at_every_density(share: float) -> None:
    size = 50_000
    positions = np.sort(rng().choice(size, int(share * size), replace=False))
    entropy = size * -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    assert GolombRice().encode(positions, size).size <= 1.06 * entropy + 4


def test_sets_that_are_dense_in_places_take_golomb_rice_less_than_random_ones() -> None:
    size, count = 89_834, 8983
    chances = np.linspace(0, 1, size) ** 3
    positions = np.sort(rng().choice(size, count, replace=False, p=chances / chances.sum()))
    assert 8 * GolombRice().encode(positions, size).size / count <= 4


def test_all_positions_take_golomb_rice_no_byte() -> None:
    assert GolombRice().encode(np.arange(1000), 1000).size == 0


def test_gaps_whose_sum_would_wrap_around_are_rejected() -> None:
    size = 2**47
    huge = EliasGamma().encode(np.array([size - 1]), size)
    bits = np.unpackbits(huge)
    lengths, rest = bits[:48], bits[48:95]
    many = 2**17
    code = np.packbits(np.concatenate([np.tile(lengths, many), np.tile(rest, many)]))
    with pytest.raises(MessageError, match="expected positions below"):
        EliasGamma().decode(code, many, size)


def test_raw_positions_take_16_bits_where_they_can() -> None:
    assert Raw().encode(np.arange(10), 65536).size == 20
    assert Raw().encode(np.arange(10), 65537).size == 40


# Values

anything = hnp.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1)).map(
    lambda words: words.view(np.float32)
)
finite = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
SPECIAL = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 65519, 65520], np.float32
)


def sent(codec: FloatCodec, values: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """The arrays of `values`, and what a receiver makes of them after the wire."""
    arrays = codec.encode(values, rng())
    assert all(a.dtype.str in DTYPES and a.ndim == 1 for a in arrays.values())
    frames = [bytes(f) for f in Message(0, "model", 1, Payload(arrays)).frames()]
    arrived = decode(frames).payload.arrays
    back = codec.decode(arrived, values.size)
    assert back.dtype == np.float32
    assert back.shape == values.shape
    return arrays, back


@float_codecs
@few
@given(values=anything)
@example(values=SPECIAL)
@example(values=np.zeros(0, np.float32))
@example(values=np.zeros(5000, np.float32))
def test_lossless_codecs_restore_every_bit(name: str, table: dict[str, Any], values: NDArray[np.float32]) -> None:
    codec: FloatCodec = make(VALUES, name, **table)
    if not codec.lossless:
        return
    np.testing.assert_array_equal(sent(codec, values)[1].view(np.uint32), values.view(np.uint32))


def farthest(codec: FloatCodec, values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the largest error of each value, as documented by the codecs."""
    exact: NDArray[np.float64] = values.astype(np.float64)
    tiny, rounding = 2.0**-149, 1e-6
    if isinstance(codec, Float16):
        allowed: NDArray[np.float64] = np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25)
        allowed += np.maximum(np.abs(exact) - 65504, 0)
        return allowed
    if isinstance(codec, BFloat16 | Blosc2):
        bits = 7 if isinstance(codec, BFloat16) else codec.bits
        return np.abs(exact) * 2.0 ** -(bits + 1) + 2.0 ** -(127 + bits)
    if isinstance(codec, Int8 | QSGD):
        width = codec.block if isinstance(codec, Int8) else codec.bucket
        rows = [exact[i : i + width] for i in range(0, exact.size, width)]
        if isinstance(codec, Int8):
            steps = [float(np.abs(row).max()) / 127 / (1 if codec.unbiased else 2) for row in rows]
        else:
            steps = [min(float(np.linalg.norm(row)), 3.4028235e38) / codec.levels for row in rows]
        levels = 127 if isinstance(codec, Int8) else codec.levels
        return np.repeat(steps, width)[: exact.size] * (1 + rounding * levels) + 2 * tiny
    assert isinstance(codec, Zfp)
    blocks = [exact[i : i + 4] for i in range(0, exact.size, 4)]
    return np.repeat([max(codec.tolerance, 2.0**-22 * np.abs(b).max()) for b in blocks], 4)[: exact.size]


@float_codecs
@few
@given(values=finite)
@example(values=np.array([3.4e38, -3.4e38, 3.4028235e38], np.float32))
@example(values=np.array([1e-45, 0.0, -1e-45, -0.0], np.float32))
@example(values=rng().normal(0, 0.05, 5000).astype(np.float32))
def test_lossy_codecs_stay_within_their_documented_error(
    name: str, table: dict[str, Any], values: NDArray[np.float32]
) -> None:
    codec: FloatCodec = make(VALUES, name, **table)
    if codec.lossless:
        return
    back = sent(codec, values)[1]
    assert np.isfinite(back).all()
    moved = np.abs(back.astype(np.float64) - values)
    assert (moved <= farthest(codec, values)).all()


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=["float16", "bfloat16"])
def test_halves_keep_nan_infinities_and_the_sign_of_zero(codec: FloatCodec) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0], np.float32)
    back = sent(codec, values)[1]
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(np.signbit(back[1:]), np.signbit(values[1:]))


def test_halves_keep_the_finite_finite() -> None:
    huge = np.array([65504, 65519, 65520, 1e30, -1e30, np.inf], np.float32)
    np.testing.assert_array_equal(sent(Float16(), huge)[1], [65504, 65504, 65504, 65504, -65504, np.inf])
    top = np.array([3.4028235e38, -3.4028235e38, np.inf], np.float32)
    np.testing.assert_array_equal(sent(BFloat16(), top)[1], np.array([3.3895314e38, -3.3895314e38, np.inf], np.float32))


def test_bfloat16_rounds_to_nearest_even() -> None:
    words = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)
    halves = BFloat16().encode(words.view(np.float32), rng())["values"]
    assert [hex(h) for h in halves] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80"]


@few
@given(anything)
def test_bfloat16_equals_that_of_torch_for_finite_values(values: NDArray[np.float32]) -> None:
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    ours = sent(BFloat16(), values)[1]
    same = np.isfinite(theirs) | ~np.isfinite(values)
    np.testing.assert_array_equal(ours[same], theirs[same])


@pytest.mark.parametrize(
    "codec", [Int8(block=16), QSGD(levels=1, bucket=16), QSGD(levels=7), QSGD(levels=1000, bucket=5)], ids=str
)
def test_stochastic_rounding_is_unbiased(codec: FloatCodec) -> None:
    values = rng(1).normal(0, 1, 64).astype(np.float32)
    draws, generator = 4000, rng(2)
    heard = np.stack([codec.decode(codec.encode(values, generator), values.size) for _ in range(draws)])
    error = heard.astype(np.float64).mean(axis=0) - values
    deviation = heard.astype(np.float64).std(axis=0) / math.sqrt(draws)
    assert (np.abs(error) <= 4.5 * deviation + 1e-6).all()
    assert deviation.max() > 0


@pytest.mark.parametrize("codec", [Int8(block=1), QSGD(bucket=1), QSGD(levels=2**15 - 1, bucket=1)], ids=str)
def test_stochastic_rounding_never_exceeds_the_largest_level(codec: FloatCodec) -> None:
    values = rng().normal(size=100_000).astype(np.float32) * np.float32(10) ** rng().integers(-40, 38, 100_000)
    back = codec.decode(codec.encode(values.astype(np.float32), rng()), values.size)
    np.testing.assert_allclose(back, values, rtol=0.01)  # not one has changed its sign


def test_only_stochastic_codecs_need_a_generator() -> None:
    values = rng().normal(size=100).astype(np.float32)
    for name in CASES:
        if name not in MARKS and not make(VALUES, name).stochastic:
            make(VALUES, name).encode(values, None)
    Int8(unbiased=False).encode(values, None)
    for codec in (Int8(), QSGD()):
        assert codec.stochastic
        with pytest.raises(ValueError, match="needs a generator"):
            codec.encode(values, None)


def test_qsgd_has_the_variance_of_the_paper() -> None:
    values = rng(1).normal(0, 1, 256).astype(np.float32)
    for levels in (1, 4, 64):
        codec, generator = QSGD(levels=levels, bucket=256), rng(2)
        heard = [codec.decode(codec.encode(values, generator), values.size) for _ in range(300)]
        variance = np.mean([np.sum((h.astype(np.float64) - values) ** 2) for h in heard])
        bound = min(values.size / levels**2, math.sqrt(values.size) / levels)
        assert variance <= bound * np.sum(values.astype(np.float64) ** 2)


def test_equal_generators_round_alike() -> None:
    values = rng().normal(size=1000).astype(np.float32)
    for codec in (Int8(), QSGD()):
        one, other = codec.encode(values, rng(3)), codec.encode(values, rng(3))
        assert all(np.array_equal(one[name], other[name]) for name in one)
    nearest = Int8(unbiased=False)
    assert np.array_equal(nearest.encode(values, rng(3))["values"], nearest.encode(values, rng(4))["values"])


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 3), (7, 4), (15, 5), (127, 8), (128, 9), (2**15 - 1, 16)])
def test_qsgd_packs_a_value_into_a_sign_and_the_bits_of_its_level(levels: int, bits: int) -> None:
    arrays = QSGD(levels=levels, bucket=512).encode(np.ones(1024, np.float32), rng())
    assert arrays["values"].nbytes == 1024 * bits // 8
    assert arrays["scale"].nbytes == 8


def test_float32_is_sent_without_a_copy() -> None:
    values = np.ones(4, np.float32)
    arrays = Float32().encode(values, rng())
    assert arrays["values"] is values
    assert np.shares_memory(Float32().decode(arrays, 4), values)


# Values that anyone may have sent


@float_codecs
def test_arrays_of_a_wrong_form_are_rejected(name: str, table: dict[str, Any]) -> None:
    codec: FloatCodec = make(VALUES, name, **table)
    values = rng().normal(size=2100).astype(np.float32)
    right = codec.encode(values, rng())
    for key, array in right.items():
        wrong: list[NDArray[Any]] = [array.reshape(1, -1), array.astype(np.float64), array[:0], np.append(array, array)]
        for other in wrong:
            if name == "zfp" and other.ndim == 1 and other.size > array.size and other.dtype == array.dtype:
                continue  # not longer than the longest code: other values, not wrong ones
            with pytest.raises(MessageError):
                codec.decode({**right, key: other}, values.size)
        with pytest.raises(MessageError, match=f"no array '{key}'"):
            codec.decode({k: a for k, a in right.items() if k != key}, values.size)
    near = () if name == "zfp" else (1, values.size - 1, values.size + 1)  # its code does not contain the count
    for count in (-1, -(2**40), 0, 2**40, *near):
        with pytest.raises(MessageError):
            codec.decode(right, count)


@float_codecs
@few
@given(data=st.data())
def test_damaged_arrays_are_rejected_or_give_as_many_values(
    name: str, table: dict[str, Any], data: st.DataObject
) -> None:
    codec: FloatCodec = make(VALUES, name, **table)
    count = data.draw(st.sampled_from([1, 5, 300]))
    arrays = {k: a.copy() for k, a in codec.encode(rng().normal(size=count).astype(np.float32), rng()).items()}
    key = data.draw(st.sampled_from(sorted(arrays)))
    raw = arrays[key].view(np.uint8)
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, raw.size - 1))] = data.draw(st.integers(0, 255))
    else:
        raw[...] = np.frombuffer(rng(data.draw(st.integers(0, 2**32))).bytes(raw.size), np.uint8)
    try:
        values = codec.decode(arrays, count)
    except MessageError:
        return
    assert values.shape == (count,)
    assert values.dtype == np.float32


@pytest.mark.parametrize(
    "name", ["zstd", pytest.param("blosc2", marks=needs_blosc2), pytest.param("zfp", marks=needs_zfp)]
)
@few
@given(raw=st.binary(max_size=200), count=st.integers(0, 50))
def test_bytes_of_any_kind_are_rejected_or_give_as_many_values(name: str, raw: bytes, count: int) -> None:
    try:
        values = make(VALUES, name).decode({"values": np.frombuffer(raw, np.uint8)}, count)
    except MessageError:
        return
    assert values.shape == (count,)


@pytest.mark.parametrize("scale", [np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("codec", [Int8(), QSGD()], ids=["int8", "qsgd"])
def test_scales_that_are_negative_or_infinite_are_rejected(codec: FloatCodec, scale: float) -> None:
    arrays = codec.encode(np.ones(1000, np.float32), rng())
    arrays["scale"][-1] = scale
    with pytest.raises(MessageError, match="negative or infinite"):
        codec.decode(arrays, 1000)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", [Int8(), Int8(unbiased=False), QSGD()], ids=["int8", "nearest", "qsgd"])
def test_a_block_that_is_not_finite_is_nan_throughout_and_no_other_is(codec: FloatCodec, wrong: float) -> None:
    values = np.ones(1000, np.float32)
    values[700] = wrong
    back = codec.decode(codec.encode(values, rng()), 1000)
    assert np.isnan(back[700])
    assert np.isfinite(back[:512]).all()
    assert (np.isnan(back) | np.isfinite(back)).all()


def test_zfp_sends_non_finite_values_unchanged() -> None:
    pytest.importorskip("zfpy")
    values = np.array([1.0, np.nan, -np.inf, 2.5], np.float32)
    back = Zfp().decode(Zfp().encode(values, None), 4)
    assert np.array_equal(back, values, equal_nan=True)


def test_levels_beyond_the_last_are_rejected() -> None:
    arrays = Int8().encode(np.ones(10, np.float32), rng())
    arrays["values"][3] = -128
    with pytest.raises(MessageError, match="-128"):
        Int8().decode(arrays, 10)
    with pytest.raises(MessageError, match="level 3, expected at most 2"):
        QSGD(levels=1).decode({"values": np.full(1, 255, np.uint8), "scale": np.ones(1, np.float32)}, 4)


def test_a_decompression_bomb_is_rejected_before_it_is_decompressed() -> None:
    import zstandard

    honest = zstandard.ZstdCompressor(level=19).compress(bytes(2**26))
    streamed = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(2**26))
    assert max(len(honest), len(streamed)) < 10_000
    lying = honest[:6] + struct.pack("<I", 4000) + honest[10:]  # claims to decompress to 4,000 bytes
    assert zstandard.get_frame_parameters(lying).content_size == 4000
    tracemalloc.start()
    try:
        for bomb in (honest, streamed, lying):
            with pytest.raises(MessageError):
                Zstd().decode({"values": np.frombuffer(bomb, np.uint8)}, 1000)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_zstandard_frames_with_trailing_data_are_rejected() -> None:
    code = Zstd().encode(np.ones(10, np.float32), rng())["values"]
    with pytest.raises(MessageError):
        Zstd().decode({"values": np.append(code, code)}, 10)


@needs_blosc2
@pytest.mark.parametrize(
    ("at", "byte"), [(2, 0xA5), (3, 8), (4, 0xFF), (8, 0xFF), (12, 0xFF), (16, 35), (17, 160), (22, 37), (31, 0x40)]
)
def test_blosc2_chunks_of_other_forms_are_rejected(at: int, byte: int) -> None:
    code = Blosc2().encode(rng().normal(size=1000).astype(np.float32), rng())["values"].copy()
    code[at] = byte
    with pytest.raises(MessageError, match="not a Blosc2 chunk of 4000 bytes"):
        Blosc2().decode({"values": code}, 1000)


# What an experiment sees


@pytest.mark.parametrize("registry", [INDICES, VALUES], ids=["indices", "values"])
def test_every_codec_has_a_description_and_parameters_that_a_file_can_contain(
    registry: dict[str, str],
) -> None:
    for place in registry.values():
        module, name = place.split(":")
        cls = getattr(importlib.import_module(module), name)
        first = (cls.__doc__ or "").splitlines()[0]
        assert 20 < len(first) < 120
        assert not first.startswith(f"{name}(")
        schema.parameters(cls)
    assert set(CASES) == set(VALUES)


def test_parameters_out_of_bounds_are_named() -> None:
    problems: list[str] = []
    schema.build(QSGD, {"levels": 0, "bucket": 0}, "values", problems)
    schema.build(Int8, {"block": 0}, "values", problems)
    assert len(problems) == 3
    assert "values.levels = 0: expected integer at least 1 and at most 32767" in problems


@pytest.mark.parametrize(("cls", "library"), [(Zstd, "zstandard"), (Blosc2, "blosc2"), (Zfp, "zfpy")])
def test_a_missing_library_is_named_when_the_codec_is_made(
    cls: type, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"pip install {library}"):
        cls()


def test_making_codecs_imports_no_library() -> None:
    program = (
        "import sys\n"
        "from shoal.compression.libraries import Blosc2, Zfp, Zstd\n"
        "for codec in (Zstd, Blosc2, Zfp):\n"
        "    try: codec()\n"
        "    except ValueError: pass\n"
        "print(sorted({'zstandard', 'blosc2', 'zfpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Which coordinates


@few
@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0, np.inf, np.nan])),
    st.data(),
)
def test_the_largest_win_and_among_equals_the_first(magnitudes: NDArray[np.float32], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, magnitudes.size))
    key = np.where(np.isnan(magnitudes), np.float32(np.inf), magnitudes)
    expected = sorted(sorted(range(key.size), key=lambda i: (-key[i], i))[:count])
    chosen = top_positions(magnitudes, count)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == expected


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.05, 0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", ["normal", "few values", "mostly zero", "diverged", "odd ones large", "rising"])
def test_the_largest_of_many_equal_those_of_a_stable_sort(kind: str, share: float) -> None:
    values = rng().normal(size=20_011).astype(np.float32)
    if kind == "few values":
        values = np.round(values * 2)
    elif kind == "mostly zero":
        values[rng(1).random(values.size) < 0.97] = 0
    elif kind == "diverged":
        values[::7], values[::9], values[3] = np.nan, -np.inf, -np.nan
    elif kind == "odd ones large":  # and a sample of every eighth sees none or all of them
        values[:: 8 if share < 0.1 else 1] *= 100
        values[1::8] *= 10_000
    elif kind == "rising":
        values = np.arange(values.size, dtype=np.float32)
    count = int(share * values.size)
    key = np.where(np.isnan(values), np.float32(np.inf), np.abs(values))
    expected = np.sort(np.argsort(-key, kind="stable")[:count])
    np.testing.assert_array_equal(top_positions(values, count), expected)


def test_more_coordinates_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="count is 4, expected 0 to 3"):
        top_positions(np.ones(3, np.float32), 4)


@pytest.mark.parametrize(
    ("size", "fraction", "count"), [(89_834, 0.1, 8983), (10, 0.01, 1), (10, 1.0, 10), (1, 0.5, 1), (0, 0.5, 0)]
)
def test_a_share_is_rounded_down_but_never_to_nothing(size: int, fraction: float, count: int) -> None:
    assert fraction_count(size, fraction) == count
