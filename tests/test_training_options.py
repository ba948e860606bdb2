"""Clipping, label smoothing, number formats, and plug-in optimizers and losses."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoint_runs import stopped_after
from conftest import models_of
from oracle import gradient
from random_data import CLASSES, DATA, PART
from shoal import resume
from shoal.data.dataset import Data
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.models.flat import FlatModule
from shoal.randomness import generator
from shoal.training.batches import Batches
from shoal.training.learner import Learner
from shoal.training.losses import loss_key
from shoal.training.schedules import Cosine, Step
from shoal.training.settings import Training
from shoal.training.torch_names import LOSSES, OPTIMIZER_OPTIONS, SMOOTHED_LOSSES
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Train

PLUGIN = '''
import torch


class SignSGD(torch.optim.Optimizer):
    """Moves every value by lr."""

    elementwise = True

    def __init__(self, params, lr=0.1, decay=1.0):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["total"] = state.get("total", 0.0) * group["decay"] + p.grad
                p.sub_(torch.sign(state["total"]), alpha=group["lr"])


class PerTensor(SignSGD):
    elementwise = False


class Slowing(torch.optim.Optimizer):
    """Keeps its number of steps, and the latest rate, in the parameter group."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["steps"] += 1
        group["latest"] = 0.5 * group.get("latest", group["lr"]) + 0.5 * group["lr"] / group["steps"]
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["latest"])


class NoOptimizer: ...


class NoStep(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


class NoForward(torch.nn.Module): ...


class Squared:
    """The squared distance to the one-hot target."""

    def __call__(self, outputs, targets):
        return ((outputs.softmax(-1) - torch.nn.functional.one_hot(targets, outputs.shape[-1])) ** 2).mean()
'''


def experiment(folder: Path, training: dict[str, Any], **changed: Any) -> Experiment:
    (folder / "mine.py").write_text(PLUGIN)
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 4},
        "model": {"name": "mlp", "hidden": (6,)},
        "training": {"batch_size": 4, "local_steps": 2, **training},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
        "base": folder,
    }
    return Experiment(**{**settings, **changed})


SCHEDULE = {"name": "cosine", "length": 4, "warmup": 2}
OPTIONS: list[dict[str, Any]] = [
    {"schedule": SCHEDULE, "momentum": 0.9, "clip_norm": 0.5, "clip_value": 0.1, "label_smoothing": 0.1},
    {"schedule": SCHEDULE, "momentum": 0.9, "clip_norm": 0.5, "clip_value": 0.1, "label_smoothing": 0.1},
    {"schedule": {"name": "linear", "length": 7, "by": "steps"}, "optimizer": "adam", "lr": 0.01},
    {"optimizer": "mine.py:SignSGD", "loss": "mine.py:Squared", "lr": 0.01, "options": {"decay": 0.5}},
    {"optimizer": "mine.py:SignSGD", "loss": "mine.py:Squared", "lr": 0.01, "options": {"decay": 0.5}},
    {"optimizer": "mine.py:PerTensor", "lr": 0.01},
    {"optimizer": "mine.py:Slowing", "lr": 0.5},
    {"optimizer": "mine.py:Slowing", "lr": 0.5},
    {"precision": "bfloat16"},
    {"precision": "float16", "momentum": 0.9},
]
"""The training of each node."""


def test_options_have_the_same_effect_everywhere_and_after_resume(tmp_path: Path) -> None:
    group = [{"nodes": str(node), "training": training} for node, training in enumerate(OPTIONS)]
    described = experiment(tmp_path, {}, nodes=len(OPTIONS), group=group, checkpoint={"every": 1, "keep": 9})
    run = described.run(tmp_path)
    pooled = dataclasses.replace(described, simulation={"batching": "pool", "workers": 2})  # type: ignore[arg-type]
    assert pooled.run(tmp_path).summary["digest"] == run.summary["digest"]
    stacked = dataclasses.replace(described, simulation={"batching": "vmap"}).run(tmp_path)  # type: ignore[arg-type]
    np.testing.assert_allclose(models_of(stacked), models_of(run), atol=1e-3)
    real = dataclasses.replace(described, engine="processes").run(tmp_path)
    assert real.summary["digest"] == run.summary["digest"]
    assert resume(stopped_after(run.folder, 1, tmp_path / "stopped").path).summary["digest"] == run.summary["digest"]


@pytest.mark.parametrize("node", range(len(OPTIONS)))
def test_every_option_has_an_effect_and_is_replayed(node: int, tmp_path: Path) -> None:
    run = experiment(tmp_path, OPTIONS[node]).run(tmp_path)
    changed = run.summary["digest"]
    assert Experiment.from_file(run.folder.experiment).run(tmp_path).summary["digest"] == changed
    plain = {key: value for key, value in OPTIONS[node].items() if key in ("momentum", "lr")}
    assert changed != experiment(tmp_path, plain).run(tmp_path).summary["digest"]


# Oracles in double precision


@settings(max_examples=15)
@given(
    st.none() | st.floats(0.01, 2),
    st.none() | st.floats(0.001, 0.5),
    st.sampled_from([None, Step(every=2, factor=0.3, by="steps"), Cosine(length=9, warmup=3, by="steps")]),
    st.sampled_from([0.0, 0.3]),
)
def test_training_equals_a_loop_in_double_precision(
    norm: float | None, value: float | None, schedule: Any, proximal: float
) -> None:
    setup = Setup(Experiment(nodes=1, model={"name": "logistic"}))
    training = Training(
        lr=0.4, batch_size=8, clip_norm=norm, clip_value=value, schedule=schedule, proximal=proximal, local_steps=5
    )
    one, rng = setup.trainer_factory.trainer(0, training, 0.0), generator(0, "training", 0)
    batches, data = Batches(setup.parts[0], 8, rng), setup.data.train
    expected, params = setup.initial.astype(np.float64), setup.initial
    for call in range(2):
        params = Train(one, params, None, round=call, step=5 * call).run().params
        start = expected.copy()
        for i, batch in enumerate(batches.take(5)):
            g = gradient(expected, data.x[batch].astype(np.float64), data.y[batch]) + proximal * (expected - start)
            g = g if value is None else np.clip(g, -value, value)
            g = g if norm is None else g * min(1.0, norm / np.linalg.norm(g))
            expected = expected - 0.4 * (1.0 if schedule is None else schedule.scale(5 * call + i)) * g
        rng.integers(2**63)
    np.testing.assert_allclose(params, expected, atol=2e-5)


def trainers(training: Training, module: nn.Module | None = None) -> list[TorchTrainer]:
    torch.manual_seed(0)
    learner = Learner(FlatModule(module or nn.Linear(6, CLASSES)), training, DATA)
    return [TorchTrainer(learner, PART, np.random.default_rng(node), 0.0) for node in range(3)]


COMBINATIONS = st.fixed_dictionaries(
    {"batch_size": st.just(4), "local_steps": st.integers(1, 3)},
    optional={
        "clip_norm": st.floats(0.01, 1),
        "clip_value": st.floats(0.01, 1),
        "label_smoothing": st.floats(0, 1),
        "schedule": st.sampled_from([Step(every=1, factor=0.5, by="steps"), Cosine(length=3)]),
        "momentum": st.just(0.9),
        "proximal": st.just(0.1),
    },
)


@settings(max_examples=25)
@given(COMBINATIONS)
def test_nodes_trained_in_a_stack_equal_nodes_trained_alone(options: dict[str, Any]) -> None:
    training = Training(**options)
    alone, stacked = trainers(training), trainers(training)
    models = [alone[0].learner.flat.read() + np.float32(0.1 * node) for node in range(3)]
    apart = together = models
    for r in range(3):
        step = r * training.local_steps
        apart = [Train(t, p, None, r, step).run().params for t, p in zip(alone, apart, strict=True)]
        works = [Train(t, p, None, r, step) for t, p in zip(stacked, together, strict=True)]
        assert len({work.batch_key for work in works}) == 1
        together = [trained.params for trained in Train.run_batch(works)]
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)


def test_nodes_with_different_rates_are_not_stacked() -> None:
    one, other, _ = trainers(Training(schedule=Step(every=2)))
    params = one.learner.flat.read()
    assert Train(one, params, round=0).batch_key == Train(other, params, round=1).batch_key
    assert Train(one, params, round=1).batch_key != Train(other, params, round=2).batch_key


def test_label_smoothing_is_that_of_torch_and_not_part_of_evaluations() -> None:
    one, plain = trainers(Training(label_smoothing=0.4))[0], trainers(Training())[0]
    params, batch = one.learner.flat.read(), np.array([[3, 8]])
    x, y = torch.from_numpy(DATA.train.x[batch[0]]), torch.from_numpy(DATA.train.y[batch[0]])
    with torch.no_grad():
        expected = nn.CrossEntropyLoss(label_smoothing=0.4)(one.learner.flat.module(x), y)
    assert one.learner.train(params, {}, batch)[0].loss == pytest.approx(float(expected), rel=1e-6)
    assert one.evaluate(params) == plain.evaluate(params)


# Errors


@pytest.mark.parametrize(
    ("training", "expected_error"),
    [
        ({"loss": "mse", "label_smoothing": 0.1}, "training.label_smoothing = 0.1: loss 'mse' has none"),
        ({"loss": "rmse", "label_smoothing": 0.1}, "training.label_smoothing = 0.1: loss 'rmse' has none"),
        ({"loss": "mine.py:Squared", "label_smoothing": 0.1}, "training.label_smoothing = 0.1: loss .*mine.py:Squared"),
        ({"loss": "mine.py:Squard"}, "training.loss = .*has no class 'Squard'; did you mean 'Squared'"),
        ({"optimizer": "mine.py:SignSGDD"}, "training.optimizer = .*did you mean 'SignSGD'"),
        ({"optimizer": "mine.py:NoOptimizer"}, "training.optimizer = .*expected a subclass of torch.optim.Optimizer"),
        ({"optimizer": "none.py:SignSGD"}, "training.optimizer = .*there is no file"),
        ({"optimizer": "mine.py:SignSGD", "options": {"deca": 1.0}}, "options.deca: .*did you mean 'decay'"),
        ({"optimizer": "mine.py:NoStep"}, r"NoStep has no method 'def step\(self, closure=None\)'"),
        ({"loss": "mine.py:NoForward"}, r"NoForward has no method 'def forward\(self, outputs, targets\)'"),
        ({"loss": "mine.py:NoOptimizer"}, r"NoOptimizer has no method 'def __call__\(self, outputs, targets\)'"),
        ({"optimizer": "adm"}, "training.optimizer = 'adm': unknown; did you mean 'adam'"),
        ({"optimizer": "adam", "momentum": 0.5}, "training.momentum: Adam has no such option"),
        ({"options": {"dampning": 0.5}}, "training.options.dampning: SGD has no such option; did you mean 'dampening'"),
        ({"loss": "mes"}, "training.loss = 'mes': unknown"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"clip_norm": 0}, "training.clip_norm = 0: expected number above 0"),
        ({"precision": "float64"}, "training.precision = 'float64': expected one of 'float32'"),
    ],
)
def test_wrong_options_are_found_when_an_experiment_is_validated(
    training: Any, expected_error: str, tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError, match=expected_error):
        experiment(tmp_path, training)


def test_names_and_options_that_are_known_without_torch_are_those_of_torch() -> None:
    by_name = {name.lower(): cls for name, cls in vars(torch.optim).items()}
    for name, options in OPTIMIZER_OPTIONS.items():
        assert options <= inspect.signature(by_name[name]).parameters.keys()
    losses = {loss_key(name): cls for name, cls in vars(nn).items() if name.endswith("Loss")}
    assert losses.keys() >= LOSSES
    smoothed = {key for key in LOSSES if "label_smoothing" in inspect.signature(losses[key]).parameters}
    assert smoothed == SMOOTHED_LOSSES


def test_common_options_are_validated_without_torch() -> None:
    program = (
        "import sys; from shoal import Experiment; "
        "Experiment(training={'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.1, 'label_smoothing': 0.1, "
        "'loss': 'cross-entropy'}); Experiment(training={'optimizer': 'AdamW', 'options': {'betas': [0.9, 0.99]}}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class OnlyFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        outputs = self.layer(x)
        if outputs.dtype != torch.float32:
            raise RuntimeError("not implemented for this type")
        return outputs


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_model_that_a_format_does_not_suit_is_an_error(precision: Any) -> None:
    with pytest.raises(ExperimentError, match=rf"training.precision = '{precision}': .*not implemented for this type"):
        trainers(Training(precision=precision), OnlyFloat32())


@pytest.mark.parametrize("batching", ["off", "pool"])
def test_nodes_without_optimizer_state_keep_the_scale_of_the_loss(batching: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    described = Experiment(
        nodes=2,
        algorithm={"name": "fedavg", "rounds": 12},
        dataset=(x, (100 * x.sum(1)).astype(np.float32)),
        model="logistic",
        training={"lr": 0.05, "precision": "float16"},
        evaluation={"every": 0},
        simulation={"batching": batching, "workers": 2},
    )
    run = described.run(tmp_path)
    assert 0 < run.summary["events"]["not trained"] < 24
    assert np.abs(np.load(run.folder.model(0)) - Setup(described).initial).max() > 1


def test_an_overflow_in_float16_leaves_out_the_step_and_halves_the_scale() -> None:
    steep = Data(train=dataclasses.replace(DATA.train, x=DATA.train.x * 5000), test=DATA.test, classes=CLASSES)
    learner = Learner(FlatModule(nn.Linear(6, CLASSES)), Training(precision="float16"), steep)
    params, batch = learner.flat.read(), np.arange(8)[None]
    trained, state = learner.train(params, {}, batch)
    assert np.array_equal(trained.params, params)
    assert state["loss_scale"].tolist() == [2.0**15, 0]
    for _ in range(20):
        trained, state = learner.train(params, state, batch)
    assert state["loss_scale"].tolist()[0] < 2.0**15
    assert not np.array_equal(trained.params, params)
