"""Summary statistics and confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""The confidence of all intervals."""


@dataclass(frozen=True)
class Estimate:
    """A mean or a ratio with its confidence interval."""

    value: float
    low: float | None = None
    """This and the following are None if there is no interval, because a sample has fewer than two values."""
    high: float | None = None


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, with Student's t-interval."""
    mean, width = _t_interval(values)
    return Estimate(mean) if width is None else Estimate(mean, mean - width, mean + width)


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate | None:
    """Return the geometric mean of `value / baseline` over pairs, with the t-interval of its logarithm.

    None if a value is not positive.
    """
    if min(*values, *baseline) <= 0:
        return None
    mean, width = _t_interval([math.log(a / b) for a, b in zip(values, baseline, strict=True)])
    return _exponential(mean, width)


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate | None:
    """Return the ratio of the geometric means of two samples, with Welch's t-interval of its logarithm.

    None if a value is not positive.
    """
    if min(*values, *baseline) <= 0:
        return None
    logs = [math.log(value) for value in values], [math.log(value) for value in baseline]
    (mean, squares), (other, other_squares) = (_mean_and_squares(sample) for sample in logs)
    if min(map(len, logs)) < 2:
        return _exponential(mean - other, None)
    errors = [q / (len(sample) - 1) / len(sample) for q, sample in zip((squares, other_squares), logs, strict=True)]
    if not (error := sum(errors)):
        return _exponential(mean - other, 0.0)
    freedom = error**2 / sum(e**2 / (len(sample) - 1) for e, sample in zip(errors, logs, strict=True))
    return _exponential(mean - other, t_quantile(freedom) * math.sqrt(error))


def _exponential(log: float, width: float | None) -> Estimate:
    value = math.exp(log)
    return Estimate(value) if width is None else Estimate(value, math.exp(log - width), math.exp(log + width))


def _t_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of the width of its t-interval."""
    mean, squares = _mean_and_squares(values)
    freedom = len(values) - 1
    return mean, t_quantile(freedom) * math.sqrt(squares / freedom / len(values)) if freedom else None


def _mean_and_squares(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the sum of the squared differences from it."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values)


def t_quantile(freedom: float) -> float:
    """Return the quantile of Student's t-distribution for a two-sided interval."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def statistics(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, population standard deviation, minimum and maximum.

    None if there are no values; all NaN if a value is not finite.
    """
    found = list(values)
    if not found:
        return None
    if not all(map(math.isfinite, found)):
        return dict.fromkeys(("mean", "std", "min", "max"), math.nan)
    mean, squares = _mean_and_squares(found)
    return {"mean": mean, "std": math.sqrt(squares / len(found)), "min": min(found), "max": max(found)}


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
