"""Which coordinates to share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import Positions


def share_of(size: int, fraction: float) -> int:
    """How many of `size` coordinates are `fraction` of them: rounded down, and at least one if there are any."""
    return min(size, max(1, int(size * fraction)))


def top_positions(magnitudes: NDArray[np.float32], count: int) -> Positions:
    """The positions of the `count` largest magnitudes, in increasing order.

    Among equals the lower position wins, so that every machine chooses alike. NaN counts as infinite: a coordinate
    that has diverged is shown to the others, as it is when the whole model is shared.
    """
    if not 0 <= count <= magnitudes.size:
        raise ValueError(f"count is {count}, expected 0 to {magnitudes.size}")
    if count == 0:
        return np.empty(0, np.int64)
    if count == magnitudes.size:
        return np.arange(count, dtype=np.int64)
    if np.isnan(magnitudes.max()):
        magnitudes = np.where(np.isnan(magnitudes), np.float32(np.inf), magnitudes)
    least = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    chosen = magnitudes > least
    equals = np.flatnonzero(magnitudes == least)
    chosen[equals[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
