"""What nodes have in common lies in memory once, however many processes they are."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.experiment.setup import _in_shared_memory

Array = NDArray[Any]


@pytest.fixture
def mapped(tmp_path: Path) -> Array:
    np.save(tmp_path / "rows.npy", np.arange(12.0).reshape(4, 3))
    return np.asanyarray(np.load(tmp_path / "rows.npy", mmap_mode="r"))


def mapping_of(array: Array) -> Any:
    """The mapped memory that the values of an array lie in, if they do."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


@pytest.mark.parametrize(
    "seen", [lambda rows: rows, lambda rows: rows[1:], lambda rows: np.asarray(rows).view(), lambda rows: rows.T[:2].T]
)
def test_pages_of_a_file_are_left_where_they_are(seen: Callable[[Array], Array], mapped: Array) -> None:
    array = seen(mapped)
    assert _in_shared_memory(array) is array


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
def test_copies_of_them_are_put_where_processes_share_them(copied: Callable[[Array], Array], mapped: Array) -> None:
    array = copied(mapped)
    assert mapping_of(array) is None
    shared = _in_shared_memory(array)
    assert mapping_of(shared) is not None
    assert np.array_equal(shared, array)
    assert _in_shared_memory(shared) is shared
