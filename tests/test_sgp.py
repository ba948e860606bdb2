"""SGP: push-sum on directed graphs, x ← P(x + u(z)), w ← Pw, z = x/w, with P column-stochastic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Shoal, agrees, altered, experiment, play, same_in_both_engines, survives_a_crash
from shoal.algorithms.sgp import SGP
from shoal.errors import ExperimentError
from shoal.message import Message, Payload
from shoal.testing import FakeRuntime
from shoal.topologies.random_out import RandomOut
from shoal.topologies.static import Full, Ring, Star

ROUNDS = 5


def column_stochastic(heard: Any) -> Any:
    """P from who hears whom: each shares what it holds alike between itself and those that hear it."""
    p = heard + np.eye(len(heard))
    return p / p.sum(0, keepdims=True)


@pytest.mark.parametrize("topology", ["one-peer-exponential", "exponential", "star", "ring", "random-out"])
def test_all_models_follow_the_matrix(topology: str, tmp_path: Path) -> None:
    described = experiment(SGP(ROUNDS), topology)
    shoal = Shoal(described)
    x, w = shoal.start, np.ones((8, 1))
    for r in range(ROUNDS):
        p = column_stochastic(shoal.adjacency(r))
        x, w = p @ (x + shoal.steps(x / w)), p @ w
    assert topology not in ("star", "random-out") or np.ptp(w) > 0.1  # weights matter
    agrees(described, x / w, tmp_path)


def test_processes_agree_with_the_simulation_to_the_bit(tmp_path: Path) -> None:
    same_in_both_engines(experiment(SGP(ROUNDS), "one-peer-exponential", nodes=5), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(SGP(15), "one-peer-exponential"), tmp_path)


@pytest.mark.parametrize("topology", [Star(), RandomOut(2)], ids=["star", "random-out"])
def test_all_find_the_exact_average_though_degrees_differ(topology: Any) -> None:
    models = np.random.default_rng(0).normal(size=(9, 4))
    ends = np.stack([node.params for node in play(SGP(80), models, topology)])
    np.testing.assert_allclose(ends, np.tile(models.mean(0), (9, 1)), atol=1e-5)


def test_sums_and_weights_of_all_are_kept_in_every_round() -> None:
    shares: dict[int, list[tuple[Any, float, int]]] = {}

    def told(to: int, message: Message) -> Message:
        said = message.payload
        shares.setdefault(message.round, []).append((said.arrays["x"], float(said.fields["w"]), message.sender))
        return message

    models = np.random.default_rng(0).normal(size=(9, 4))
    play(SGP(6), models, RandomOut(2), told=told)
    for said in shares.values():  # each of nine says its share twice, and keeps it once
        assert len(said) == 18
        assert 1.5 * sum(w for _, w, _ in said) == pytest.approx(9)
        np.testing.assert_allclose(1.5 * sum(x for x, _, _ in said), models.sum(0), atol=1e-5)


def test_nothing_is_given_to_the_dead() -> None:
    fake = FakeRuntime().lose(1)
    push = Message(2, "push", 0, Payload({"x": np.full(3, 4.0, np.float32)}, {"w": 0.5}))
    node = fake.deliver(push).node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(1).run(node))
    assert [(to, said.payload.fields["w"]) for to, said in fake.sent] == [(2, 0.5)]  # half, not a third
    assert node.params.tolist() == [(1.0 + 4.0) / (0.5 + 0.5)] * 3


def test_shares_that_are_none_are_dropped_and_counted() -> None:
    def told(to: int, message: Message) -> Message:
        x = message.payload.arrays["x"]
        broken: dict[int, dict[str, Any]] = {
            1: {"x": np.append(x, x)},
            2: {"x": np.full_like(x, np.inf)},
            3: {"w": 0.0},
            4: {"w": float("nan")},
            5: {"w": "much"},
        }
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(SGP(2), np.random.default_rng(0).normal(size=(7, 4)), Full(), told=told)
    assert [node.rejected for node in nodes] == [10, 8, 8, 8, 8, 8, 10]
    assert all(np.isfinite(node.params).all() for node in nodes)


def test_a_sharing_would_have_nothing_to_say() -> None:
    assert SGP.speaks == "itself"
    with pytest.raises(ExperimentError, match=r"algorithm.rounds = 0: expected integer at least 1"):
        experiment({"name": "sgp", "rounds": 0})
