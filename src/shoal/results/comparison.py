"""Comparison of runs: scores, and the time and bytes to a target.

comparison = compare_groups(group_runs(folders), target=0.8)
comparison.groups[1].seconds.ratio      # to the first group, with its interval

compare_times({"gossip": [run_1, run_2], "dpsgd": [run_3, run_4]}, 0.8)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import DataError
from shoal.results.frames import read_records
from shoal.results.groups import Group, one_of_each_seed
from shoal.results.records import RunFolder
from shoal.results.statistics import Estimate, mean_estimate, paired_ratio, statistics, unpaired_ratio
from shoal.results.timing import (
    Clock,
    best,
    bytes_at,
    clock,
    curve,
    reached,
    split_of,
    target_of,
    time_to,
)


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
    check_equal("metrics", [c.metric for several in curves.values() for c in several])
    check_equal("clocks", [clock(folder) for folders in runs.values() for folder in folders])
    check_equal("splits", [split_of(folder) for folders in runs.values() for folder in folders])
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


def check_equal(what: str, found: Iterable[str], remedy: str = "") -> None:
    """Raise `DataError` if runs differ in something, so that they cannot be compared."""
    if len(different := sorted(set(found))) > 1:
        raise DataError(f"runs have different {what}, {' and '.join(different)}: they cannot be compared{remedy}")


@dataclass(frozen=True)
class Quantity:
    """A quantity of the runs of a group."""

    values: tuple[float | None, ...]
    """One for each run; None if the run has none: it diverged, or it did not reach the target."""
    mean: Estimate | None
    """None unless all runs have a value: a mean of the others would be biased."""
    ratio: Estimate | None = None
    """To the first group; None if a run of one of them has no value."""

    @property
    def known(self) -> int:
        """The number of runs that have a value."""
        return sum(value is not None for value in self.values)


@dataclass(frozen=True)
class ComparedGroup:
    """The quantities of a group."""

    group: Group
    clock: Clock
    seeds: tuple[int | None, ...]
    """Of the runs that have scores."""
    paired: bool
    """Whether ratios pair runs that have the same seed."""
    final: Quantity
    """The mean score of the nodes at the last evaluation."""
    best: Quantity
    seconds: Quantity | None
    """Seconds of the run's clock until the target was reached; None without a target."""
    bytes: Quantity | None
    """Bytes that all nodes had sent until then."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, compared with the first group."""

    metric: str
    split: str
    target: float | None
    groups: tuple[ComparedGroup, ...]


@dataclass(frozen=True)
class _Outcome:
    """What a comparison needs of one run."""

    seed: int | None
    metric: str
    final: float
    best: float
    seconds: float | None
    bytes: float | None


def compare_groups(groups: Sequence[Group], target: float | None = None, metric: str | None = None) -> Comparison:
    """Compare groups of runs with the first of them.

    Defaults: the target of the experiments if all have the same, or no target; the metric of the experiments, or the
    main metric. Runs without scores are left out with a warning. Warns of runs that have not completed.

    Raises `DataError` if no run has scores, or if runs have different metrics, data sets or splits.
    """
    folders = [folder for group in groups for folder in group.runs]
    alone = ": compare the runs of each by themselves"
    check_equal("data sets", [str(_dataset(folder)) for folder in folders], alone)
    check_equal("splits", [split_of(folder) for folder in folders], alone)
    if target is None and len(named := {target_of(folder)[1] for folder in folders}) == 1:
        target = named.pop()
    _warn_of_status(folders)
    outcomes = [[outcome for folder in group.runs if (outcome := _outcome(folder, target, metric))] for group in groups]
    metrics = [outcome.metric for several in outcomes for outcome in several]
    if not metrics:
        raise DataError("no scores were recorded in any of the runs; see evaluation.every and evaluation.nodes")
    check_equal("metrics", metrics, ": choose a metric that all of them have with --metric")
    compared: list[ComparedGroup] = []
    for group, repeated in zip(groups, outcomes, strict=True):
        if repeated:
            several = one_of_each_seed(group.label, [outcome.seed for outcome in repeated], repeated)
            compared.append(_compare(group, several, target is not None, compared[0] if compared else None))
    return Comparison(metrics[0], split_of(folders[0]), target, tuple(compared))


def _outcome(folder: RunFolder, target: float | None, metric: str | None) -> _Outcome | None:
    """Return the results of a run; None, with a warning, if it has no scores."""
    records = read_records(folder)
    if not records.evaluations.metrics:
        warnings.warn(f"{folder.path} has no scores and is left out", stacklevel=2)
        return None
    found = curve(folder, metric, records)
    top, at = best(found), None if target is None else reached(found, target)
    return _Outcome(
        folder.read_experiment().get("seed"),
        found.metric,
        final=found.means[-1],
        best=math.nan if top is None else found.means[top],
        seconds=None if at is None else found.times[at],
        bytes=None if at is None else bytes_at(records, found)[at],
    )


def _compare(
    group: Group, outcomes: Sequence[_Outcome], has_target: bool, first: ComparedGroup | None
) -> ComparedGroup:
    seeds = tuple(outcome.seed for outcome in outcomes)
    same_clock = first is None or clock(first.group.runs[0]) == clock(group.runs[0])
    order = None if first is None else _pairs(seeds, first.seeds)

    def quantity(name: str, comparable: bool = True) -> Quantity:
        values = tuple(_finite(getattr(outcome, name)) for outcome in outcomes)
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return Quantity(values, None)
        baseline = getattr(first, name).values if first is not None else ()
        is_ratio = comparable and baseline and None not in baseline
        return Quantity(values, mean_estimate(known), _ratio(known, baseline, order) if is_ratio else None)

    return ComparedGroup(
        group,
        clock(group.runs[0]),
        seeds,
        order is not None,
        quantity("final"),
        quantity("best"),
        quantity("seconds", same_clock) if has_target else None,
        quantity("bytes") if has_target else None,
    )


def _ratio(values: Sequence[float], baseline: Sequence[float], order: Sequence[int] | None) -> Estimate | None:
    if order is None:
        return unpaired_ratio(values, baseline)
    return paired_ratio(values, [baseline[i] for i in order])


def _pairs(seeds: Sequence[int | None], others: Sequence[int | None]) -> list[int] | None:
    """Return, for each seed, where it is in `others`; None unless both have the same seeds, each of them once."""
    if None in seeds or len(set(seeds)) < len(seeds) or len(others) != len(seeds) or set(others) != set(seeds):
        return None
    return [others.index(seed) for seed in seeds]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _dataset(folder: RunFolder) -> object:
    table = folder.read_experiment().get("dataset", {})
    return table.get("name") if isinstance(table, Mapping) else table


def _warn_of_status(folders: Sequence[RunFolder]) -> None:
    """Warn of runs that have not reached their end: their results are those of their records so far."""
    found: dict[str, list[RunFolder]] = {}
    for folder in folders:
        status = str(folder.read_summary().get("status")) if folder.summary.exists() else "unfinished"
        found.setdefault(status, []).append(folder)
    for status, several in found.items():
        if status not in ("completed", "incomplete"):  # an incomplete run has reached its end, and has lost nodes
            runs = (
                "1 run is {}, and counts with its"
                if len(several) == 1
                else f"{len(several)} runs are {{}}, and count with their"
            )
            warnings.warn(f"{runs.format(status)} records so far: {several[0].path}", stacklevel=3)
