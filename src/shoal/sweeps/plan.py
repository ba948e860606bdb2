"""The plan of a sweep: every combination as a validated experiment, before the first run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import ExperimentError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.writing import experiment_hash
from shoal.sweeps.sweep import Sweep
from shoal.sweeps.values import Settings, describe_settings

SHOWN_COMBINATIONS = 3
"""Combinations that are named with a problem that many of them have."""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    settings: Settings
    """What differs from the other combinations, without the seed."""
    experiment: Experiment
    identity: str
    """A hash of the resolved experiment."""

    @property
    def label(self) -> str:
        return describe_settings({**self.settings, "seed": self.experiment.seed})


def plan(sweep: Sweep) -> list[Combination]:
    """Return all runs of a sweep, which does not search. Raises `ExperimentError` with every problem of all of them."""
    seeds: tuple[int | None, ...] = sweep.seeds or (None,)
    return plan_runs(sweep, [(settings, {}, seed) for settings in sweep.combinations() for seed in seeds])


def plan_runs(sweep: Sweep, wanted: Iterable[tuple[Settings, Mapping[str, Any], int | None]]) -> list[Combination]:
    """Return the runs with the given settings, further values and seeds. Raises `ExperimentError` as `plan`."""
    found: list[Combination] = []
    problems: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    total = 0
    for number, (settings, values, seed) in enumerate(wanted, 1):
        total = number
        seeds = {} if seed is None else {"seed": seed}
        label = f"combination {number} ({describe_settings({**settings, **values, **seeds})})"
        try:
            experiment = _experiment(sweep, {**settings, **values, **seeds})
        except ShoalError as error:
            for problem in error.problems if isinstance(error, ExperimentError) else (str(error),):
                problems.setdefault(problem, []).append(label)
            continue
        combination = Combination({**settings, **values}, experiment, experiment_hash(experiment))
        if (earlier := numbers.setdefault(combination.identity, number)) != number:
            problems.setdefault(f"the same run as combination {earlier}; remove one of them", []).append(label)
        found.append(combination)
    if problems:
        raise ExperimentError([_describe(problem, labels, total) for problem, labels in problems.items()], sweep.source)
    return found


def _describe(problem: str, labels: list[str], total: int) -> str:
    if len(labels) == total:
        return problem if total == 1 else f"in all {total} combinations: {problem}"
    more = len(labels) - SHOWN_COMBINATIONS
    named = "; ".join(labels[:SHOWN_COMBINATIONS]) + (f"; and {more} more" if more > 0 else "")
    return f"{named}: {problem}"


def _experiment(sweep: Sweep, settings: Settings) -> Experiment:
    """Return the experiment with the settings of the sweep, and then these. A whole table comes before its keys."""
    overrides = {**sweep.settings, **settings}
    ordered = dict(sorted(overrides.items(), key=lambda item: item[0].count(".")))
    experiment = Experiment.from_table(sweep.table, ordered, base=sweep.folder, source=sweep.source)
    simulation = experiment.simulation
    if experiment.engine != "simulation" or simulation.batching != "auto" or simulation.workers is not None:
        return experiment
    # Several runs share the cores: each of them uses one. `off` and `pool` give the same bits.
    return dataclasses.replace(experiment, simulation=dataclasses.replace(simulation, workers=1))
