"""SGP: push-sum on directed graphs, x ← P(x + u(z)), w ← Pw, z = x/w, with P column-stochastic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Shoal, agrees, altered, experiment, play, same_in_both_engines, survives_a_crash, survives_a_hang
from shoal.algorithms.sgp import SGP
from shoal.errors import ExperimentError
from shoal.message import Message, Payload
from shoal.results.records import Event
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


@pytest.mark.parametrize("topology", ["one-peer-exponential", "ring", "random-out", "full"])
def test_survivors_of_a_hang_learn(topology: str, tmp_path: Path) -> None:
    """For long: a share that is given to nobody in every round would leave nothing in the end."""
    survives_a_hang(experiment(SGP(80), topology), tmp_path)


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
    fake = FakeRuntime().mark_failed(1)
    push = Message(2, "push", 0, Payload({"x": np.full(3, 4.0, np.float32)}, {"w": 0.5}))
    node = fake.deliver(push).node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(1).run(node))
    assert [(to, said.payload.fields["w"]) for to, said in fake.sent] == [(2, 0.5)]  # half, not a third
    assert node.params.tolist() == [(1.0 + 4.0) / (0.5 + 0.5)] * 3


def pushed(sender: int, round: int, w: float = 0.5, silence: Any = None) -> Message:
    arrays = {"x": np.full(3, 4.0, np.float32)} if w else {}
    news = {} if silence is None else {"silence": np.array(silence, np.int32)}
    return Message(sender, "push", round, Payload({**arrays, **news}, {"w": w}))


def shares(fake: FakeRuntime, to: int) -> list[float]:
    return [float(said.payload.fields["w"]) for peer, said in fake.sent if peer == to]


def test_nothing_is_given_to_the_silent_until_they_speak_again() -> None:
    fake = FakeRuntime(*[pushed(2, r) for r in range(5)]).deliver(pushed(1, 3), pushed(1, 4), at=0.5)
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring(), receive_timeout=1.0)
    fake.run(SGP(5).run(node))
    assert [w > 0 for w in shares(fake, 1)] == [True, False, False, False, True]
    assert all(w > 0 for w in shares(fake, 2))
    assert [said.payload.arrays["silence"].tolist() for _, said in fake.sent[2::2]] == [
        [[1, 0, 1]], [[1, 1, 1]], [[1, 2, 1]], [[1, 3, 0]]
    ]  # fmt: skip


def test_who_is_said_to_be_silent_gets_nothing_and_who_hears_it_of_itself_gives_nothing() -> None:
    fake = FakeRuntime(pushed(1, 0), pushed(2, 0, silence=[[1, 0, 1]]), pushed(1, 1, silence=[[0, 1, 1]]), pushed(2, 1))
    for message in (pushed(1, 2), pushed(2, 2)):
        fake.deliver(message)
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(3).run(node))
    assert [w > 0 for w in shares(fake, 1)] == [True, False, False]  # heard in round 0 by one, missed by another
    assert [w > 0 for w in shares(fake, 2)] == [True, True, False]


def test_a_weight_that_is_as_good_as_lost_is_written_down_and_begins_anew() -> None:
    fake = FakeRuntime(*[pushed(p, r, w=0.0) for p in (1, 2) for r in range(15)])
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring(), train=lambda x: x)
    fake.run(SGP(15).run(node))
    (event,) = [record for record in fake.records if isinstance(record, Event)]
    assert event.what == "weight lost"
    np.testing.assert_allclose(node.params, 2.0, rtol=1e-5)
    assert node.memory["w"] > 0.1


@pytest.mark.parametrize("silence", [[[3, 0, 1]], [[0, 9, 1]], [[0, 0, 2]], [[-1, 0, 0]], [[0, 0]], [[0, 0, 0]] * 4])
def test_news_of_silence_that_makes_no_sense_are_refused(silence: Any) -> None:
    fake = FakeRuntime(pushed(1, 0, silence=silence), pushed(2, 0))
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(1).run(node))
    assert node.rejected == 1


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
    assert SGP.traits.own_payloads
    with pytest.raises(ExperimentError, match=r"algorithm.rounds = 0: expected integer at least 1"):
        experiment({"name": "sgp", "rounds": 0})
