"""Many numbers in a few."""

from __future__ import annotations

import math
from collections.abc import Iterable


def statistics(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, standard deviation (of the population) and extremes; None of nothing, NaN where a value is not finite."""
    found = list(values)
    if not found:
        return None
    if not all(math.isfinite(v) for v in found):
        return dict.fromkeys(("mean", "std", "min", "max"), math.nan)
    mean = math.fsum(found) / len(found)
    variance = math.fsum((v - mean) ** 2 for v in found) / len(found)
    return {"mean": mean, "std": math.sqrt(variance), "min": min(found), "max": max(found)}


def fairness(values: Iterable[float]) -> dict[str, float] | None:
    """The means of the lowest and of the highest tenth: how those fare that fare worst, whichever end that is.

    None of nothing, NaN where a value is not finite.
    """
    found = list(values)
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return dict.fromkeys(("lowest_10_percent", "highest_10_percent"), math.nan)
    found.sort()
    tenth = max(1, round(len(found) / 10))
    return {
        "lowest_10_percent": math.fsum(found[:tenth]) / tenth,
        "highest_10_percent": math.fsum(found[-tenth:]) / tenth,
    }
