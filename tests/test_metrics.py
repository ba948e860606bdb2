"""Metrics equal values calculated by hand, for one model and for a batch of models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.data.dataset import Data, Samples, Task
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.models.flat import FlatModule
from shoal.results.progress import MeanScore, main_metric
from shoal.results.records import Evaluation
from shoal.results.statistics import fairness
from shoal.training.learner import Learner
from shoal.training.metrics import BY_TASK, Metrics
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer

# Six classes, four samples: ranks of the right class 1, 2, 6 and 1.
OUTPUTS = torch.tensor(
    [
        [4.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 3.0, 2.0, 0.0, 0.0, 0.0],
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 9.0, 0.0],
    ]
)
TARGETS = torch.tensor([0, 2, 5, 4])


def data(task: Task = "classification", padding: int | None = None, classes: int = 6) -> Data:
    nothing = Samples(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    return Data(nothing, nothing, classes, task, padding=padding)


def measured(metrics: Metrics, *batches: tuple[torch.Tensor, torch.Tensor, float]) -> dict[str, float]:
    totals: dict[str, Any] = {}
    for outputs, targets, loss in batches:
        for name, value in metrics.batch_sums(outputs, targets, torch.tensor(loss)).items():
            totals[name] = totals.get(name, 0) + value
    return metrics.scores(totals)


# By hand


def test_top_1_top_5_and_per_class_by_hand() -> None:
    metrics = Metrics(data(), ["accuracy", "top5", "per-class"])
    found = measured(metrics, (OUTPUTS[:3], TARGETS[:3], 1.0), (OUTPUTS[3:], TARGETS[3:], 5.0))
    assert found == {
        "accuracy": 0.5,
        "top5": 0.75,
        "class 0": 1.0,
        "class 2": 0.0,
        "class 4": 1.0,
        "class 5": 0.0,
        "loss": 2.0,  # (3·1 + 1·5)/4
    }


def test_with_fewer_than_five_classes_top_5_is_one() -> None:
    assert measured(Metrics(data(classes=3), ["top5"]), (OUTPUTS[:, :3], TARGETS % 3, 0.0))["top5"] == 1.0


def test_rmse_by_hand_does_not_depend_on_the_batches() -> None:
    metrics = Metrics(data("regression"))
    outputs, targets = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 4.0, 4.0])
    parts = [(outputs[:1], targets[:1], 0.0), (outputs[1:], targets[1:], 2.5)]
    assert measured(metrics, *parts) == pytest.approx({"rmse": math.sqrt((0 + 4 + 1) / 3), "loss": 5 / 3})


@pytest.mark.parametrize("padding", [0, -1, -100, 7])
def test_perplexity_by_hand_ignores_padding(padding: int) -> None:
    classes = 3
    metrics = Metrics(data("sequence", padding, classes))
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.9, 0.05, 0.05]]))
    outputs = torch.stack([logits, logits])  # two sequences of three places
    targets = torch.tensor([[1, 2, padding], [1, padding, padding]])
    found = measured(metrics, (outputs, targets, 0.25))
    assert found["perplexity"] == pytest.approx((1 / (0.5 * 0.8 * 0.5)) ** (1 / 3), rel=1e-5)
    assert found["accuracy"] == pytest.approx(1.0)
    assert found["loss"] == pytest.approx(0.25)


def test_a_batch_of_only_padding_changes_nothing() -> None:
    metrics = Metrics(data("sequence", -1, 6))
    scored = (OUTPUTS[None], TARGETS[None], 1.5)
    padding = (OUTPUTS[None], torch.full((1, 4), -1), math.nan)  # the mean of nothing
    assert measured(metrics, scored, padding) == measured(metrics, scored)


def test_without_test_samples_there_are_no_scores() -> None:
    assert Metrics(data()).scores({}) == {}
    assert measured(Metrics(data("sequence", -1)), (OUTPUTS[None], torch.full((1, 4), -1), math.nan)) == {}


def test_a_model_that_diverged_has_no_finite_perplexity() -> None:
    found = measured(Metrics(data(), ["perplexity"]), (OUTPUTS * 1e6, TARGETS, 1.0))
    assert found["perplexity"] == math.inf


# Metrics and targets of an experiment


@pytest.mark.parametrize(
    ("task", "names", "expected_error"),
    [
        ("classification", ["rmse"], "'rmse' is not defined for a classification task; use accuracy, top5"),
        ("regression", ["accuracy"], "'accuracy' is not defined for a regression task; use rmse, loss"),
        ("sequence", ["per-class"], "'per-class' is not defined for a sequence task"),
        ("classification", ["acuracy"], "'acuracy' is unknown; did you mean 'accuracy'?"),
    ],
)
def test_metrics_of_another_task_are_rejected(task: Task, names: list[str], expected_error: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        Metrics(data(task), names)
    assert f"evaluation.metrics: {expected_error}" in str(caught.value)


def test_an_experiment_with_invalid_metrics_is_rejected_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="'rmse' is not defined for"):
        Experiment(nodes=2, evaluation={"metrics": ["rmse", "loss"]}).run(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "names", "score", "expected_error"),
    [
        ("classification", None, "rmse", "not defined for a classification task; use accuracy, loss"),
        ("regression", None, "accuracy", "not defined for a regression task; use rmse, loss"),
        ("sequence", None, "class 3", "not defined for a sequence task; use accuracy, perplexity, loss"),
        ("classification", None, "perplexity", "it would not be measured; add 'perplexity' to evaluation.metrics"),
        ("classification", ["top5"], "class 3", "it would not be measured; add 'per-class' to evaluation.metrics"),
        ("classification", ["per-class"], "class 6", "classes are numbered 0 to 5"),
    ],
)
def test_a_target_for_a_score_that_is_not_measured_is_rejected(
    task: Task, names: list[str] | None, score: str, expected_error: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        Metrics(data(task), names).check(score)
    assert f"evaluation.metric = {score!r}: {expected_error}" in str(caught.value)


@pytest.mark.parametrize("task", BY_TASK)
def test_a_target_for_a_measured_score_is_accepted(task: Task) -> None:
    metrics = Metrics(data(task), BY_TASK[task])
    for name in BY_TASK[task]:
        metrics.check("class 5" if name == "per-class" else name)


OWN_TRAINERS = """
from shoal import Traits

class OwnScores:
    def create_factory(self, inputs): ...

class Metrics(OwnScores):
    traits = Traits(reports_metrics=True)
"""


def test_the_metric_of_a_plug_in_is_checked_if_it_reports_metrics(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TRAINERS)
    table = {"evaluation": {"metric": "my score", "metrics": ["accuracy"]}}
    Experiment.from_table({**table, "trainer": {"name": "own.py:OwnScores"}}, base=tmp_path)
    with pytest.raises(ExperimentError, match=r"evaluation\.metric = 'my score': unknown; expected one of accuracy"):
        Experiment.from_table({**table, "trainer": {"name": "own.py:Metrics"}}, base=tmp_path)


@pytest.mark.parametrize("trainer", ["torch", "scikit"])
def test_a_target_without_a_score_of_the_data_is_rejected_before_the_run(trainer: str, tmp_path: Path) -> None:
    plan = Experiment(
        nodes=2,
        model={"name": "logistic"},
        trainer={"name": trainer},
        evaluation={"metric": "rmse", "target": 1.0},  # type: ignore[arg-type]
    )
    with pytest.raises(ExperimentError, match=r"evaluation\.metric = 'rmse': not defined for a classification task"):
        plan.run(tmp_path)


# Stacked


@pytest.mark.parametrize("task", BY_TASK)
def test_models_evaluated_in_a_batch_score_as_one_by_one(task: Task) -> None:
    rng = np.random.default_rng(0)
    count = 700
    x = rng.standard_normal((count, 6)).astype(np.float32)
    y: Any = rng.integers(0, 3, count)
    if task == "sequence":
        y = rng.integers(-1, 3, (count, 2))
    elif task == "regression":
        y = rng.standard_normal(count).astype(np.float32)
    outputs = {"classification": 3, "sequence": 6, "regression": 1}[task]
    layers: list[nn.Module] = [nn.Linear(6, outputs)]
    if task == "sequence":
        layers.append(nn.Unflatten(1, (2, 3)))
    found = Data(Samples(x, y), Samples(x, y), 3, task, padding=-1 if task == "sequence" else None)
    learner = Learner(FlatModule(nn.Sequential(*layers)), Training(), found, None, Metrics(found, BY_TASK[task]))
    learner.evaluation_batch = 300  # several batches; the last one is shorter
    params = [rng.standard_normal(learner.flat.size).astype(np.float32) for _ in range(3)]
    for alone, together in zip(map(learner.evaluate, params), learner.evaluate_stacked(params), strict=True):
        assert together.keys() == alone.keys()
        assert together == pytest.approx(alone, rel=1e-4)


def test_a_node_without_test_samples_has_no_scores() -> None:
    x, y = np.zeros((4, 6), np.float32), np.zeros(4, np.int64)
    found = Data(Samples(x, y), Samples(x, y), 3)
    learner = Learner(FlatModule(nn.Linear(6, 3)), Training(), found)
    trainer = TorchTrainer(learner, np.arange(4), np.random.default_rng(0), 0.0, tests=np.arange(0))
    assert trainer.evaluate(learner.flat.read()) == {}


# Runs

SOURCE = '''
from dataclasses import dataclass
import numpy as np
from shoal.data import Data, Samples


@dataclass(frozen=True)
class Users:
    """Samples of eight users. The last two have no test samples."""

    number: bool = False

    def load(self, seed):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((80, 3)).astype(np.float32)
        y = x.sum(1) if self.number else (x.sum(1) > 0).astype(np.int64)
        owner = np.arange(80) % 8
        train, test = Samples(x, y, owner), Samples(x[:60], y[:60], np.arange(60) % 6)
        return Data(train, test, 1 if self.number else 2, "regression" if self.number else "classification")
'''


@pytest.fixture
def users(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(SOURCE)
    return tmp_path


def experiment(base: Path, number: bool = False, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 8,
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "dataset": {"name": "users.py:Users", "number": number},
        "partition": {"name": "natural", "order": "contiguous"},
        "model": {"name": "logistic"},
        "training": {"batch_size": 4},
        "evaluation": {"every": 1, "data": "own"},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed}, base=base)


def test_nodes_are_evaluated_on_their_own_users_on_both_engines(users: Path) -> None:
    simulated = experiment(users).run(users)
    real = experiment(users, engine="processes").run(users)
    assert simulated.summary["metrics"] == real.summary["metrics"]
    assert simulated.summary["digest"] == real.summary["digest"]
    lines = (simulated.folder.node(7)).read_text().splitlines()
    evaluations = [json.loads(line) for line in lines if '"evaluation"' in line]
    assert [e["scores"] for e in evaluations] == [{}, {}], "the last user has no test samples"
    assert simulated.summary["accuracy"]["mean"] is not None
    own = experiment(users, evaluation={"data": "own", "samples": 1}).run(users)
    scores = [next(r.scores for r in own.folder.read(n) if isinstance(r, Evaluation)) for n in range(8)]
    assert [s.get("accuracy") in (0.0, 1.0) for s in scores] == [True] * 6 + [False] * 2, "one sample of each node"


def test_local_evaluation_requires_classes_or_test_samples_with_owners(users: Path) -> None:
    with pytest.raises(ExperimentError, match=r"a regression task has no classes; use 'natural', or evaluation\.data"):
        experiment(users, True, partition={"name": "iid"}).run(users)
    source = SOURCE.replace("np.arange(60) % 6", "np.arange(60) + 100")
    (users / "users.py").write_text(source)
    (users / "others.py").write_text(source)
    with pytest.raises(ExperimentError, match="no test samples of the users whose data the nodes hold"):
        experiment(users, dataset={"name": "others.py:Users"}).run(users)


def test_a_regression_task_is_shown_and_plotted_by_its_rmse(users: Path, shoal: Callable[..., Any]) -> None:
    (users / "numbers.toml").write_text(experiment(users, True, name="numbers").toml())
    result = shoal("run", users / "numbers.toml", "--plot")
    assert result.code == 0, result.err
    assert "rmse by rounds: " in result.out
    assert "· rmse " in result.out, "progress"
    summary = json.loads(next(Path("runs").rglob("summary.json")).read_text())
    assert summary["accuracy"] is None
    assert summary["metrics"].keys() == summary["fairness"].keys() == {"rmse", "loss"}
    shown = shoal("show").out
    assert f"{summary['metrics']['rmse']['mean']:.4f} ± " in shown
    assert f"rmse {summary['fairness']['rmse']['highest_10_percent']:.4f}" in shown, (
        "the worst nodes have the highest errors"
    )
    assert "accuracy" not in shown
    assert shoal("plot", "runs").out == "rmse by rounds: rmse.png\n"
    assert shoal("plot", "runs", "--metric", "loss", "--out", "l.svg").code == 0
    rejected = shoal("plot", "runs", "--metric", "accuracy")
    assert rejected.code == 2
    assert "'accuracy' was not measured; the records have loss, rmse" in rejected.err


def test_the_main_metric_is_accuracy_or_the_metric_of_the_task() -> None:
    assert main_metric(["loss", "top5", "accuracy"]) == "accuracy"
    assert main_metric(["loss", "rmse"]) == "rmse"
    assert main_metric(["f1"]) == "f1"
    assert main_metric([]) is None
    mean = MeanScore()
    for score in (("rmse", 1.0), None, ("rmse", 2.0)):
        mean.add(3, score)
    assert mean.mean == ("rmse", 1.5)


def test_fairness_is_the_mean_of_the_lowest_and_the_highest_tenth() -> None:
    assert fairness(range(20)) == {"lowest_10_percent": 0.5, "highest_10_percent": 18.5}
    assert fairness([3.0, 1.0]) == {"lowest_10_percent": 1.0, "highest_10_percent": 3.0}
    assert fairness([]) is None
    diverged = fairness([1.0, math.nan, 0.0])
    assert diverged is not None
    assert all(map(math.isnan, diverged.values()))
