"""Fragments: each parameter is in one of them, the same on all nodes; and averages of received fragments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.support.fragments import Fragments, cut
from shoal.errors import MessageError
from shoal.message import Payload

SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)
SEEDS = st.integers(0, 2**63 - 1)


def sizes(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


@given(SHAPES, st.integers(1, 40), SEEDS)
def test_every_parameter_is_in_one_fragment(shapes: Any, count: int, seed: int) -> None:
    fragments = cut(shapes, count, seed)
    assert len(fragments) == count
    assert sorted(np.concatenate(fragments.positions).tolist()) == list(range(sum(sizes(shapes))))


@given(SHAPES, st.integers(1, 40), SEEDS)
def test_every_tensor_is_cut_evenly(shapes: Any, count: int, seed: int) -> None:
    ends = np.cumsum(sizes(shapes))
    for size, end in zip(sizes(shapes), ends, strict=True):
        parts = [np.sum((p >= end - size) & (p < end)) for p in cut(shapes, count, seed).positions]
        assert {size // count, -(-size // count)} >= set(parts)


@given(SHAPES, st.integers(1, 40), SEEDS)
def test_all_nodes_cut_the_same_fragments(shapes: Any, count: int, seed: int) -> None:
    again = cut.__wrapped__(shapes, count, seed)  # as another process would, without the cache
    for one, other in zip(cut(shapes, count, seed).positions, again.positions, strict=True):
        assert np.array_equal(one, other)


def test_cuts_differ_between_seeds_and_between_tensors() -> None:
    one, other = cut(((500,), (500,)), 2, 1), cut(((500,), (500,)), 2, 2)
    first, second = (one.positions[0][one.positions[0] // 500 == tensor] % 500 for tensor in (0, 1))
    for shared in (np.intersect1d(one.positions[0], other.positions[0]).size / 2, np.intersect1d(first, second).size):
        assert 80 < shared < 170  # 125 of 250 by chance


@given(SHAPES, st.integers(1, 12), SEEDS, st.data())
def test_each_parameter_is_averaged_with_all_its_received_values(shapes: Any, count: int, seed: int, data: Any) -> None:
    fragments = cut(shapes, count, seed)
    size = sum(sizes(shapes))
    copies = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 4)))
    rng = np.random.default_rng(seed)
    own = rng.standard_normal(size).astype(np.float32)
    models = rng.standard_normal((4, size)).astype(np.float32)
    received = {number: [models[s][fragments.positions[number]] for s in range(n)] for number, n in copies.items()}

    totals, counts = own.astype(np.float64), np.ones(size)
    for number, several in received.items():
        for values in several:
            np.add.at(totals, fragments.positions[number], values)
            np.add.at(counts, fragments.positions[number], 1)

    averaged = fragments.average(own, received)
    assert averaged.dtype == np.float32
    np.testing.assert_allclose(averaged, totals / counts, rtol=1e-6, atol=1e-7)


def test_average_of_finite_values_is_finite_and_does_not_change_the_model() -> None:
    largest = np.full(4, np.finfo(np.float32).max)
    largest.flags.writeable = False
    fragments = cut(((4,),), 2, 0)
    averaged = fragments.average(largest, {0: [largest[:2]] * 3})
    assert averaged.tolist() == largest.tolist()


def test_payload_holds_the_number_and_read_only_values() -> None:
    fragments = cut(((3, 4), (5,)), 3, 7)
    params = np.arange(17, dtype=np.float32)
    payload = fragments.payload(params, 2)
    assert payload.frozen() is payload
    assert payload.fields == {"fragment": 2}
    assert payload.arrays["values"].tolist() == fragments.positions[2].tolist()
    fragments.check(payload)
    fragments.check(payload, expected=2)


INVALID: dict[str, Payload] = {
    "no number": Payload({"values": np.zeros(5, np.float32)}),
    "a negative number": Payload({"values": np.zeros(5, np.float32)}, {"fragment": -1}),
    "a number beyond the last": Payload({"values": np.zeros(5, np.float32)}, {"fragment": 2}),
    "a float": Payload({"values": np.zeros(5, np.float32)}, {"fragment": 1.0}),
    "a boolean": Payload({"values": np.zeros(5, np.float32)}, {"fragment": True}),
    "a string": Payload({"values": np.zeros(5, np.float32)}, {"fragment": "1"}),
    "no values": Payload({}, {"fragment": 1}),
    "too few values": Payload({"values": np.zeros(4, np.float32)}, {"fragment": 1}),
    "values in two dimensions": Payload({"values": np.zeros((5, 1), np.float32)}, {"fragment": 1}),
    "values of another type": Payload({"values": np.zeros(5, np.float64)}, {"fragment": 1}),
}


@pytest.mark.parametrize("payload", INVALID.values(), ids=INVALID)
def test_invalid_fragment_is_rejected(payload: Payload) -> None:
    with pytest.raises(MessageError, match=r"fragment = |values"):
        cut(((10,),), 2, 0).check(payload)


def test_unexpected_fragment_is_rejected() -> None:
    fragments: Fragments = cut(((10,),), 2, 0)
    with pytest.raises(MessageError, match="fragment = 1: expected 0"):
        fragments.check(fragments.payload(np.zeros(10, np.float32), 1), expected=0)
