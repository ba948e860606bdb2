"""Summary statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable


def statistics(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, population standard deviation, minimum and maximum.

    None if there are no values; all NaN if a value is not finite.
    """
    found = list(values)
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return dict.fromkeys(("mean", "std", "min", "max"), math.nan)
    mean = math.fsum(found) / len(found)
    variance = math.fsum((v - mean) ** 2 for v in found) / len(found)
    return {"mean": mean, "std": math.sqrt(variance), "min": min(found), "max": max(found)}


def fairness(values: Iterable[float]) -> dict[str, float] | None:
    """Return the means of the lowest and of the highest tenth of the values: the worst nodes are at one of these ends.

    None if there are no values; all NaN if a value is not finite.
    """
    found = sorted(values)
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return dict.fromkeys(("lowest_10_percent", "highest_10_percent"), math.nan)
    tenth = max(1, round(len(found) / 10))
    return {
        "lowest_10_percent": math.fsum(found[:tenth]) / tenth,
        "highest_10_percent": math.fsum(found[-tenth:]) / tenth,
    }
