"""Comparison of algorithms by the time to a target.

compare_times({"gossip": [run_1, run_2], "dpsgd": [run_3, run_4]}, 0.8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import DataError
from shoal.results.records import RunFolder
from shoal.results.statistics import statistics
from shoal.results.timing import clock, curve, split_of, time_to


@dataclass(frozen=True)
class TimesToTarget:
    """The times to a target of the runs with one label, compared with the first label."""

    label: str
    seconds: tuple[float | None, ...]
    """One for each run, in the given order; None if the run did not reach the target."""
    mean: float | None
    """This and the following are None unless all runs reached the target: a mean of the others would be biased."""
    std: float | None
    """Of the population."""
    min: float | None
    max: float | None
    ratio: float | None
    """The mean divided by that of the first label; None if one of them is missing."""

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return sum(time is not None for time in self.seconds)


def compare_times(
    runs: Mapping[str, Sequence[RunFolder]], target: float, metric: str | None = None
) -> tuple[TimesToTarget, ...]:
    """Return the times to `target` for each label, in the order of `runs`. The runs of a label differ in their seeds.

    Raises `DataError` if runs have different metrics, clocks or splits (`evaluation.split`): they cannot be compared.
    """
    curves = {label: [curve(folder, metric) for folder in folders] for label, folders in runs.items()}
    for what, found in (
        ("metrics", {c.metric for several in curves.values() for c in several}),
        ("clocks", {clock(folder) for folders in runs.values() for folder in folders}),
        ("splits", {split_of(folder) for folders in runs.values() for folder in folders}),
    ):
        if len(found) > 1:
            raise DataError(f"runs have different {what}, {' and '.join(sorted(found))}: they cannot be compared")
    compared: list[TimesToTarget] = []
    for label, several in curves.items():
        seconds = tuple(time_to(c, target) for c in several)
        reached = [time for time in seconds if time is not None]
        found_statistics = statistics(reached) if len(reached) == len(seconds) else None
        mean, std, least, most = found_statistics.values() if found_statistics is not None else (None,) * 4
        first = compared[0].mean if compared else mean
        ratio = mean / first if mean is not None and first else None
        compared.append(TimesToTarget(label, seconds, mean, std, least, most, ratio))
    return tuple(compared)
