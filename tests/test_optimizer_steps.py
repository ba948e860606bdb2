"""Optimizer steps without torch's profiling."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.training.optimizers import take_step


def make(name: str, values: torch.Tensor) -> torch.optim.Optimizer:
    values.requires_grad_()
    values.grad = torch.linspace(-1, 1, len(values))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([values], lr=0.1)
    return optimizer


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Rprop"])
def test_the_step_is_that_of_the_optimizer(name: str) -> None:
    ours, theirs = torch.ones(5), torch.ones(5)
    stepped, expected = make(name, ours), make(name, theirs)
    for _ in range(3):
        take_step(stepped)
        expected.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, torch.ones(5))


def test_hooks_of_an_optimizer_are_called() -> None:
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda optimizer, args, kwargs: called.append(name)

    optimizer = make("SGD", torch.ones(2))
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    take_step(optimizer)
    assert called == ["before", "after"]
    handle = register_optimizer_step_post_hook(note("all"))
    try:
        take_step(make("SGD", torch.ones(2)))
    finally:
        handle.remove()
    assert called[2:] == ["all"]


def test_the_profiler_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make("SGD", torch.ones(2))
    entered: list[str] = []
    original = torch.autograd.profiler.record_function

    def note(name: str) -> Any:
        entered.append(name)
        return original(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", note)
    take_step(copy.deepcopy(optimizer))
    assert entered == []
    optimizer.step()
    assert entered, "torch still enters its profiler in each step, and the function is needed"


WARM_UP = """
import sys
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
experiment = Experiment(nodes=2, dataset="digits", model="mlp", training={"optimizer": sys.argv[1], "momentum": 0.0})
Setup(experiment).warm_up()
assert "torch" in sys.modules
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_processes_of_nodes_do_not_import_the_compiler_of_torch(name: str) -> None:
    """Its import takes as long as that of the rest of torch, and a fork copies the page tables of its memory."""
    found = subprocess.run([sys.executable, "-c", WARM_UP, name], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


STACKED = """
import sys, tempfile
from shoal.experiment import Experiment
experiment = Experiment(nodes=3, dataset="digits", model="mlp", algorithm={"name": "dpsgd", "rounds": 2},
                        simulation={"batching": "vmap"}, evaluation={"every": 1})
run = experiment.run(tempfile.mkdtemp())
assert run.summary["batching"] == "vmap" and run.summary["accuracy"]
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_a_simulation_that_stacks_nodes_does_not_import_the_compiler_of_torch() -> None:
    found = subprocess.run([sys.executable, "-c", STACKED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


COMPILED = """
import torch
from shoal.training.optimizers import OptimizerFactory, take_step
from shoal.training.settings import Training
values = torch.ones(4, requires_grad=True)
optimizer = OptimizerFactory(Training(lr=0.5)).create([values])
values.grad = torch.ones(4)
take_step(optimizer)
assert values.requires_grad and torch.is_grad_enabled()
other = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5)  # as a user's code would
other.step()
import torch._dynamo
excluded = torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable
assert excluded is not torch.optim.Optimizer.add_param_group.__wrapped__
take_step(optimizer)
print(values.tolist())
"""


def test_the_compiler_of_torch_can_be_imported_later() -> None:
    found = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[0] == "[0.0, 0.0, 0.0, 0.0]"
