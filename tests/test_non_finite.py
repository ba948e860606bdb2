"""Payloads with infinities or NaN, for example of a node that diverged or of an attacker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.algorithms.dpsgd import DPSGD
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.results.records import Event
from shoal.testing import FakeRuntime


def model(sender: int, *values: float) -> Message:
    return Message(sender, "model", 0, Payload({"params": np.array(values, np.float32)}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_rejected_and_its_sender_counts_as_missing(bad: float) -> None:
    fake = FakeRuntime(model(1, bad, 0), model(2, 4, 4))
    node = fake.node(nodes=3, params=np.array([1, 1], np.float32))
    fake.run(DPSGD(1).run(node))
    assert node.params.tolist() == [2.5, 2.5]  # the weights of the remaining two are renormalised
    assert node.rejected_count == 1
    assert [(e.what, e.detail) for e in fake.records if isinstance(e, Event)] == [
        ("payload rejected", "from node 1: it holds values that are not finite")
    ]


@pytest.mark.parametrize(("setting", "finite"), [("reject", True), ("keep", False)])
def test_a_diverged_node_does_not_spread_nan_unless_the_experiment_keeps_it(
    setting: Any, finite: bool, tmp_path: Path
) -> None:
    run = Experiment(
        nodes=4,
        non_finite=setting,
        algorithm=DPSGD(6),
        topology={"name": "full"},
        model={"name": "mlp"},
        group=({"nodes": "0", "training": {"lr": 1e38, "local_steps": 5}},),
        evaluation={"every": 0},
    ).run(tmp_path)
    models = np.stack([np.load(run.folder.model(node)) for node in range(1, 4)])
    assert np.isfinite(models).all() == finite
