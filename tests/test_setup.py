"""The data of a run is in memory once, whatever the number of processes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.experiment.shared_memory import share_array

Array = NDArray[Any]


@pytest.fixture
def mapped(tmp_path: Path) -> Array:
    np.save(tmp_path / "rows.npy", np.arange(12.0).reshape(4, 3))
    return np.asanyarray(np.load(tmp_path / "rows.npy", mmap_mode="r"))


def mapping_of(array: Array) -> Any:
    """Return the mapped memory that holds the values of an array, or None."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


@pytest.mark.parametrize(
    "view", [lambda rows: rows, lambda rows: rows[1:], lambda rows: np.asarray(rows).view(), lambda rows: rows.T[:2].T]
)
def test_views_of_a_mapped_file_are_not_copied(view: Callable[[Array], Array], mapped: Array) -> None:
    array = view(mapped)
    assert share_array(array) is array


@pytest.mark.parametrize(
    "copied",
    [
        lambda rows: rows.copy(),
        lambda rows: rows[[2, 0]],
        lambda rows: rows + 1,
        lambda rows: rows.copy()[1:].view(np.ndarray),
        lambda rows: rows[:0].copy(),
    ],
)
def test_other_arrays_are_copied_to_shared_memory(copied: Callable[[Array], Array], mapped: Array) -> None:
    array = copied(mapped)
    assert mapping_of(array) is None
    shared = share_array(array)
    assert mapping_of(shared) is not None
    assert np.array_equal(shared, array)
    assert share_array(shared) is shared
