"""The search for the best values, separately for each combination of a sweep, with the same budget for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import DataError, ExperimentError
from shoal.experiment import Experiment
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder, replacing
from shoal.results.timing import higher_is_better
from shoal.sweeps.plan import Combination, plan_runs
from shoal.sweeps.running import SweepRunner
from shoal.sweeps.sweep import Sweep
from shoal.sweeps.tuners import Cost, OptunaTuner, SuccessiveHalving, Trial, Tuner, TunerName, candidates
from shoal.sweeps.values import Settings, check_seeds, describe_settings

RESULTS = "tuning.json"
"""The file in the folder of a sweep with the best values, and with the score of every trial."""
SPLIT = "evaluation.split"


@dataclass(frozen=True)
class Scored:
    """A trial with its mean score over seeds; None if a run failed or diverged."""

    trial: Trial
    score: float | None
    budget: dict[str, float]


@dataclass
class Tuning:
    """The search for one combination."""

    settings: Settings
    """The combination; empty if a sweep has only one."""
    experiment: Experiment
    """The experiment of the combination, with the first values of the search."""
    tuner: Tuner
    trials: list[Scored] = field(default_factory=list)
    metric: str | None = None

    @property
    def split(self) -> str:
        """The samples that trials are compared on."""
        return "test" if self.experiment.validation is None else "validation"

    @property
    def best(self) -> tuple[Settings, float] | None:
        """The best values, and their score; None if all trials failed."""
        if (found := self.tuner.best) is None:
            return None
        trial, score = found
        return trial.values, score if self.metric is None or higher_is_better(self.metric) else -score

    def budget(self, share: float) -> dict[str, float]:
        """Return the key that limits the length of a run, with a share of its value."""
        if self.experiment.duration is not None:
            return {"duration": self.experiment.duration * share}
        return {"algorithm.rounds": max(1, round(self.experiment.algorithm.options["rounds"] * share))}

    def values(self, trial: Trial) -> dict[str, Any]:
        """Return the settings of the runs of a trial."""
        split = {SPLIT: "validation"} if self.split == "validation" else {}
        return {**trial.values, **self.budget(trial.share), **split}


@dataclass(frozen=True)
class TuningPlan:
    """A sweep that searches."""

    sweep: Sweep
    seeds: tuple[int, ...]
    tunings: list[Tuning]
    final: list[Combination]
    """The runs after the search, with the first values that are tried in place of the best."""

    @property
    def cost(self) -> Cost:
        costs = [tuning.tuner.cost for tuning in self.tunings]
        return Cost(sum(cost.runs for cost in costs), sum(cost.whole_runs for cost in costs))


def plan_tuning(sweep: Sweep, trials: int, tuner: TunerName) -> TuningPlan:
    """Check all combinations with every value that is known, and the final runs with one of them."""
    combinations = list(sweep.combinations())
    seeds = sweep.seeds or check_seeds([sweep.settings.get("seed", sweep.table.get("seed", 0))], sweep.source)
    values = candidates(sweep.tune, trials, seeds[0])
    final = plan_runs(sweep, [(settings, values[0], seed) for settings in combinations for seed in seeds])
    plan_runs(sweep, [(settings, tried, seeds[0]) for settings in combinations for tried in values])
    tunings = []
    for i, settings in enumerate(combinations):
        experiment = final[i * len(seeds)].experiment
        if experiment.duration is None and experiment.algorithm.options.get("rounds") is None:
            problem = "tune: the experiment has neither a duration nor algorithm.rounds, so a trial cannot be shorter"
            raise ExperimentError([problem], sweep.source)
        method = SuccessiveHalving(values, seeds) if tuner == "halving" else OptunaTuner(sweep.tune, trials, seeds)
        tunings.append(Tuning(settings, experiment, method))
    return TuningPlan(sweep, seeds, tunings, final)


def tune(plan: TuningPlan, runner: SweepRunner, out: Path) -> None:
    """Search for the best values of all combinations at the same time, with runs in the folder `out`."""
    while True:
        batches = [(tuning, tuning.tuner.next_batch()) for tuning in plan.tunings]
        batches = [(tuning, batch) for tuning, batch in batches if batch]
        if not batches:
            return
        runs = [[_runs(plan.sweep, tuning, trial) for trial in batch] for tuning, batch in batches]
        distinct = {run.identity: run for trials in runs for several in trials for run in several}
        result = runner.run(list(distinct.values()), out)
        for (tuning, batch), trials in zip(batches, runs, strict=True):
            scores = [_mean_score(tuning, [result.folders.get(r.identity) for r in several]) for several in trials]
            tuning.tuner.add_scores(scores)
            tuning.trials += [
                Scored(trial, score, tuning.budget(trial.share)) for trial, score in zip(batch, scores, strict=True)
            ]


def _runs(sweep: Sweep, tuning: Tuning, trial: Trial) -> list[Combination]:
    return plan_runs(sweep, [(tuning.settings, tuning.values(trial), seed) for seed in trial.seeds])


def _mean_score(tuning: Tuning, folders: Sequence[RunFolder | None]) -> float | None:
    """Return the mean final score of runs, where larger is better; None if a run has none."""
    scores = []
    for folder in folders:
        if folder is None or (score := _score(tuning, folder)) is None:
            return None
        scores.append(score)
    return math.fsum(scores) / len(scores)


def _score(tuning: Tuning, folder: RunFolder) -> float | None:
    try:
        metrics = folder.read_summary()["metrics"]
    except (DataError, KeyError):
        return None
    tuning.metric = tuning.metric or tuning.experiment.evaluation.metric or main_metric(metrics)
    if tuning.metric is None:
        problem = "the runs have no scores, so values cannot be compared: set evaluation.nodes to at least 1"
        raise ExperimentError([problem], "tune")
    found = metrics.get(tuning.metric)
    mean = None if found is None else found["mean"]
    if mean is None or not math.isfinite(mean):
        return None
    return float(mean) if higher_is_better(tuning.metric) else -float(mean)


def final_runs(plan: TuningPlan) -> list[Combination]:
    """Return the runs of all combinations with their best values, for all seeds.

    Combinations whose trials all failed are left out.
    """
    wanted = [(t.settings, t.best[0], seed) for t in plan.tunings if t.best is not None for seed in plan.seeds]
    return plan_runs(plan.sweep, wanted)


def describe_tuning(tuning: Tuning) -> str:
    """Return the combination of a search as a label."""
    return describe_settings(tuning.settings) or tuning.experiment.name


def write_tuning(plan: TuningPlan, path: Path) -> None:
    """Write the best values and all trials of every combination."""
    table = [_to_table(tuning) for tuning in plan.tunings]
    with replacing(path) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")


def _to_table(tuning: Tuning) -> dict[str, Any]:
    best, metric = tuning.best, tuning.metric
    sign = 1 if metric is None or higher_is_better(metric) else -1
    trials = [
        {
            "values": found.trial.values,
            "budget": found.budget,
            "seeds": found.trial.seeds,
            "score": None if found.score is None else sign * found.score,
        }
        for found in tuning.trials
    ]
    return {
        "combination": describe_settings(tuning.settings),
        "settings": tuning.settings,
        "metric": metric,
        "split": tuning.split,
        "best": None if best is None else best[0],
        "score": None if best is None else best[1],
        "trials": trials,
    }
