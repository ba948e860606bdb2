"""Compressors: the same approximation at sender and receiver, and fair random coordinates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_exchange import few
from shoal.compression.compressors import (
    Compressor,
    Part,
    QuantizedCompressor,
    RandomCompressor,
    SparseCode,
    TopKCompressor,
    random_positions,
)
from shoal.compression.floats import BFloat16, Float16, Float32
from shoal.compression.indices import GolombRice
from shoal.compression.quantizers import QSGD
from shoal.compression.sparse import kept_count
from shoal.message import Message, decode


def test_every_set_of_coordinates_is_drawn_as_often_as_any_other() -> None:
    counts = np.zeros(12)
    for seed in range(3000):
        positions = random_positions(seed, 12, 3)
        assert (np.diff(positions) > 0).all()
        counts[positions] += 1
    assert np.abs(counts / 3000 - 3 / 12).max() < 0.04


# Compressors


@few
@given(
    st.integers(1, 300),
    st.integers(0, 2**32),
    st.sampled_from(
        [
            TopKCompressor(1.0),
            TopKCompressor(1.0, QSGD(1)),
            RandomCompressor(1.0, BFloat16()),
            QuantizedCompressor(),
            QuantizedCompressor(QSGD(1, 512)),
            QuantizedCompressor(Float32()),
        ]
    ),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_sender_and_receiver_have_the_same_approximation_with_bounded_error(
    size: int, seed: int, compressor: Compressor, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    vector = (rng.standard_normal(size) * scale).astype(np.float32)
    if isinstance(compressor, TopKCompressor | RandomCompressor):
        compressor = dataclasses.replace(compressor, fraction=max(1 / size + 1e-9, 0.3))
    compressor.fit(size)
    payload, compressed = compressor.compress(vector, rng)
    kept = vector.astype(np.float64)
    vector[:] = np.nan  # neither result may depend on it
    received = compressor.decompress(decode([bytes(f) for f in Message(0, "m", 0, payload).frames()]).payload, size)
    approximations = [np.zeros(size, np.float32) for _ in range(2)]
    for part, approximation in zip((compressed, received), approximations, strict=True):
        part.add_to(approximation)
    assert np.array_equal(approximations[0], approximations[1])
    assert np.linalg.norm(kept - approximations[0]) <= np.linalg.norm(kept) * (1 + 1e-4)


def test_a_diverged_model_stays_not_a_number_after_compression() -> None:
    vector = np.array([1, np.nan, 2, np.inf], np.float32)
    rng = np.random.default_rng(0)
    compressors: list[Compressor] = [
        TopKCompressor(0.5),
        TopKCompressor(0.5, Float16()),
        QuantizedCompressor(BFloat16()),
        QuantizedCompressor(),
        QuantizedCompressor(QSGD(7)),
    ]
    for compressor in compressors:
        payload, compressed = compressor.compress(vector, rng)
        assert np.isnan(compressed.values).any()
        assert np.array_equal(compressor.decompress(payload, 4).values, compressed.values, equal_nan=True)


@given(st.integers(1, 10**7))
def test_the_smallest_valid_fraction_keeps_one_coordinate(size: int) -> None:
    with pytest.raises(ValueError, match="smallest") as caught:
        kept_count(size, 0.99 / size)
    smallest = float(str(caught.value).rsplit(" ", 1)[1])
    assert int(size * smallest) >= 1


def test_a_sparse_code_decodes_to_its_input() -> None:
    part = Part(np.array([3, -1], np.float32), np.array([5, 7]))
    code = SparseCode(Float32(), GolombRice())
    back = code.unpack(code.pack(part, 9, np.random.default_rng(0)), 9)
    assert back.positions is not None
    assert (back.positions.tolist(), back.values.tolist()) == ([5, 7], [3.0, -1.0])
