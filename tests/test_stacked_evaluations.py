"""Nodes that cannot be evaluated in one call are evaluated one by one, with a warning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from random_data import CLASSES, DATA, PART
from shoal.engines.simulation.compute import StackedExecutor
from shoal.experiment import Experiment
from shoal.models.flat import FlatModule
from shoal.training.learner import Learner
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Evaluate

PLUGIN = '''
import random
from dataclasses import dataclass

import torch
from torch import nn


class Linear(nn.Linear):
    """Draws from a global generator, or fails in a stack, if it evaluates more than two samples."""

    fails = False

    def forward(self, x):
        if not self.training and len(x) > 2:
            if self.fails and torch._C._functorch.is_batchedtensor(self.weight):
                raise LookupError("no stacks")
            random.random()
        return super().forward(x)


@dataclass(frozen=True)
class Model:
    fails: bool

    def build(self, shape, classes):
        module = Linear(shape[0], classes)
        module.fails = self.fails
        return module
'''


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (False, "the code of a plug-in drew from a global generator"),
        (True, "computing them together raised LookupError: no stacks$"),
    ],
)
def test_nodes_that_cannot_be_evaluated_together_are_reported(fails: bool, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)

    def summary(batching: str) -> dict[str, Any]:
        described = Experiment(
            nodes=4,
            algorithm={"name": "dpsgd", "rounds": 2},
            model={"name": "mine.py:Model", "fails": fails},
            training={"batch_size": 4, "local_steps": 2},
            evaluation={"every": 1, "average": False, "samples": 20},  # type: ignore[arg-type]
            simulation={"batching": batching},  # type: ignore[arg-type]
            base=tmp_path,
        )
        return described.run(tmp_path).summary

    alone = summary("off")
    with pytest.warns(UserWarning, match=f"4 nodes are evaluated one by one from now on: {reason}") as shown:
        stacked = summary("vmap")
    assert len(shown) == 1
    assert stacked["accuracy"] == pytest.approx(alone["accuracy"])
    assert stacked["batching"] == "vmap", "they are trained together"


class Counted(nn.Linear):
    """Counts the evaluations of more than two samples, and draws from a global generator in them."""

    evaluations = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > 2:
            Counted.evaluations += 1
            random.random()
        return super().forward(x)


def test_nodes_that_could_not_be_evaluated_together_are_evaluated_alone_from_then_on() -> None:
    learner = Learner(FlatModule(Counted(6, CLASSES)), Training(batch_size=4), DATA)
    made = [TorchTrainer(learner, PART, np.random.default_rng(node), 0.0) for node in range(3)]
    start, executor = learner.flat.read(), StackedExecutor()
    learner.evaluate(start)
    each = Counted.evaluations
    with pytest.warns(UserWarning, match="3 nodes are evaluated one by one"):
        executor.run([Evaluate(trainer, start) for trainer in made])
    assert Counted.evaluations == each * (1 + 1 + 3), "once in the stack, and once for each node"
    restored = TorchTrainer(learner, PART, np.random.default_rng(9), 0.0)
    restored.restore(made[0].state())
    executor.run([Evaluate(trainer, start) for trainer in [*made, restored]])
    assert Counted.evaluations == each * (1 + 1 + 3 + 4)
