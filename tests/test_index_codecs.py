"""Codecs of positions: they invert, stay near the entropy, and reject invalid codes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from codec_cases import few, index_codecs, rng
from shoal.compression import IndexCodec, Positions
from shoal.compression.bits import pack, packed_size, unpack
from shoal.compression.indices import Bitmap, EliasGamma, GolombRice, Raw
from shoal.errors import MessageError
from shoal.message import Message, Payload

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
def test_one_more_byte_of_zeros_is_rejected(codec: IndexCodec) -> None:
    """For every number of unused bits in the last byte of the code."""
    for count in range(1, 30):
        positions = np.arange(0, 3 * count, 3)
        code = codec.encode(positions, 100)
        with pytest.raises(MessageError):
            codec.decode(np.append(code, np.uint8(0)), count, 100)


def rice_code(gaps: list[int], width: int, width_bits: int, padding: int = 0) -> NDArray[np.uint8]:
    """One run of gaps with this width of remainders, and zeros or ones in the padding of the last byte."""
    bits = [width >> bit & 1 for bit in range(width_bits)]
    bits += [(gap - 1) >> bit & 1 for bit in range(width) for gap in gaps]
    for gap in gaps:
        bits += [0] * (gap - 1 >> width) + [1]
    return np.packbits(np.array([*bits, *[padding] * (-len(bits) % 8)], np.uint8))


def test_golomb_rice_rejects_the_same_positions_with_other_widths_of_remainders() -> None:
    positions, gaps, size = np.array([4, 9, 17, 40]), [5, 5, 8, 23], 100
    code = GolombRice().encode(positions, size)
    width_bits = next(n for n in range(1, 8) for width in range(8) if np.array_equal(rice_code(gaps, width, n), code))
    accepted = []
    for width in range(6):
        try:
            found = GolombRice().decode(rice_code(gaps, width, width_bits), 4, size)
        except MessageError:
            continue
        assert np.array_equal(found, positions)
        accepted.append(width)
    assert len(accepted) == 1
    with pytest.raises(MessageError):
        GolombRice().decode(rice_code(gaps, accepted[0], width_bits, padding=1), 4, size)


def test_golomb_rice_rejects_remainders_beyond_the_last_position() -> None:
    """Two runs: 65 positions are runs of 33 and 32, and the second has one unused place for a remainder."""
    positions, size = np.arange(65) * 9, 1000
    code = GolombRice().encode(positions, size)
    assert np.array_equal(GolombRice().decode(code, 65, size), positions)
    for bit in range(8 * code.size):
        other = code.copy()
        other[bit // 8] ^= 0x80 >> bit % 8
        try:
            found = GolombRice().decode(other, 65, size)
        except MessageError:
            continue
        assert not np.array_equal(found, positions), f"bit {bit} has no meaning"


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
