"""The choice of coordinates to share."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import Positions


def kept_count(size: int, fraction: float) -> int:
    """Return `fraction` of `size` parameters, rounded down. Raises ValueError if the result is 0."""
    if size * fraction < 1:
        smallest = math.ceil(1e6 / size) / 1e6 if size <= 10**5 else 1.01 / size
        raise ValueError(
            f"fraction = {fraction:g} keeps none of the model's {size} parameters; "
            f"the smallest that keeps one is {smallest:g}"
        )
    return min(size, int(size * fraction))


def top_positions(values: NDArray[np.float32], count: int) -> Positions:
    """Return the positions of the `count` largest magnitudes, in increasing order.

    Among equals the lower position wins, so that every machine makes the same choice. NaN counts as infinite: a
    coordinate that has diverged is visible to the others, as in full sharing.
    """
    if not 0 <= count <= values.size:
        raise ValueError(f"count is {count}, expected 0 to {values.size}")
    if count == 0:
        return np.empty(0, np.int64)
    if count == values.size:
        return np.arange(count, dtype=np.int64)
    # Without their sign, floats have the order of their bits, and integers are partitioned in half the time.
    keys = np.ascontiguousarray(values, np.float32).view(np.int32) & np.int32(0x7FFFFFFF)
    candidates = _candidates(keys, count)
    if candidates.size < count:
        return _largest(keys, count)
    return candidates[_largest(keys[candidates], count)]


_INFINITY = np.int32(0x7F800000)
"""The bits of an infinity; those of NaN are larger."""


def _largest(keys: NDArray[np.int32], count: int) -> Positions:
    """Return the positions of the `count` largest keys, in increasing order; the first of equals. All NaN are equal."""
    if keys.max() > _INFINITY:
        keys = np.minimum(keys, _INFINITY)
    least = np.partition(keys, keys.size - count)[keys.size - count]
    chosen = keys >= least
    surplus = np.count_nonzero(chosen) - count
    if surplus:
        chosen[np.flatnonzero(keys == least)[-surplus:]] = False
    return np.flatnonzero(chosen)


def _candidates(keys: NDArray[np.int32], count: int) -> Positions:
    """Return positions that probably include the `count` largest, and few more, with all equals of included keys.

    If few of many are wanted, a threshold at the quantile of a sample finds them in one pass; otherwise the result is
    empty. It has a little more than a tenth of all positions even if fewer would do, because `flatnonzero` takes three
    times as long for just under a tenth.
    """
    share = count / keys.size
    if keys.size < 2**12 or share > 0.25:
        return np.empty(0, np.int64)
    sample = keys[::_SAMPLE_STEP]
    expected = sample.size * (share if share < 0.04 else max(share, 0.1))
    rank = int(expected + 4 * expected**0.5) + 1  # a margin of four standard deviations
    if rank >= sample.size:
        return np.empty(0, np.int64)
    cut = np.partition(sample, sample.size - rank)[sample.size - rank]
    return np.flatnonzero(keys >= min(cut, _INFINITY))


_SAMPLE_STEP = 8
"""One of this many keys is in the sample."""
