"""Wrong input that is found while a run is built: the error names the component, and no folder remains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import DataError, ExperimentError, NodeError, SetupError
from shoal.experiment import Experiment

MODULES = """
import torch
from torch import nn


class Five(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 5)

    def forward(self, x):
        return self.linear(x)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 10)

    def forward(self, x):
        return self.linear(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(x), x


class Wide(nn.Module):
    def __init__(self, outputs=12):
        super().__init__()
        self.linear = nn.Linear(64, outputs)

    def forward(self, x):
        return self.linear(x)


class Penalised(nn.Module):
    '''Needs gradients in its forward pass.'''

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = x.requires_grad_() if self.training else x
        outputs = self.linear(x)
        if self.training:
            torch.autograd.grad(outputs.sum(), x, retain_graph=True)
        return outputs


class Missing:
    def load(self, seed):
        return open("missing.csv")


class Unbuildable:
    def build(self, shape, outputs):
        raise KeyError("no such layer")
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Experiment]:
    (tmp_path / "modules.py").write_text(MODULES)

    def make(**settings: Any) -> Experiment:
        given = {"nodes": 3, "algorithm": {"name": "dpsgd", "rounds": 1}, "simulation": {"batching": "off"}}
        return Experiment(**{**given, **settings}, base=tmp_path)

    return make


WRONG_OUTPUTS = ["modules.py:Five", "outputs have shape (2, 5)", "expected (2, 10)", "10 classes"]
WRONG_INPUTS = ["modules.py:Narrow", "raised RuntimeError for a batch of inputs of shape (2, 64)", "32x10"]


@pytest.mark.parametrize(
    ("engine", "model", "texts"),
    [
        ("simulation", "Five", WRONG_OUTPUTS),
        ("processes", "Five", WRONG_OUTPUTS),
        ("simulation", "Narrow", WRONG_INPUTS),
    ],
)
def test_a_model_that_does_not_fit_the_data_leaves_no_folder(
    engine: str, model: str, texts: list[str], small: Callable[..., Experiment], tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    with pytest.raises(ExperimentError) as raised:
        small(engine=engine, model={"name": f"modules.py:{model}"}).run(out)
    for text in texts:
        assert text in str(raised.value)
    assert not list(out.iterdir())


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_an_error_that_is_found_later_names_the_file_too(
    engine: str, small: Callable[..., Experiment], tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(small(engine=engine, model={"name": "modules.py:Narrow"}).toml())
    with pytest.raises(ExperimentError) as raised:
        Experiment.from_file(file).run(tmp_path / "runs")
    assert str(raised.value).startswith(f"{file}: 1 problem\n  - model = ")


def test_earlier_runs_of_the_same_name_stay(small: Callable[..., Experiment], tmp_path: Path) -> None:
    done = small().run(tmp_path / "runs")
    with pytest.raises(DataError):
        small(nodes=2000).run(tmp_path / "runs")
    assert list((tmp_path / "runs").glob("*/*")) == [done.folder.path]


@pytest.mark.parametrize(("engine", "error"), [("simulation", FileNotFoundError), ("processes", SetupError)])
def test_an_exception_of_a_plug_in_leaves_no_folder(
    engine: str, error: type[Exception], small: Callable[..., Experiment], tmp_path: Path
) -> None:
    with pytest.raises(error, match=r"missing\.csv"):
        small(engine=engine, dataset={"name": "modules.py:Missing"}).run(tmp_path / "runs")
    assert not list((tmp_path / "runs").iterdir())


def test_an_error_after_the_start_keeps_the_folder(small: Callable[..., Experiment], tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        small(fault=[{"nodes": "0", "kind": "raise", "round": 0}]).run(tmp_path / "runs")
    assert len(list((tmp_path / "runs").glob("*/*/summary.json"))) == 1


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("Two", ["its output is a tuple; expected one tensor", "(2, 10)"]),
        ("Unbuildable", ["it cannot be built: KeyError: 'no such layer'"]),
    ],
)
def test_other_models_that_cannot_be_used(
    model: str, texts: list[str], small: Callable[..., Experiment], tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError) as raised:
        small(model={"name": f"modules.py:{model}"}).run(tmp_path)
    for text in (f"modules.py:{model}", *texts):
        assert text in str(raised.value)


@pytest.mark.parametrize("model", ["Wide", "Penalised"])
def test_models_that_train_are_not_rejected(model: str, small: Callable[..., Experiment], tmp_path: Path) -> None:
    """More outputs than classes, and a forward pass that needs gradients."""
    assert small(model={"name": f"modules.py:{model}"}).run(tmp_path).status == "completed"


def test_outputs_must_fit_the_loss(small: Callable[..., Experiment], tmp_path: Path) -> None:
    model = {"name": "modules.py:Wide"}
    with pytest.raises(
        ExperimentError, match=r"shape \(2, 12\) .* do not fit training.loss = 'mse'; expected \(2, 10\)"
    ):
        small(model=model, training={"loss": "mse"}).run(tmp_path)


@pytest.mark.parametrize(
    ("targets", "options", "outputs", "expected"),
    [
        (np.zeros((40, 64), np.int64), {"task": "sequence", "classes": 3}, 3, "expected (2, 64, 3)"),
        (np.zeros(40, np.float32), {"task": "regression"}, 2, "expected (2,), a number for each target"),
    ],
    ids=["sequence", "regression"],
)
def test_outputs_of_other_tasks(
    targets: Any, options: Any, outputs: int, expected: str, small: Callable[..., Experiment], tmp_path: Path
) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((40, 64), np.float32), y=targets)
    model = {"name": "modules.py:Wide", "outputs": outputs}
    with pytest.raises(ExperimentError) as raised:
        small(model=model, dataset={"name": "arrays", "path": "own.npz", **options}).run(tmp_path / "runs")
    assert f"outputs have shape (2, {outputs}) for a batch of 2 inputs; {expected}" in str(raised.value)
    assert not list((tmp_path / "runs").iterdir())
