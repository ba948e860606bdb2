"""Codecs of values: their errors, and invalid arrays."""

from __future__ import annotations

import math
import struct
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from codec_cases import CASES, MARKS, few, float_codecs, make, needs_blosc2, needs_zfp, rng
from shoal.compression import VALUES, FloatCodec
from shoal.compression.floats import BFloat16, Float16, Float32
from shoal.compression.libraries import Blosc2, Zfp, Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.errors import MessageError
from shoal.message import DTYPES, Message, Payload, decode

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


@pytest.mark.parametrize("last", [0x00000000, 0x7F800000], ids=["finite", "with an infinity"])
def test_bfloat16_rounds_to_nearest_even(last: int) -> None:
    words = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, last], np.uint32)
    halves = BFloat16().encode(words.view(np.float32), rng())["values"]
    assert [hex(h) for h in halves] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", hex(last >> 16)]


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
    decoded = np.stack([codec.decode(codec.encode(values, generator), values.size) for _ in range(draws)])
    error = decoded.astype(np.float64).mean(axis=0) - values
    deviation = decoded.astype(np.float64).std(axis=0) / math.sqrt(draws)
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
        decoded = [codec.decode(codec.encode(values, generator), values.size) for _ in range(300)]
        variance = np.mean([np.sum((h.astype(np.float64) - values) ** 2) for h in decoded])
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
    zeros = values.copy()
    values[700], zeros[512 : 1000 if isinstance(codec, QSGD) else 768] = wrong, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = codec.encode(values, rng())
    assert np.array_equal(arrays["values"], codec.encode(zeros, rng())["values"]), "only the scale differs"
    back = codec.decode(arrays, 1000)
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
