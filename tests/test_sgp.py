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


def column_stochastic(adjacency: Any) -> Any:
    """P from the rows of senders: each node divides its sum equally between itself and its receivers."""
    p = adjacency + np.eye(len(adjacency))
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


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    same_in_both_engines(experiment(SGP(ROUNDS), "one-peer-exponential", nodes=5), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(SGP(15), "one-peer-exponential"), tmp_path)


@pytest.mark.parametrize("topology", ["one-peer-exponential", "ring", "random-out", "full"])
def test_survivors_of_a_hang_learn(topology: str, tmp_path: Path) -> None:
    """For many rounds: shares lost in every round would leave no weight at the end."""
    survives_a_hang(experiment(SGP(80), topology), tmp_path)


@pytest.mark.parametrize("topology", [Star(), RandomOut(2)], ids=["star", "random-out"])
def test_nodes_find_the_exact_average_with_unequal_degrees(topology: Any) -> None:
    models = np.random.default_rng(0).normal(size=(9, 4))
    ends = np.stack([node.params for node in play(SGP(80), models, topology)])
    np.testing.assert_allclose(ends, np.tile(models.mean(0), (9, 1)), atol=1e-5)


def test_total_sum_and_weight_are_kept_in_every_round() -> None:
    shares: dict[int, list[tuple[Any, float, int]]] = {}

    def tamper(to: int, message: Message) -> Message:
        payload = message.payload
        shares.setdefault(message.round, []).append((payload.arrays["x"], float(payload.fields["w"]), message.sender))
        return message

    models = np.random.default_rng(0).normal(size=(9, 4))
    play(SGP(6), models, RandomOut(2), tamper=tamper)
    for sent in shares.values():  # each of nine nodes sends its share twice, and keeps it once
        assert len(sent) == 18
        assert 1.5 * sum(w for _, w, _ in sent) == pytest.approx(9)
        np.testing.assert_allclose(1.5 * sum(x for x, _, _ in sent), models.sum(0), atol=1e-5)


def test_failed_peer_gets_no_share() -> None:
    fake = FakeRuntime().mark_failed(1)
    push = Message(2, "push", 0, Payload({"x": np.full(3, 4.0, np.float32)}, {"w": 0.5}))
    node = fake.deliver(push).node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(1).run(node))
    assert [(to, message.payload.fields["w"]) for to, message in fake.sent] == [(2, 0.5)]  # half, not a third
    assert node.params.tolist() == [(1.0 + 4.0) / (0.5 + 0.5)] * 3


def pushed(sender: int, round: int, w: float = 0.5, reports: Any = None) -> Message:
    arrays = {"x": np.full(3, 4.0, np.float32)} if w else {}
    reported = {} if reports is None else {"silence": np.array(reports, np.int32)}
    return Message(sender, "push", round, Payload({**arrays, **reported}, {"w": w}))


def shares(fake: FakeRuntime, to: int) -> list[float]:
    return [float(message.payload.fields["w"]) for peer, message in fake.sent if peer == to]


def test_peer_that_timed_out_gets_no_share_until_it_sends_again() -> None:
    fake = FakeRuntime(*[pushed(2, r) for r in range(5)]).deliver(pushed(1, 3), pushed(1, 4), at=0.5)
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring(), receive_timeout=1.0)
    fake.run(SGP(5).run(node))
    assert [w > 0 for w in shares(fake, 1)] == [True, False, False, False, True]
    assert all(w > 0 for w in shares(fake, 2))
    assert [message.payload.arrays["silence"].tolist() for _, message in fake.sent[2::2]] == [
        [[1, 0, 1]], [[1, 1, 1]], [[1, 2, 1]], [[1, 3, 0]]
    ]  # fmt: skip


def test_reported_peer_gets_no_share_and_a_reported_node_sends_none() -> None:
    fake = FakeRuntime(pushed(1, 0), pushed(2, 0, reports=[[1, 0, 1]]), pushed(1, 1, reports=[[0, 1, 1]]), pushed(2, 1))
    for message in (pushed(1, 2), pushed(2, 2)):
        fake.deliver(message)
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(3).run(node))
    assert [w > 0 for w in shares(fake, 1)] == [
        True,
        False,
        False,
    ]  # one node received it in round 0, another did not
    assert [w > 0 for w in shares(fake, 2)] == [True, True, False]


@pytest.mark.parametrize(("newer", "sends"), [(0, True), (1, False)])
@pytest.mark.parametrize("senders", [(1, 2), (2, 1)])
def test_older_report_does_not_replace_a_newer_one(newer: int, sends: bool, senders: tuple[int, int]) -> None:
    """Reports about the node itself, which it cannot correct by receiving a message."""
    one, other = senders
    fake = FakeRuntime(pushed(1, 0), pushed(2, 0), pushed(1, 1), pushed(2, 1))
    fake.deliver(pushed(one, 2, reports=[[0, 1, newer]]), pushed(other, 2, reports=[[0, 0, 1 - newer]]))
    fake.deliver(pushed(1, 3), pushed(2, 3))
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(4).run(node))
    for peer in (1, 2):
        assert [w > 0 for w in shares(fake, peer)] == [True, True, True, sends]


def test_vanishing_weight_is_reset_and_recorded() -> None:
    fake = FakeRuntime(*[pushed(p, r, w=0.0) for p in (1, 2) for r in range(15)])
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring(), train=lambda x: x)
    fake.run(SGP(15).run(node))
    (event,) = [record for record in fake.records if isinstance(record, Event)]
    assert event.what == "weight reset"
    np.testing.assert_allclose(node.params, 2.0, rtol=1e-5)
    assert node.algorithm_state["w"] > 0.1


@pytest.mark.parametrize("reports", [[[3, 0, 1]], [[0, 9, 1]], [[0, 0, 2]], [[-1, 0, 0]], [[0, 0]], [[0, 0, 0]] * 4])
def test_invalid_timeout_reports_are_rejected(reports: Any) -> None:
    fake = FakeRuntime(pushed(1, 0, reports=reports), pushed(2, 0))
    node = fake.node(nodes=3, params=np.full(3, 2.0, np.float32), topology=Ring())
    fake.run(SGP(1).run(node))
    assert node.rejected_count == 1


def test_invalid_shares_are_rejected_and_counted() -> None:
    def tamper(to: int, message: Message) -> Message:
        x = message.payload.arrays["x"]
        broken: dict[int, dict[str, Any]] = {
            1: {"x": np.append(x, x)},
            2: {"x": np.full_like(x, np.inf)},
            3: {"w": 0.0},
            4: {"w": float("nan")},
            5: {"w": "much"},
        }
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(SGP(2), np.random.default_rng(0).normal(size=(7, 4)), Full(), tamper=tamper)
    assert [node.rejected_count for node in nodes] == [10, 8, 8, 8, 8, 8, 10]
    assert all(np.isfinite(node.params).all() for node in nodes)


def test_own_payloads_and_positive_rounds() -> None:
    assert SGP.traits.own_payloads
    with pytest.raises(ExperimentError, match=r"algorithm.rounds = 0: expected integer at least 1"):
        experiment({"name": "sgp", "rounds": 0})
