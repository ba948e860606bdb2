"""Training that diverges is reported: one notice during the run, a final count, and the nodes in the summary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shoal.experiment import Experiment, running
from shoal.node_training import NodeTraining
from shoal.results.progress import NullProgressListener
from shoal.training.trainer import Trained


class Notices(NullProgressListener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def run(folder: Path, **changed: Any) -> tuple[running.Run, list[str]]:
    settings: dict[str, Any] = {
        "nodes": 4,
        "algorithm": {"name": "dpsgd", "rounds": 4},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
    }
    notices = Notices()
    return running.run(Experiment(**{**settings, **changed}), folder, notices), notices.texts


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_diverged_nodes_are_reported_once_and_listed(engine: str, tmp_path: Path) -> None:
    done, notices = run(tmp_path, engine=engine, training={"lr": 1e30, "local_steps": 3})
    assert done.summary["diverged"] == [0, 1, 2, 3]
    first, last = notices
    assert " diverged in round 0: the training loss is nan; try a smaller training.lr" in first
    assert last == "4 of 4 nodes diverged: 0-3"
    assert done.summary["events"]["diverged"] == 4


@pytest.mark.parametrize("batching", ["off", "vmap", "pool"])
def test_only_nodes_that_diverge_are_listed(batching: str, tmp_path: Path) -> None:
    group = [{"nodes": "2", "training": {"lr": 1e30, "local_steps": 3}}]
    done, notices = run(tmp_path, group=group, simulation={"batching": batching, "workers": 2})
    assert done.summary["diverged"] == [2]  # the others reject its model
    assert [text.startswith("node 2 diverged in round") for text in notices] == [True, False]


def test_a_finite_run_has_no_diverged_nodes(tmp_path: Path) -> None:
    done, notices = run(tmp_path)
    assert done.summary["diverged"] == []
    assert notices == []


def test_the_display_names_diverged_nodes(shoal: Any, small: Path) -> None:
    shown = shoal("run", small, "--set", "training.lr=1e30")
    assert "nodes 0-5" in shown.out
    assert "6 of 6 nodes diverged" in shown.out + shown.err


def test_a_restored_node_has_diverged_only_if_it_had_before() -> None:
    """The loss does not show it: a trainer that does not know its loss reports NaN."""
    finite, wrong = np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    for params, expected in ((finite, False), (wrong, True)):
        before, after = (NodeTraining(cast(Any, None), 0.1) for _ in range(2))
        trained = Trained(params, math.nan)
        before.loss = trained.loss
        assert before.newly_diverged(trained) is expected
        after.restore(before.state())
        assert after.diverged is expected
