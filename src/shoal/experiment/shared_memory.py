"""Arrays in memory that forked processes share."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Samples


def share_samples(samples: Samples) -> Samples:
    """Return the samples in shared memory: forked processes copy neither its pages nor its page tables."""
    return Samples(share_array(samples.x), share_array(samples.y), samples.owner)


def share_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in shared memory, or the array itself if it is in mapped memory already, such as a file."""
    if _is_mapped(array):
        return array
    copy = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def _is_mapped(array: NDArray[Any]) -> bool:
    """Whether the values are in mapped memory. The class does not show it: a copy of a `np.memmap` is a `np.memmap`."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)
