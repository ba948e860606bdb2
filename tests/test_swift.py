"""SWIFT: x ← Wx̂ + u with the last models received, without waiting; and its weights on any graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import Shoal, agrees, experiment, survives_a_crash, survives_a_hang
from shoal.algorithms.support.communication_coefficients import communication_coefficients as coefficients
from shoal.algorithms.swift import BROADCAST, SWIFT
from shoal.errors import ExperimentError
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.testing import FakeRuntime
from shoal.topologies.static import Full, Ring, Star, undirected
from unsteady import Unsteady

F = np.float32
IRREGULAR = {"name": "edges", "edges": ((0, 1), (0, 2), (0, 3), (1, 2), (3, 4), (4, 5), (5, 6), (6, 7), (7, 3), (5, 0))}


def matrix(graph: Any) -> Any:
    """W: row i holds the weights of node i, its own on the diagonal."""
    w = np.zeros((graph.nodes, graph.nodes))
    for node, weights in enumerate(coefficients(graph)):
        w[node, list(weights)] = list(weights.values())
    return w + np.diag(1 - w.sum(1))


# The update rule


@pytest.mark.parametrize(("skipped", "queue"), [(0, "latest"), (1, "latest"), (2, "latest"), (0, "all")])
def test_models_follow_the_paper(skipped: int, queue: Any, tmp_path: Path) -> None:
    network = {"name": "uniform", "latency": 1e-4}  # messages of a round arrive in the same round
    described = experiment(SWIFT(6, skipped, queue), IRREGULAR, network=network)
    shoal = Shoal(described)
    w, x = matrix(shoal.setup.mixing.graph), shoal.start
    for r in range(6):
        x = (w if (r + 1) % (skipped + 1) == 0 else np.eye(8)) @ x + shoal.steps(x)
    run = agrees(described, x, tmp_path)
    assert run.summary["messages_sent"] == (6 + 1) * 2 * len(IRREGULAR["edges"])


def model(sender: int, value: float, round: int = 0) -> Message:
    return Message(sender, BROADCAST, round, Payload({"params": F([value, value])}))


def run(fake: FakeRuntime, algorithm: SWIFT, **settings: Any) -> Node:
    """Run node 0 of a ring of five. Its neighbours are 1 and 4; all weights are one third."""
    node = fake.node(nodes=5, params=F([3, 3]), train=lambda params: params + 100, **settings)
    fake.run(algorithm.run(node))
    return node


def test_last_model_of_each_neighbour_counts_and_at_first_the_initial_model() -> None:
    fake = FakeRuntime().deliver(model(1, 9), at=0.5).deliver(model(4, 12), at=1.5)
    np.testing.assert_allclose(run(fake, SWIFT(1)).params, (3 + 9 + 3) / 3 + 100)
    fake = FakeRuntime().deliver(model(1, 9), at=0.5).deliver(model(4, 12), at=1.5)
    np.testing.assert_allclose(run(fake, SWIFT(2)).params, (105 + 9 + 12) / 3 + 100)


def test_models_received_in_skipped_iterations_count_in_the_next_average() -> None:
    fake = FakeRuntime().deliver(model(1, 9), at=0.5).deliver(model(4, 12), at=1.5)
    np.testing.assert_allclose(run(fake, SWIFT(2, skipped=1)).params, (103 + 9 + 12) / 3 + 100)


def test_overtaken_model_is_ignored() -> None:
    fake = FakeRuntime(model(1, 9, round=5), model(1, 60, round=4))
    np.testing.assert_allclose(run(fake, SWIFT(1)).params, (3 + 9 + 3) / 3 + 100)


def test_weight_of_a_failed_neighbour_stays_with_the_node() -> None:
    fake = FakeRuntime(model(1, 9), model(4, 12)).mark_failed(4, at=0.5)
    np.testing.assert_allclose(run(fake, SWIFT(1)).params, (3 + 9 + 3) / 3 + 100)


def test_node_never_waits() -> None:
    fake = FakeRuntime()
    fake.transmission = 50.0
    assert run(fake, SWIFT(7)).now() == 7.0


@pytest.mark.parametrize(
    "message",
    [
        model(2, 9),
        Message(1, BROADCAST, 0, Payload({})),
        Message(1, BROADCAST, 0, Payload({"params": F([9])})),
        Message(1, BROADCAST, 0, Payload({"params": F([9, np.nan])})),
        Message(1, BROADCAST, 0, Payload({"params": np.array([9.0, 9.0])})),
    ],
    ids=["not from a neighbour", "nothing", "too short", "not finite", "of another type"],
)
def test_invalid_models_are_rejected_and_counted(message: Message) -> None:
    node = run(FakeRuntime(message), SWIFT(1))
    assert node.rejected_count == 1
    assert node.params.tolist() == [103, 103]


def test_received_models_are_part_of_the_state() -> None:
    saved = run(FakeRuntime(model(1, 9), model(4, 12)), SWIFT(1))
    restored = FakeRuntime()
    node = restored.node(nodes=5, params=F([0, 0]), train=lambda params: params + 100)
    node.restore(saved.state())
    restored.run(SWIFT(2).run(node))
    np.testing.assert_allclose(node.params, (108 + 9 + 12) / 3 + 100)


# Sent messages


def rounds_sent(fake: FakeRuntime, to: int) -> list[tuple[float, int]]:
    """The time at which each message to a peer was sent completely, and its round."""
    sent = zip(fake.sent_at, fake.sent, strict=True)
    return [(at, message.round) for at, (peer, message) in sent if peer == to]


def test_waiting_model_is_replaced_by_the_next() -> None:
    fake = FakeRuntime()
    fake.transmission = 2.5
    run(fake, SWIFT(9))
    expected = [(2.5, 0), (5.0, 2), (7.5, 4), (9.0, 9)]  # the final model is sent at once
    assert rounds_sent(fake, 1) == rounds_sent(fake, 4) == expected


def test_queue_all_sends_every_model() -> None:
    fake = FakeRuntime()
    fake.transmission = 2.5
    run(fake, SWIFT(9, queue="all"))
    assert rounds_sent(fake, 1) == [(float(r), r) for r in range(10)]


def test_queue_latest_learns_better_on_slow_links(tmp_path: Path) -> None:
    slow = {"name": "uniform", "upload": 0.36}
    runs = [experiment(SWIFT(60, queue=queue), network=slow, nodes=6).run(tmp_path) for queue in ("latest", "all")]
    latest, all_models = (done.summary for done in runs)
    assert latest["messages_sent"] < 0.7 * all_models["messages_sent"]
    assert latest["loss"]["mean"] < 0.95 * all_models["loss"]["mean"]


# The weights


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    nodes = draw(st.integers(2, 12))
    tree = [(draw(st.integers(0, node - 1)), node) for node in range(1, nodes)]
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    return undirected(nodes, {*tree, *draw(st.lists(st.sampled_from(pairs), max_size=3 * nodes))})


def by_the_paper(graph: Any) -> Any:
    """The paper's rule alone, on matrices, in descending order of degree."""
    n = graph.nodes
    linked = np.zeros((n, n))
    for node in range(n):
        linked[node, list(graph.links(node, 0).senders)] = 1
    degrees, w = linked.sum(1), np.zeros((n, n))
    for degree in sorted(set(degrees), reverse=True):
        ours = degrees == degree
        rest = linked * (degrees <= degree)
        offers = (1 - w.sum(1)) / (rest.sum(1) + 1)
        w += np.outer(ours, ours) * linked * np.minimum.outer(offers, offers)
        below = np.outer(ours * offers, degrees < degree) * linked
        w += below + below.T
    return w + np.diag(1 - w.sum(1))


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_weights_are_symmetric_and_sum_to_one_with_a_positive_own_weight(graph: Any) -> None:
    w = matrix(graph)
    linked = {(node, peer) for node in range(graph.nodes) for peer in graph.links(node, 0).senders}
    assert (w == w.T)[~np.eye(len(w), dtype=bool)].all()
    np.testing.assert_allclose(w.sum(0), 1)
    np.testing.assert_allclose(w.sum(1), 1)
    assert w.diagonal().min() > 1 / graph.nodes - 1e-9
    assert {(i, j) for i, j in np.argwhere(w > 0).tolist() if i != j} == linked
    assert list(coefficients(graph)[0]) == sorted(coefficients(graph)[0])


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_weights_are_those_of_the_paper_if_its_rule_keeps_own_weights_positive(graph: Any) -> None:
    expected = by_the_paper(graph)
    if expected.diagonal().min() > 1 / graph.nodes + 1e-9:
        np.testing.assert_allclose(matrix(graph), expected, atol=1e-12)


def test_weights_are_equal_on_regular_graphs() -> None:
    for graph, degree in ((Ring().build(7, 0), 2), (Full().build(6, 0), 5)):
        assert all(weight == 1 / (degree + 1) for weights in coefficients(graph) for weight in weights.values())


def test_nodes_of_highest_degree_offer_first() -> None:
    star = coefficients(Star().build(5, 0))
    assert star == [dict.fromkeys((1, 2, 3, 4), 0.2), *[{0: 0.2}] * 4]
    # 0 has degree 4 and offers 1/5; then 1 has degree 3, offers (1 − 1/5)/3 to 5 and 6, which get no other offer
    chain = coefficients(undirected(7, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (1, 6)]))
    assert chain[1] == pytest.approx({0: 1 / 5, 5: 4 / 15, 6: 4 / 15})


def test_smaller_offer_counts_between_equal_degrees() -> None:
    # 1 and 2 have degree 2; 1 has a quarter from 0 and could offer 3/8, 2 has nothing and offers 1/3
    graph = undirected(6, [(0, 1), (0, 4), (0, 5), (1, 2), (2, 3)])
    assert coefficients(graph)[1] == pytest.approx({0: 1 / 4, 2: 1 / 3})
    assert coefficients(graph)[2] == pytest.approx({1: 1 / 3, 3: 1 / 3})


def test_node_accepts_less_if_offers_exceed_one() -> None:
    # Node 0 has three neighbours of degree 4, whose others have degree 12 and offer them little: they offer about half.
    hubs, given = range(4, 7), range(1, 4)
    edges = [(0, k) for k in given] + [(k, hub) for k in given for hub in hubs]
    edges += [(hub, 7 + 9 * i + leaf) for i, hub in enumerate(hubs) for leaf in range(9)]
    graph = undirected(7 + 27, edges)
    assert by_the_paper(graph)[0, 0] < 0, "the paper's rule alone gives a negative own weight"
    assert coefficients(graph)[0] == dict.fromkeys(given, 0.25)
    assert matrix(graph).diagonal().min() >= 1 / graph.nodes


# Random schedules


@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(0, 2), st.sampled_from(["latest", "all"]))
@settings(max_examples=20, deadline=None)
def test_models_agree_without_training_despite_a_failure(seed: int, nodes: int, skipped: int, queue: Any) -> None:
    models = np.random.default_rng(seed).normal(size=(nodes, 4)).astype(F)
    world: dict[str, Any] = {"models": models, "topology": Full(), "train": lambda _, params: params, "loss": 0.1}
    unsteady = Unsteady(seed, nodes, SWIFT(100, skipped, queue), **world)
    unsteady.fail(0, at=10.0)
    ends = np.stack([node.params for node in unsteady.run()])
    assert len(ends) == nodes - 1
    assert np.ptp(ends, axis=0).max() < 1e-3
    assert (ends.min(0) >= models.min(0) - 1e-4).all()
    assert (ends.max(0) <= models.max(0) + 1e-4).all()


# Complete runs


def test_nodes_learn_in_both_engines(tmp_path: Path) -> None:
    training = {"lr": 0.2, "batch_size": 16, "local_steps": 10}
    described = experiment(SWIFT(20), nodes=4, partition={"name": "iid"}, training=training)
    before = Setup(described).evaluate(Setup(described).initial)
    for engine in ("simulation", "processes"):
        done = dataclasses.replace(described, engine=engine).run(tmp_path)  # type: ignore[arg-type]
        assert done.summary["status"] == "completed"
        assert done.summary["rounds"] == 20
        assert done.summary["loss"]["mean"] < 0.8 * before["loss"]  # without waiting, some nodes may receive little


def test_run_is_reproducible_and_accurate(tmp_path: Path) -> None:
    graph, network, partition = {"name": "regular", "degree": 3}, {"name": "uniform"}, {"name": "iid"}
    described = experiment(SWIFT(60), graph, network=network, partition=partition)
    runs = [described.run(tmp_path) for _ in range(2)]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["accuracy"]["mean"] > 0.88
    assert not runs[0].summary["events"]


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(SWIFT(40)), tmp_path)


def test_survivors_of_a_hang_learn(tmp_path: Path) -> None:
    # Its neighbours average with the last model of the node that hangs until the end, D-PSGD's neighbours without it.
    survives_a_hang(experiment(SWIFT(40)), tmp_path, factor=1.75)


def test_single_node_trains_alone(tmp_path: Path) -> None:
    assert experiment(SWIFT(3), "ring", nodes=1).run(tmp_path).summary["status"] == "completed"


@pytest.mark.parametrize(
    "topology",
    ["one-peer-exponential", "gossip-sampler", "peer-sampler", {"name": "regular", "degree": 3, "dynamic": True}],
    ids=str,
)
def test_dynamic_and_directed_graphs_are_rejected(topology: Any) -> None:
    with pytest.raises(ExperimentError, match="needs an undirected graph that does not change"):
        experiment(SWIFT(), topology)


@pytest.mark.parametrize("parameters", [{"rounds": 0}, {"skipped": -1}, {"queue": "some"}], ids=str)
def test_invalid_options_are_rejected_before_the_run_starts(parameters: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=f"algorithm.{next(iter(parameters))} = "):
        experiment({"name": "swift", **parameters})
