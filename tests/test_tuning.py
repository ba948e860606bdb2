"""The search for the best values."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import CommandResult
from shoal.errors import ExperimentError
from shoal.sweeps.tuners import OptunaTuner, SuccessiveHalving, Trial, Tuner, candidates
from shoal.sweeps.values import Range

Shoal = Callable[..., CommandResult]
LR = {"training.lr": Range(0.001, 10.0, "log")}


def search(tuner: Tuner, score: Callable[[Trial], float | None]) -> list[list[Trial]]:
    """Run a search with a function in place of runs. Returns its batches."""
    batches = []
    while batch := tuner.next_batch():
        tuner.add_scores([score(trial) for trial in batch])
        batches.append(batch)
    return batches


def closeness(trial: Trial) -> float:
    """A score that is best at 0.2."""
    return -abs(math.log(trial.values["training.lr"] / 0.2))


def test_candidates_cover_the_range_and_follow_from_the_seed() -> None:
    found = [values["training.lr"] for values in candidates(LR, 8, seed=1)]
    parts = [int((math.log10(lr) + 3) * 2) for lr in found]
    assert parts == list(range(8))
    assert candidates(LR, 8, seed=1) == candidates(LR, 8, seed=1) != candidates(LR, 8, seed=2)


def test_candidates_of_lists_are_all_combinations() -> None:
    lists = {"a": (1, 2), "b": ("x", "y", "z")}
    assert len(candidates(lists, 3, seed=1)) == 6
    mixed = candidates({"a": (1, 2), "b": Range(0, 1)}, 9, seed=1)
    assert {(values["a"], values["b"]) for values in mixed} == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_halving_keeps_the_best_third_and_increases_the_budget() -> None:
    tuner = SuccessiveHalving(candidates(LR, 27, seed=1), seeds=(1, 2, 3, 4))
    batches = search(tuner, closeness)
    assert [len(batch) for batch in batches] == [27, 9, 3]
    assert [batch[0].share for batch in batches] == pytest.approx([1 / 9, 1 / 3, 1])
    assert [batch[0].seeds for batch in batches] == [(1,), (1, 2, 3), (1, 2, 3, 4)]
    ranked = sorted((trial.values["training.lr"] for trial in batches[0]), key=lambda lr: abs(math.log(lr / 0.2)))
    assert [trial.values["training.lr"] for trial in batches[1]] == ranked[:9]
    assert tuner.best is not None
    assert tuner.best[0].values["training.lr"] == ranked[0]
    assert tuner.cost.runs == 27 + 9 * 3 + 3 * 4
    assert tuner.cost.whole_runs == pytest.approx(27 / 9 + 27 / 3 + 12)


def test_failed_trials_are_the_worst() -> None:
    tuner = SuccessiveHalving(candidates(LR, 9, seed=1), seeds=(1,))
    search(tuner, lambda trial: None if trial.values["training.lr"] < 1 else closeness(trial))
    assert tuner.best is not None
    assert tuner.best[0].values["training.lr"] > 1
    failing = SuccessiveHalving(candidates(LR, 9, seed=1), seeds=(1,))
    assert len(search(failing, lambda trial: None)) == 1
    assert failing.best is None


def test_optuna_finds_a_good_value_and_follows_from_the_seed() -> None:
    pytest.importorskip("optuna")
    tuners = [OptunaTuner({**LR, "k": (1, 2)}, 15, seeds=(1, 2)) for _ in range(2)]
    batches = [search(tuner, lambda t: None if t.values["k"] == 2 else closeness(t)) for tuner in tuners]
    assert batches[0] == batches[1]
    assert sum(map(len, batches[0])) == 15
    assert tuners[0].best is not None
    assert 0.02 < tuners[0].best[0].values["training.lr"] < 2
    assert tuners[0].best[0].values["k"] == 1


def test_a_missing_optuna_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ExperimentError, match=r"pip install 'shoal\[optuna\]'"):
        OptunaTuner(LR, 3, seeds=(1,))


def test_a_sweep_tunes_every_combination(small: Path, shoal: Shoal) -> None:
    few = ("--set", "nodes=4", "--set", "dataset.partition=iid", "--set", "algorithm.rounds=6")
    search = ("--tune", "training.lr=0.00001,0.3,300.0,0.0001", "--set", "dataset.validation=0.2")
    command = ("sweep", small, "--grid", "sharing=full,float16", *few, *search, "--out", "swept")
    done = shoal(*command)
    assert done.code == 0, done.err
    results = json.loads(Path("swept/tuning.json").read_text())
    assert [(r["combination"], r["best"]) for r in results] == [
        ("sharing = full", {"training.lr": 0.3}),
        ("sharing = float16", {"training.lr": 0.3}),
    ]
    assert [t["budget"]["algorithm.rounds"] for t in results[0]["trials"]] == [2, 2, 2, 2, 6, 6]
    assert results[0]["split"] == "validation"
    assert "test samples" not in done.out
    experiments = [file.read_text() for file in Path("swept").glob("*/*/experiment.toml")]
    assert len(experiments) == 2
    assert all("lr = 0.3" in text and 'split = "test"' in text for text in experiments)
    again = shoal(*command)
    assert again.code == 0
    assert "ended:" not in again.out
    assert json.loads(Path("swept/tuning.json").read_text()) == results


def test_a_search_on_test_samples_is_mentioned(small: Path, shoal: Shoal) -> None:
    done = shoal("sweep", small, "--tune", "training.lr=0.01:1:log", "--trials", "2", "--dry-run", *("--jobs", 1))
    assert done.code == 0, done.err
    assert "search for training.lr in 0.01:1:log: 2 runs" in done.out
    assert "optimistic" in done.out


def test_wrong_values_of_a_search_are_found_before_the_first_run(small: Path, shoal: Shoal) -> None:
    done = shoal("sweep", small, "--tune", "training.lrate=0.01:1:log")
    assert done.code == 2
    assert "training.lrate: unknown key" in done.err
    assert not Path("runs").exists()
