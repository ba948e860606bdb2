"""Schedules of the learning rate, against those of torch and a training loop in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.fedavg import FedAvg
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.node import Node
from shoal.results.records import Round
from shoal.testing import Faults
from shoal.training.schedules import Constant, Cosine, Linear, MultiStep, Step
from shoal.types import Params

T = torch.optim.lr_scheduler


def factors(make: Callable[[torch.optim.Optimizer], Any], count: int) -> list[float]:
    """The factors of a scheduler of torch at t = 0, 1, …"""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@given(st.integers(1, 12), st.floats(0.1, 1), st.integers(1, 30), st.lists(st.integers(1, 30), max_size=4))
def test_schedules_equal_those_of_torch(every: int, factor: float, length: int, at: list[int]) -> None:
    minimum = factor / 2
    pairs: list[tuple[Any, Callable[[Any], Any]]] = [
        (Constant(), lambda o: T.ConstantLR(o, factor=1.0)),
        (Step(every=every, factor=factor), lambda o: T.StepLR(o, every, factor)),
        (MultiStep(at=tuple(at), factor=factor), lambda o: T.MultiStepLR(o, sorted(at), factor)),
        (Cosine(length=length, minimum=minimum), lambda o: T.CosineAnnealingLR(o, length, eta_min=minimum)),
        (Linear(length=length, minimum=minimum), lambda o: T.LinearLR(o, 1.0, minimum, total_iters=length)),
    ]
    for schedule, make in pairs:
        count = length + 1 if isinstance(schedule, Cosine) else 32  # torch's cosine rises again
        assert [schedule.scale(t) for t in range(count)] == pytest.approx(factors(make, count), abs=1e-9)


@given(st.integers(0, 8), st.integers(9, 30), st.floats(0, 1), st.integers(0, 60))
def test_rates_rise_in_the_warm_up_and_fall_afterwards(warmup: int, length: int, minimum: float, t: int) -> None:
    for schedule in (Cosine(warmup=warmup, length=length, minimum=minimum), Linear(warmup=warmup, length=length)):
        if t < warmup:
            assert schedule.scale(t) == (t + 1) / warmup
        else:
            assert schedule.scale(warmup) == 1.0
            assert schedule.minimum <= schedule.scale(t + 1) <= schedule.scale(t) <= 1.0
        assert schedule.scale(length + t) == pytest.approx(schedule.minimum, abs=1e-12)
    assert Step(warmup=warmup, every=length).scale(length) == 0.1
    assert Constant(warmup=warmup).scale(warmup + t) == 1.0


# In a run


def record_rates(node: Node) -> None:
    """Record the learning rate of every training as an event."""
    train = node.train

    async def recorded(params: Params, steps: int | None = None) -> Params:
        node.record_event("rate", f"{node.learning_rate:.6g}")
        return await train(params, steps)

    node.train = recorded  # type: ignore[method-assign]


@dataclass(frozen=True)
class Rates(DPSGD):
    async def run(self, node: Node) -> None:
        record_rates(node)
        await super().run(node)


@dataclass(frozen=True)
class SampledRates(FedAvg):
    async def run(self, node: Node) -> None:
        record_rates(node)
        await super().run(node)


def experiment(schedule: Any, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 4,
        "algorithm": {"name": f"{__file__}:Rates", "rounds": 6},
        "model": {"name": "logistic"},
        "training": {"lr": 0.8, "local_steps": 2, "schedule": schedule},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def rates(run: Any, node: int) -> list[float]:
    return [float(r.detail) for r in run.folder.read(node) if getattr(r, "what", "") == "rate"]


HALVED = {"name": "step", "every": 2, "factor": 0.5}


@pytest.mark.parametrize(
    ("engine", "batching"),
    [("simulation", "off"), ("simulation", "vmap"), ("simulation", "pool"), ("processes", "off")],
)
def test_algorithms_see_the_current_rate(engine: Any, batching: str, tmp_path: Path) -> None:
    group = [
        {"nodes": "1", "training": {"schedule": {"every": 3}}},
        {"nodes": "2", "training": {"lr": 0.4}},
        {"nodes": "3", "training": {"schedule": {"by": "steps"}}},
    ]
    run = experiment(HALVED, engine=engine, group=group, simulation={"batching": batching, "workers": 2}).run(tmp_path)
    assert rates(run, 0) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    assert rates(run, 1) == [0.8, 0.8, 0.8, 0.4, 0.4, 0.4]
    assert rates(run, 2) == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    assert rates(run, 3) == [0.8, 0.4, 0.2, 0.1, 0.05, 0.025]


def test_a_node_that_restarts_has_the_rate_of_its_round(tmp_path: Path) -> None:
    fault = [*Faults().crash(3, round=1).schedule, {"kind": "restart", "node": 3, "time": 0.065}]
    run = experiment(HALVED, fault=fault).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert rates(run, 3)[-1] == rates(run, 0)[-1] == 0.2
    assert len(rates(run, 3)) < len(rates(run, 0))


def test_clients_have_the_rate_of_the_server_s_round(tmp_path: Path) -> None:
    """Not that of the client's own number of trainings: half of the clients train in each round."""
    sampled = {"name": f"{__file__}:SampledRates", "rounds": 6, "fraction": 0.5}
    run = experiment(HALVED, algorithm=sampled).run(tmp_path)
    for node in range(4):
        rounds = [r.round for r in run.folder.read(node) if isinstance(r, Round)]
        assert rates(run, node) == [0.8 * 0.5 ** (round // 2) for round in rounds]
    assert sum(len(rates(run, node)) for node in range(4)) == 12


FIXED = """
import numpy as np
from shoal.training import Trained


class Fixed:
    initial, shapes = np.zeros(3, np.float32), ((3,),)
    samples, step_seconds, cpu_seconds = 1, 0.0, 0.0

    def create_factory(self, inputs): return self
    def trainer(self, node, training, step_seconds): return self
    def steps(self, steps): return 1
    def train(self, params, steps=None): return Trained(params, 0.0)
    def evaluate(self, params): return {}
    def warm_up(self, node, training): ...
"""


@pytest.mark.parametrize(
    ("schedule", "expected_error"),
    [
        ({"name": "cosin", "length": 3}, "training.schedule.name = 'cosin': .*did you mean 'cosine'"),
        ({"name": "cosine"}, "training.schedule.length: missing"),
        ({"name": "linear", "length": 3, "warmup": 3}, "training.schedule: warmup = 3: expected less than length"),
        ({"name": "step", "every": 0}, "training.schedule.every = 0"),
        (3, "training.schedule = 3: expected a table"),
    ],
)
def test_wrong_schedules_are_errors_that_name_the_key(schedule: Any, expected_error: str) -> None:
    with pytest.raises(ExperimentError, match=expected_error):
        experiment(schedule)


IGNORANT = """
import numpy as np
from shoal.training import BatchTrainer, Trained


class Ignorant:
    initial, shapes = np.zeros(3, np.float32), ((3,),)

    def create_factory(self, inputs):
        self.inputs = inputs
        return self

    def trainer(self, node, training, step_seconds): return OneNode(self.inputs, node, training, step_seconds)
    def evaluate(self, params): return {}
    def warm_up(self, node, training): ...


class OneNode(BatchTrainer):
    def learn(self, params, batches): return Trained(params, 0.0)
    def evaluate(self, params): return {}
"""


@pytest.mark.parametrize(
    "option", [{"schedule": "constant"}, {"clip_norm": 1.0}, {"label_smoothing": 0.1}, {"precision": "bfloat16"}]
)
def test_options_that_a_batch_trainer_does_not_declare_are_rejected(option: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(IGNORANT)
    described = experiment(None, training=option, trainer={"name": "mine.py:Ignorant"}, base=tmp_path)
    with pytest.raises(ExperimentError, match=rf"training\.{next(iter(option))} = .*declare Traits\(training_options="):
        Setup(described).trainer(0)


@pytest.mark.parametrize("trainer", ["scikit", "mine.py:Fixed"])
def test_a_trainer_that_does_not_follow_schedules_rejects_them(trainer: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FIXED)
    described = experiment("constant", trainer={"name": trainer}, base=tmp_path)
    with pytest.raises(ExperimentError, match=r"training.schedule = 'constant': trainer .*does not"):
        Setup(described).trainer(0)


def test_a_schedule_is_an_instance_a_name_or_a_plug_in_and_is_written_to_the_table(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Always:\n    def scale(self, t):\n        return 0.25\n")
    plugin = experiment("mine.py:Always", base=tmp_path)
    assert np.allclose(rates(plugin.run(tmp_path), 0), 0.2)
    again = Experiment.from_table(plugin.to_table())
    assert again.training.schedule.name == f"{tmp_path / 'mine.py'}:Always"
    assert experiment(Cosine(length=9)).to_table()["training"]["schedule"] == {
        "name": "cosine",
        "length": 9,
        "minimum": 0.0,
        "warmup": 0,
        "by": "rounds",
    }
    assert experiment("constant").training == experiment({"name": "constant"}).training
