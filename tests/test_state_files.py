"""States of nodes and optimizers are the same after they have been written and read."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.engines.worker import decode_state, encode_state
from shoal.results.state_files import ARRAY, PAIRS, TUPLE, read_state, write_state
from shoal.training.optimizers import arrays_to_tensors, tensors_to_arrays

TYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
ARRAYS = hnp.arrays(st.sampled_from(TYPES), hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
TENSOR_TYPES = ("float16", "float32", "float64", "int16", "int32", "int64", "uint8", "bool")
TENSORS = hnp.arrays(st.sampled_from(TENSOR_TYPES), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)).map(
    torch.tensor
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
PLAIN = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from([ARRAY, TUPLE, PAIRS, "a", "a/b", "b", "a'"]) | NUMBERS | st.tuples(NUMBERS, st.text(max_size=3))


def states(arrays: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """States with these arrays, also in lists, tuples and dictionaries."""
    values = st.recursive(
        arrays | PLAIN,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
        ),
        max_leaves=8,
    )
    return st.dictionaries(st.sampled_from([ARRAY, TUPLE, "a", "b", "step"]), values, max_size=3)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, with the types of all values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and same(one.numpy(), other.numpy())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and math.isnan(other)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "state.safetensors"


@given(state=states(ARRAYS))
def test_a_state_is_the_same_after_it_was_written_and_read(path: Path, state: dict[str, Any]) -> None:
    write_state(path, state)
    assert same(read_state(path), state)
    assert same(decode_state(encode_state(state)), state)


@given(state=states(TENSORS))
def test_the_state_of_an_optimizer_is_the_same_after_it_was_written_and_read(path: Path, state: dict[str, Any]) -> None:
    write_state(path, tensors_to_arrays(state))
    assert same(arrays_to_tensors(read_state(path), torch.device("cpu")), state)


@pytest.mark.parametrize(("value", "name"), [(deque([1]), "deque"), ({1, 2}, "set"), (b"x", "bytes")])
def test_a_value_that_a_checkpoint_cannot_hold_is_named_with_its_place(value: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^/optimizer/0/history: a checkpoint cannot hold a value of type {name}; use"):
        write_state(tmp_path / "state", {"optimizer": [{"history": value}]})


@pytest.mark.parametrize("key", [np.int64(3), np.float32(0.5), np.bool_(True), (np.int64(1), "a", (np.uint8(2),))])
def test_numbers_of_numpy_may_be_keys(key: Any, path: Path) -> None:
    state = {"models": {key: np.arange(3), "other": [{key: 1}]}}
    write_state(path, state)
    for read in (read_state(path), decode_state(encode_state(state))):
        assert list(read["models"]) == [key, "other"]
        assert read["models"][key].tolist() == [0, 1, 2]
        assert read["models"]["other"] == [{key: 1}]
