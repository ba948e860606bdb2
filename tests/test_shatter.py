"""Shatter: each chunk of the model is averaged over its own random regular graph, a new one in every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import (
    STEPS,
    Shoal,
    agrees,
    altered,
    experiment,
    play,
    same_in_both_engines,
    survives_a_crash,
    survives_a_hang,
)
from shoal.algorithms.shatter import Shatter
from shoal.algorithms.support.fragments import cut
from shoal.errors import ExperimentError
from shoal.message import Message
from shoal.results.records import Round
from shoal.testing import FakeRuntime, Faults
from shoal.topologies.regular import Regular
from shoal.topologies.static import Ring

ROUNDS, CHUNKS, DEGREE = 4, 3, 3
LOGISTIC = ((10, 64), (10,))


def models(nodes: int, size: int = 50) -> Any:
    return np.random.default_rng(2).standard_normal((nodes, size)).astype(np.float32)


def test_each_chunk_follows_the_mixing_matrix_of_its_own_graph(tmp_path: Path) -> None:
    described = experiment(Shatter(ROUNDS, CHUNKS, DEGREE))
    shoal = Shoal(described)
    graph = Regular(DEGREE, dynamic=True).build(8, described.seed)
    positions = cut(LOGISTIC, CHUNKS, described.seed).positions
    x = shoal.start
    for r in range(ROUNDS):
        x = x + shoal.steps(x)
        for c in range(CHUNKS):
            x[:, positions[c]] = shoal.metropolis(CHUNKS * r + c, graph) @ x[:, positions[c]]
    run = agrees(described, x, tmp_path)
    assert run.summary["messages_sent"] == 8 * DEGREE * CHUNKS * ROUNDS
    assert not np.array_equal(shoal.adjacency(0, graph), shoal.adjacency(1, graph))


@pytest.mark.parametrize(("nodes", "chunks", "degree"), [(7, 5, 4), (10, 3, 1), (2, 4, 1), (6, 60, 5)])
def test_mean_of_every_parameter_is_kept(nodes: int, chunks: int, degree: int) -> None:
    before = models(nodes)
    after = np.stack([node.params for node in play(Shatter(3, chunks, degree), before, Ring())])
    np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-6)
    assert np.std(after, axis=0).mean() < 0.6 * np.std(before, axis=0).mean()


def test_no_node_receives_a_whole_model_from_one_sender() -> None:
    chunks_sent: dict[tuple[int, int, int], set[int]] = {}

    def tamper(to: int, message: Message) -> Message:
        chunk = message.payload.fields["fragment"]
        assert message.kind == f"chunk {chunk}"
        chunks_sent.setdefault((message.round, message.sender, to), set()).add(chunk)
        return message

    play(Shatter(3, 8, 2), models(12), Ring(), tamper=tamper)
    assert sum(map(len, chunks_sent.values())) == 3 * 12 * 8 * 2
    assert max(map(len, chunks_sent.values())) < 8


def test_missing_chunk_is_left_out_of_the_average() -> None:
    fake = FakeRuntime().mark_failed(1)
    chunks = cut(((6,),), 2, 0)
    for c, value in ((0, 4.0), (1, 10.0)):
        fake.deliver(Message(2, f"chunk {c}", 0, chunks.payload(np.full(6, value, np.float32), c)))
    node = fake.node(nodes=3, params=np.zeros(6, np.float32), train=lambda params: params + 2)
    fake.run(Shatter(1, 2, 2).run(node))
    assert node.params[chunks.positions[0]].tolist() == [3.0] * 3
    assert node.params[chunks.positions[1]].tolist() == [6.0] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"fragment": 1},
        {"fragment": "0"},
        {"values": np.zeros(2, np.float32)},
        {"values": np.zeros(3, np.float64)},
        {"values": np.full(3, np.inf, np.float32)},
    ],
    ids=str,
)
def test_invalid_chunk_is_rejected_and_counted(wrong: dict[str, Any]) -> None:
    chunks = cut(((6,),), 2, 0)
    good = {
        (sender, c): Message(sender, f"chunk {c}", 0, chunks.payload(np.full(6, 6.0, np.float32), c))
        for sender in (1, 2)
        for c in (0, 1)
    }
    good[1, 0] = altered(good[1, 0], **wrong)
    fake = FakeRuntime(*good.values())
    node = fake.node(nodes=3, params=np.zeros(6, np.float32))
    fake.run(Shatter(1, 2, 2).run(node))
    assert node.rejected_count == 1
    assert node.params[chunks.positions[0]].tolist() == [3.0] * 3
    assert node.params[chunks.positions[1]].tolist() == [4.0] * 3


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    same_in_both_engines(experiment(Shatter(3, 4, 2), nodes=5), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(Shatter(12, 4, 3)), tmp_path)


def test_survivors_of_a_hang_learn(tmp_path: Path) -> None:
    survives_a_hang(experiment(Shatter(12, 4, 3)), tmp_path)


def test_node_that_rejoins_takes_part_again_from_a_later_round(tmp_path: Path) -> None:
    faults = Faults().crash(3).at(2.5).until(4.25).schedule
    described = experiment(Shatter(8, 4, 3), speed={"step_seconds": 1 / STEPS}, fault=faults)
    run = described.run(tmp_path)
    assert run.summary["status"] == "completed"
    last = {node: [r for r in run.folder.read(node) if isinstance(r, Round)][-1] for node in range(8)}
    assert {(r.round, r.time) for r in last.values()} == {(7, 8.0)}  # no node waited for a message that was never sent


@pytest.mark.parametrize(
    ("algorithm", "more", "problem"),
    [
        ({"degree": 8}, {}, r"algorithm.degree: 8-regular on 8 nodes: .* try degree = 7"),
        ({"degree": 3}, {"nodes": 7}, r"algorithm.degree: .* an odd number of nodes needs an even degree"),
        ({"virtual_nodes": 0}, {}, "algorithm.virtual_nodes = 0"),
        ({}, {"sharing": {"name": "int8"}}, "sharing = 'int8': 'shatter' builds its own payloads"),
    ],
)
def test_invalid_options_are_rejected_before_the_run_starts(algorithm: Any, more: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "shatter", **algorithm}, **more)
