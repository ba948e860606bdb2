"""Methods that search for the best values: successive halving, and Optuna.

A method gets scores of which larger ones are better; None is a trial that failed or diverged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from shoal.errors import ExperimentError
from shoal.randomness import derived_seed, generator
from shoal.sweeps.values import Range, Searched, Settings

TunerName: TypeAlias = Literal["halving", "optuna"]
ETA = 3
"""Successive halving keeps the best third of its candidates, and gives them three times the budget."""


@dataclass(frozen=True)
class Trial:
    """Values to try, with a part of the budget of a run."""

    values: Settings
    share: float
    """The part of the rounds, or of the duration, of the experiment."""
    seeds: tuple[int, ...]
    """The score is the mean over these seeds."""


@dataclass(frozen=True)
class Cost:
    """The cost of a search."""

    runs: int
    whole_runs: float
    """The runs with the whole budget that would take as long."""


class Tuner(Protocol):
    """Searches for the best values of one combination."""

    cost: Cost
    """The cost of the whole search, if no trial fails."""

    def next_batch(self) -> list[Trial]:
        """Return trials that can run at the same time; none when the search has ended."""
        ...

    def add_scores(self, scores: Sequence[float | None]) -> None:
        """Take the scores of the latest batch, in its order."""
        ...

    @property
    def best(self) -> tuple[Trial, float] | None:
        """The best trial with the largest budget, and its score; None if all of them failed."""
        ...


class SuccessiveHalving:
    """Jamieson and Talwalkar 2016: start many candidates with a small budget, keep the best, and increase the budget.

    Of n candidates, ⌈n / 3⌉ remain after each step. The last step has the whole budget of a run and at most three
    candidates. The number of seeds grows like the budget.
    """

    def __init__(self, candidates: Sequence[Settings], seeds: Sequence[int]) -> None:
        self._steps = max(1, math.ceil(math.log(len(candidates), ETA) - 1e-9))
        self._seeds = tuple(seeds)
        self._step = 0
        self._batch = [self._trial(values) for values in candidates]
        self._best: tuple[Trial, float] | None = None
        counts = [math.ceil(len(candidates) / ETA**step) * len(self._seeds[: ETA**step]) for step in range(self._steps)]
        shares = [ETA ** (step - self._steps + 1) for step in range(self._steps)]
        self.cost = Cost(sum(counts), sum(n * share for n, share in zip(counts, shares, strict=True)))

    def _trial(self, values: Settings) -> Trial:
        return Trial(values, ETA ** (self._step - self._steps + 1), self._seeds[: ETA**self._step])

    def next_batch(self) -> list[Trial]:
        return self._batch

    def add_scores(self, scores: Sequence[float | None]) -> None:
        order = sorted(range(len(scores)), key=lambda i: (scores[i] is None, -(scores[i] or 0.0), i))
        first = scores[order[0]]
        if first is None:
            self._batch, self._best = [], None
            return
        self._best = self._batch[order[0]], first
        kept = [self._batch[i].values for i in order[: math.ceil(len(order) / ETA)] if scores[i] is not None]
        self._step += 1
        self._batch = [self._trial(values) for values in kept] if self._step < self._steps else []

    @property
    def best(self) -> tuple[Trial, float] | None:
        return self._best


class OptunaTuner:
    """The tree-structured Parzen estimator of Optuna. All trials have the whole budget of a run."""

    def __init__(self, searched: Mapping[str, Searched], trials: int, seeds: Sequence[int]) -> None:
        optuna = _import_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._failed = optuna.trial.TrialState.FAIL
        sampler = optuna.samplers.TPESampler(
            seed=derived_seed(seeds[0], "optuna") % 2**32, n_startup_trials=min(10, max(ETA, trials // 2)),
            constant_liar=True,  # trials of a batch differ from each other
        )  # fmt: skip
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions = {key: _distribution(optuna, searched[key]) for key in searched}
        self._searched = searched
        self._seeds = tuple(seeds[:ETA])
        self._left = trials
        self.cost = Cost(trials * len(self._seeds), trials * len(self._seeds))
        self._asked: list[tuple[Any, Trial]] = []
        self._best: tuple[Trial, float] | None = None

    def next_batch(self) -> list[Trial]:
        count = min(ETA, self._left)
        self._left -= count
        asked = [self._study.ask(self._distributions) for _ in range(count)]
        self._asked = [(trial, Trial(self._values(trial.params), 1.0, self._seeds)) for trial in asked]
        return [trial for _, trial in self._asked]

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that Optuna chose: numbers of a range, or the position of a value in a list."""
        values = {}
        for key, chosen in params.items():
            searched = self._searched[key]
            values[key] = float(f"{chosen:.4g}") if isinstance(chosen, float) else chosen
            if isinstance(searched, tuple):
                values[key] = searched[chosen]
        return values

    def add_scores(self, scores: Sequence[float | None]) -> None:
        for (asked, trial), score in zip(self._asked, scores, strict=True):
            if score is None:
                self._study.tell(asked, state=self._failed)
                continue
            self._study.tell(asked, score)
            if self._best is None or score > self._best[1]:
                self._best = trial, score

    @property
    def best(self) -> tuple[Trial, float] | None:
        return self._best


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        problem = "optuna is not installed: pip install 'shoal[optuna]', or use --tuner halving"
        raise ExperimentError([problem], "--tuner") from error
    return optuna


def _distribution(optuna: Any, searched: Searched) -> Any:
    if isinstance(searched, tuple):
        return optuna.distributions.CategoricalDistribution(tuple(range(len(searched))))
    is_log = searched.scale == "log"
    if isinstance(searched.low, int) and isinstance(searched.high, int):
        return optuna.distributions.IntDistribution(searched.low, searched.high, log=is_log)
    return optuna.distributions.FloatDistribution(searched.low, searched.high, log=is_log)


def candidates(searched: Mapping[str, Searched], trials: int, seed: int) -> list[dict[str, Any]]:
    """Return the values that successive halving starts with.

    If all keys have lists of values: all combinations. Otherwise `trials` points, drawn from the seed: each range is
    divided into so many parts of equal length on its scale, and every part has one point (Latin hypercube).
    """
    lists = {key: values for key, values in searched.items() if isinstance(values, tuple)}
    if len(lists) == len(searched):
        return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    rng = generator(seed, "candidates of a search")
    columns = {}
    for i, (key, values) in enumerate(searched.items()):
        order = rng.permutation(trials) if i else range(trials)
        columns[key] = [_at(values, (part + float(rng.random())) / trials) for part in order]
    found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [values for i, values in enumerate(found) if values not in found[:i]]  # whole numbers may repeat


def _at(values: Searched, fraction: float) -> Any:
    return values.at(fraction) if isinstance(values, Range) else values[int(fraction * len(values))]
