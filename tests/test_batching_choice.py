"""Whether nodes are stacked: a choice that depends on the model and the machine alone, and is measured once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.engines.simulation import batching
from shoal.engines.simulation.batching import choose_batching
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.training.inputs import TrainerInputs
from shoal.training.torch_factory import TorchTrainerFactory
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Train, Trained
from shoal.types import Params


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 1,
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "model": {"name": "mlp", "hidden": (6,)},
        "training": {"batch_size": 4, "local_steps": 2},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "auto"},
    }
    return Experiment(**{**settings, **changed})


def is_stackable(setup: Setup) -> bool:
    """Whether the trial of the model succeeds, which is made once."""
    trainers = [setup.trainer_factory.trainer(node, setup.experiment.training, 0.0) for node in range(2)]
    return len({Train(trainer, setup.initial).batch_key for trainer in trainers}) == 1


VARYING = (0.001, 0.000001, 0.005, 0.1, 0.002)
"""Seconds of trainings: at first, stacking is much faster."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the cache, and a machine whose times vary without end."""
    times = itertools.cycle(VARYING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(batching, "_seconds", lambda work: next(times))
    return tmp_path / "cache"


SWEEPS = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 9),
        "seed": st.integers(0, 5),
        "topology": st.sampled_from([{"name": "full"}, {"name": "star"}]),
        "sharing": st.sampled_from([{"name": "topk"}, {"name": "data", "samples": 3}]),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(0.01, 1),
                "momentum": st.just(0.9),
                "batch_size": st.integers(1, 20),
                "local_steps": st.integers(1, 4),
            },
        ),
        "group": st.just([{"nodes": "0", "training": {"optimizer": "adam", "momentum": 0}}]),
    },
)


@settings(max_examples=4)
@given(st.lists(SWEEPS, min_size=3, max_size=3))
def test_runs_of_one_sweep_never_differ_in_their_arithmetic(tmp_path_factory: Any, sweep: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    times = itertools.cycle(VARYING)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        patched.setattr(batching, "_seconds", lambda work: next(times))
        chosen = set()
        for changed in sweep:
            described = experiment(**changed)
            chosen.add(choose_batching(described, Setup(described)) == "vmap")
    assert len(chosen) == 1


def test_runs_that_start_together_measure_once_and_agree(cache: Path) -> None:
    described = experiment()
    setups, chosen = [Setup(described) for _ in range(4)], []
    for setup in setups:  # not in a thread, because all threads have the same global generators
        assert is_stackable(setup)
    threads = [
        threading.Thread(target=lambda s=setup: chosen.append(choose_batching(described, s)))  # type: ignore[misc]
        for setup in setups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == ["vmap"] * 4


def test_without_a_cache_nodes_are_not_stacked(cache: Path) -> None:
    cache.write_text("a file in place of the folder")
    described = experiment()
    with pytest.warns(UserWarning, match=r"simulation.batching = 'auto': .*batching.json cannot be written"):
        assert choose_batching(described, Setup(described)) != "vmap"


@pytest.fixture
def choose(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def choose(module: nn.Module, nodes: float, **changed: Any) -> str:
        """Return the choice for a machine on which a stack takes as long as this number of nodes alone."""
        times = itertools.chain([0.001], itertools.repeat(0.001 * nodes))
        monkeypatch.setattr(batching, "_seconds", lambda work: next(times))
        described = experiment(model=module, **changed)
        return choose_batching(described, Setup(described))

    return choose


def layers(width: int, between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), between, nn.Linear(width, 10))


def test_each_module_in_memory_has_its_own_measurement(choose: Callable[..., str]) -> None:
    assert choose(layers(4, nn.ReLU()), 0.1) == "vmap"
    assert choose(layers(5, nn.ReLU()), 1e6) != "vmap"
    assert choose(layers(4, nn.Tanh()), 1e6) != "vmap"
    assert choose(layers(4, nn.ReLU()), 1e6) == "vmap"


def test_answers_of_other_versions_of_the_measurement_are_not_used(
    choose: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(layers(4, nn.ReLU()), 0.1) == "vmap"
    monkeypatch.setattr(batching, "VERSION", batching.VERSION + 1)
    assert choose(layers(4, nn.ReLU()), 1e6) != "vmap"


class Images(nn.Module):
    """A network that takes images with adjacent channels, unless it flattens them with `view`."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.layers, self.out = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), nn.Linear(18, 10)
        self.view = view

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layers(x)
        return self.out(hidden.view(len(x), -1) if self.view else hidden.flatten(1))


def test_each_memory_format_has_its_own_measurement(choose: Callable[..., str]) -> None:
    images = {"dataset": {"name": "digits", "images": True}}
    assert choose(Images(view=False), 0.1, **images) == "vmap"
    assert choose(Images(view=True), 1e6, **images) != "vmap"


class Clock(TorchTrainer):
    """A trainer whose trainings take a given time on a clock of its own."""

    now = 0.0
    alone = overhead = per_node = 0.0
    stacks: ClassVar[list[int]] = []

    def train(self, params: Params, steps: int | None = None) -> Trained:
        Clock.now += self.alone
        return Trained(params, 0.0)

    def train_key(self, steps: int | None) -> str:
        return "all"

    @staticmethod
    def train_batch(trainers: Any, params: Any, steps: int | None = None) -> list[Trained]:
        Clock.stacks.append(len(trainers))
        Clock.now += Clock.alone * (Clock.overhead + Clock.per_node * len(trainers))
        return [Trained(own, 0.0) for own in params]


class ClockFactory(TorchTrainerFactory):
    trainer_class = Clock


@dataclasses.dataclass(frozen=True)
class ClockBackend:
    def create_factory(self, inputs: TrainerInputs) -> ClockFactory:
        return ClockFactory(inputs)


@pytest.mark.parametrize("alone", [1e-4, 1e-3, 0.005, 0.02, 0.049, 0.3, 5.0])
@pytest.mark.parametrize(
    ("overhead", "per_node", "gains"),
    [(4, 0.05, True), (2, 0.2, True), (2, 0.7, False), (0.3, 1, False), (0, 3, False)],
)
def test_the_measurement_is_bounded(
    alone: float, overhead: float, per_node: float, gains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`overhead` and `per_node` are the times of a stack, relative to a node alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(batching, "perf_counter", lambda: Clock.now)
    for name, value in {"now": 0.0, "alone": alone, "overhead": overhead, "per_node": per_node, "stacks": []}.items():
        monkeypatch.setattr(Clock, name, value)
    described = experiment(nodes=256, trainer=ClockBackend())
    chosen = choose_batching(described, Setup(described))
    assert (chosen == "vmap") == (gains and alone < 0.05)
    assert Clock.now <= max(3.0, alone), "seconds"
    assert max(Clock.stacks, default=0) <= 32
    if per_node >= 1:
        assert max(Clock.stacks, default=0) <= max(2, 2 * 0.02 / alone), "the memory of a large model"


def test_what_cannot_be_stacked_does_not_change_the_choice_for_the_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_seconds", lambda work: 0.001)  # for a stack of nodes as for one
    for optimizer, expected in [("adafactor", ("off", "pool")), ("sgd", ("vmap",)), ("adafactor", ("off", "pool"))]:
        described = experiment(training={"optimizer": optimizer})
        assert choose_batching(described, Setup(described)) in expected
