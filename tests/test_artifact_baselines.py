"""The DivShare artifact's variants of AD-PSGD and SWIFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.algorithms.artifact_baselines import ArtifactADPSGD, ArtifactSWIFT
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.testing import FakeRuntime


def model(sender: int, kind: str, value: float, round: int = 0) -> Message:
    return Message(sender, kind, round, Payload({"params": np.full(2, value, np.float32)}))


def plus_one(params: Any) -> Any:
    return params + 1


def test_swift_averages_the_latest_model_of_each_sender_once_with_equal_weights() -> None:
    fake = FakeRuntime(
        model(1, "artifact model", 4, round=2),
        model(1, "artifact model", 100, round=1),  # overtaken by the later one
        model(2, "artifact model", 7),
    )
    node = fake.node(nodes=4, params=np.zeros(2, np.float32), train=plus_one)
    fake.run(ArtifactSWIFT(rounds=2, degree=2).run(node))
    assert node.params.tolist() == [5, 5]  # (0 + 1 + 4 + 7)/3, then one step; no new model arrives
    receivers = [to for to, _ in fake.sent]  # of the first round; the run ends before the models of the second leave
    assert len(set(receivers)) == 2
    assert 0 not in receivers
    assert [message.payload.arrays["params"].tolist() for _, message in fake.sent] == [[1, 1], [1, 1]]


def test_a_request_is_answered_with_the_current_model_and_averaged() -> None:
    fake = FakeRuntime(model(1, "answer", 5)).deliver(model(2, "request", 9), at=0.5)
    node = fake.node(nodes=3, params=np.zeros(2, np.float32), train=plus_one)
    fake.run(ArtifactADPSGD(rounds=2, degree=6).run(node))
    assert node.params.tolist() == [6, 6]  # (0 + 1 + 5 + 9)/3, then one step
    answers = [(to, message.payload.arrays["params"].tolist()) for to, message in fake.sent if message.kind == "answer"]
    assert answers == [(2, [0, 0])]
    requests = [to for to, message in fake.sent if message.kind == "request"]
    assert len(requests) == 3
    assert set(requests) <= {1, 2}


@pytest.mark.parametrize("algorithm", [ArtifactADPSGD(6, degree=4), ArtifactSWIFT(6, degree=2)])
def test_waiting_models_are_never_dropped_and_leave_in_order(algorithm: Any) -> None:
    fake = FakeRuntime()
    fake.transmission = 1.2
    node = fake.node(nodes=4, params=np.zeros(2, np.float32), train=plus_one)
    fake.run(algorithm.run(node))
    assert [message.round for _, message in fake.sent] == [0, 0, 1, 1]
    waiting = [round for _, _, round, _ in node.algorithm_state["waiting"]]
    assert waiting == [2, 3, 3, 4, 4, 5, 5]  # twelve were queued, four are sent, and one is leaving


def test_a_restored_node_sends_the_waiting_models() -> None:
    fake = FakeRuntime()
    fake.transmission = 10.0
    first = fake.node(nodes=4, params=np.zeros(2, np.float32), train=plus_one)
    fake.run(ArtifactSWIFT(2, degree=2).run(first))
    again = FakeRuntime()
    second = again.node(nodes=4, params=np.zeros(2, np.float32), train=plus_one)
    second.restore(first.state())
    again.run(ArtifactSWIFT(3, degree=2).run(second))
    assert [message.round for _, message in again.sent] == [0, 1, 1]  # the other model of round 0 was leaving


def test_models_of_another_size_are_rejected() -> None:
    bad = Message(1, "artifact model", 0, Payload({"params": np.ones(3, np.float32)}))
    fake = FakeRuntime(bad)
    node = fake.node(nodes=3, params=np.zeros(2, np.float32), train=plus_one)
    fake.run(ArtifactSWIFT(1, degree=2).run(node))
    assert (node.rejected_count, node.params.tolist()) == (1, [1, 1])


@pytest.mark.parametrize("engine", ["simulation", "processes"])
@pytest.mark.parametrize("algorithm", ["adpsgd-artifact", "swift-artifact"])
def test_nodes_learn(algorithm: str, engine: str, tmp_path: Path) -> None:
    run = Experiment(
        nodes=4,
        engine=engine,
        algorithm={"name": algorithm, "rounds": 30, "degree": 2},
        training={"lr": 0.1, "local_steps": 4},
        model={"name": "logistic"},
        evaluation={"every": 0},
    ).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["accuracy"]["mean"] > 0.7
    assert run.summary["messages_sent"] > 0
