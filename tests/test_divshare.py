"""DivShare: fragments to random nodes while the next model is trained, and averages of received fragments."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import experiment, survives_a_crash
from shoal.algorithms.divshare import DivShare
from shoal.algorithms.support.fragments import Fragments, cut
from shoal.engines.simulation.engine import World
from shoal.errors import ExperimentError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.testing import FakeRuntime
from shoal.topologies.static import Full, Ring

SHAPES = ((3, 7), (7,), (2,))
SIZE = 30
FRAGMENTS: Fragments = cut(SHAPES, 4, 0)
QUARTERS = 0.25


def model(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def fragment(sender: int, number: int, params: Any, round: int = 0) -> Message:
    return Message(sender, "fragment", round, FRAGMENTS.payload(params, number))


def make(fake: FakeRuntime, nodes: int = 9, **given: Any) -> Node:
    return fake.node(nodes=nodes, params=model(0), shapes=SHAPES, **given)


def reference(own: Any, received: list[tuple[int, Any]]) -> Any:
    """(x[p] + Σ v[p]) / (1 + number of values of p), parameter by parameter."""
    result = np.empty(SIZE)
    for p in range(SIZE):
        covering = [float(params[p]) for number, params in received if p in FRAGMENTS.positions[number]]
        result[p] = (float(own[p]) + sum(covering)) / (1 + len(covering))
    return result


# Received fragments


@settings(max_examples=25)
@given(st.sets(st.tuples(st.integers(1, 8), st.integers(0, 3)), max_size=20))
def test_each_parameter_is_averaged_with_the_fragments_that_cover_it(pairs: set[tuple[int, int]]) -> None:
    fake = FakeRuntime(*(fragment(sender, number, model(sender)) for sender, number in pairs))
    node = make(fake, train=lambda params: params + 1)
    fake.run(DivShare(1, QUARTERS).run(node))
    expected = reference(model(0) + 1, [(number, model(sender)) for sender, number in pairs])
    np.testing.assert_allclose(node.params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "overtaken"])
def test_a_newer_copy_replaces_the_older(order: int) -> None:
    copies = [fragment(1, 2, model(11), round=3), fragment(1, 2, model(12), round=4)][::order]
    fake = FakeRuntime(*copies, fragment(2, 2, model(13), round=0), fragment(1, 3, model(14), round=3))
    node = make(fake)
    fake.run(DivShare(1, QUARTERS).run(node))
    np.testing.assert_allclose(
        node.params, reference(model(0), [(2, model(12)), (2, model(13)), (3, model(14))]), rtol=1e-5, atol=1e-6
    )


def test_fragment_counts_once_in_the_round_in_which_it_has_arrived() -> None:
    fake = FakeRuntime().deliver(fragment(1, 0, model(1)), at=1.5)
    node = make(fake)
    fake.run(DivShare(1, QUARTERS).run(node))
    assert np.array_equal(node.params, model(0))

    fake = FakeRuntime().deliver(fragment(1, 0, model(1)), at=1.5)
    node = make(fake)
    fake.run(DivShare(3, QUARTERS).run(node))
    np.testing.assert_allclose(node.params, reference(model(0), [(0, model(1))]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({}, np.zeros(8, np.float32)),
        ({"fragment": 4}, np.zeros(8, np.float32)),
        ({"fragment": -1}, np.zeros(8, np.float32)),
        ({"fragment": "0"}, np.zeros(8, np.float32)),
        ({"fragment": 0}, np.zeros(3, np.float32)),
        ({"fragment": 0}, FRAGMENTS.payload(model(1).astype(np.float64), 0).arrays["values"]),
        ({"fragment": 0}, FRAGMENTS.payload(model(1) * np.float32(np.inf), 0).arrays["values"]),
    ],
)
def test_invalid_fragment_is_rejected_and_counted(fields: Any, values: Any) -> None:
    fake = FakeRuntime(Message(1, "fragment", 0, Payload({"values": values}, fields)), fragment(2, 1, model(2)))
    node = make(fake)
    fake.run(DivShare(1, QUARTERS).run(node))
    assert node.rejected_count == 1
    np.testing.assert_allclose(node.params, reference(model(0), [(1, model(2))]), rtol=1e-5, atol=1e-6)


# Sent fragments


def sent_in(fake: FakeRuntime, round: int) -> list[tuple[int, int]]:
    return [(to, int(m.payload.fields["fragment"])) for to, m in fake.sent if m.round == round]


def test_model_is_sent_after_training_and_before_averaging() -> None:
    fake = FakeRuntime(*(fragment(1, number, model(1)) for number in range(4)))
    node = make(fake, train=lambda params: params + 1)
    fake.run(DivShare(2, QUARTERS).run(node))
    assembled = np.full(SIZE, np.nan, np.float32)
    for _, message in fake.sent:
        if message.round == 0:
            assembled[FRAGMENTS.positions[int(message.payload.fields["fragment"])]] = message.payload.arrays["values"]
    assert np.array_equal(assembled, model(0) + 1)


def test_message_carries_only_a_number_and_values() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, QUARTERS).run(make(fake)))
    assert fake.sent
    for _, message in fake.sent:
        assert (list(message.payload.arrays), list(message.payload.fields)) == (["values"], ["fragment"])


@pytest.mark.parametrize(("nodes", "expected"), [(2, 1), (3, 2), (8, 3), (9, 4), (60, 6), (64, 6), (65, 7)])
def test_each_fragment_goes_to_log2_n_distinct_nodes(nodes: int, expected: int) -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, QUARTERS).run(make(fake, nodes, id=1)))
    pairs = sent_in(fake, 0)
    assert len(set(pairs)) == len(pairs)
    assert Counter(number for _, number in pairs) == dict.fromkeys(range(4), expected)
    assert {to for to, _ in pairs} <= set(range(nodes)) - {1}


def test_receivers_of_fragments_are_independent_and_uniform_and_order_is_random() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(200, QUARTERS, degree=3).run(make(fake, 9, id=4)))
    rounds = [sent_in(fake, r) for r in range(199)]
    drawn = Counter(to for pairs in rounds for to, _ in pairs)
    first = Counter(pairs[0][1] for pairs in rounds)
    equal = sum(
        {to for to, number in pairs if number == 0} == {to for to, number in pairs if number == 1} for pairs in rounds
    )
    assert drawn.keys() == set(range(9)) - {4}
    for count in drawn.values():  # 298.5 of 2388; a standard deviation is below 16
        assert 230 < count < 370
    for number in range(4):  # 50 of 199; a standard deviation is 6
        assert 20 < first[number] < 85
    assert equal < 20  # one in 56


def test_fragments_without_parameters_are_not_sent() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, fraction=0.001, degree=2).run(fake.node(nodes=5, params=np.zeros(7, np.float32))))
    sizes = [m.payload.arrays["values"].size for _, m in fake.sent if m.round == 0]
    assert sizes == [1] * 14


def test_receivers_of_a_fragment_share_one_payload() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, QUARTERS, degree=5).run(make(fake)))
    buffers = defaultdict(set)
    for _, message in fake.sent:
        buffers[message.round, message.payload.fields["fragment"]].add(id(message.payload.arrays["values"]))
    assert {len(ids) for ids in buffers.values()} == {1}


@given(st.integers(1, 10_000))
def test_fraction_of_one_in_k_gives_k_fragments(k: int) -> None:
    assert DivShare(fraction=1 / k).fragments == k


@pytest.mark.parametrize(("fraction", "k"), [(1.0, 1), (0.7, 1), (0.5, 2), (0.4, 2), (0.3, 3), (0.1, 10), (0.09, 11)])
def test_number_of_fragments_is_rounded_down(fraction: float, k: int) -> None:
    assert DivShare(fraction=fraction).fragments == k


# Timing of sending


def test_unsent_fragments_are_dropped_when_the_next_model_is_trained() -> None:
    fake = FakeRuntime()
    fake.transmission = 0.3
    fake.run(DivShare(4, QUARTERS, degree=2).run(make(fake, train=lambda params: params + 1)))
    # Models are trained at 1, 2, 3 and 4 s. A fragment that has begun to leave is sent to its end.
    assert [m.round for _, m in fake.sent] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(fake.sent_at, 1 + 0.3 * np.arange(1, 11))
    for _, message in fake.sent:
        values = FRAGMENTS.payload(model(0) + message.round + 1, int(message.payload.fields["fragment"]))
        np.testing.assert_allclose(message.payload.arrays["values"], values.arrays["values"], rtol=1e-5, atol=1e-5)


def test_queue_that_ran_empty_is_filled_again() -> None:
    fake = FakeRuntime()
    fake.transmission = 0.05
    fake.run(DivShare(3, QUARTERS, degree=2).run(make(fake)))
    assert [m.round for _, m in fake.sent] == [0] * 8 + [1] * 8
    np.testing.assert_allclose(fake.sent_at[:8], 1 + 0.05 * np.arange(1, 9))
    np.testing.assert_allclose(fake.sent_at[8:], 2 + 0.05 * np.arange(1, 9))


@pytest.mark.parametrize("streams", [2, 3, 50])
def test_streams_send_several_fragments_at_a_time(streams: int) -> None:
    fake = FakeRuntime()
    fake.transmission = 0.4
    fake.run(DivShare(2, QUARTERS, degree=3, streams=streams).run(make(fake)))
    expected = {1.4: 12} if streams > 12 else {1.4: streams, 1.8: streams}
    assert Counter(np.round(fake.sent_at, 9)) == expected
    assert len(set(sent_in(fake, 0))) == len(fake.sent)


def paced(algorithm: DivShare, models: Any, seconds: dict[int, float]) -> list[Node]:
    """Run nodes that train for a second and take `seconds` for each message, and return them."""
    world = World(len(models))
    nodes = [FakeRuntime().node(id, nodes=len(models), params=params) for id, params in enumerate(models)]
    for node, runtime in zip(nodes, world.runtimes, strict=True):
        node.runtime = runtime
        _pace(runtime, seconds[node.id])
        runtime.start(algorithm.run(node))
    world.kernel.run()
    return nodes


def _pace(runtime: Any, seconds: float) -> None:
    async def send_and_wait(to: int, message: Message) -> bool:
        await runtime.sleep(seconds)
        return bool(await runtime.send(to, message))

    runtime.send_and_wait = send_and_wait


def test_slow_node_sends_a_part_of_each_model() -> None:
    seconds = {**dict.fromkeys(range(8), 0.01), 3: 0.35}
    nodes = paced(DivShare(10, 0.1, degree=2), np.zeros((8, 100), np.float32), seconds)
    sent = {node.id: node.messages_sent for node in nodes}
    assert {sent[id] for id in sent if id != 3} == {9 * 20}
    assert sent[3] == 25  # in nine seconds, one after another


def test_whole_models_to_all_nodes_give_the_mean() -> None:
    models = np.random.default_rng(1).standard_normal((6, 40)).astype(np.float32)
    for node in paced(DivShare(2, fraction=1.0, degree=5), models, dict.fromkeys(range(6), 0.001)):
        np.testing.assert_allclose(node.params, models.mean(0), atol=1e-6)


def test_fragments_to_a_few_nodes_lead_to_consensus() -> None:
    models = np.random.default_rng(1).standard_normal((10, 40)).astype(np.float32)
    ends = np.stack([n.params for n in paced(DivShare(25, 0.2), models, dict.fromkeys(range(10), 0.001))])
    assert np.ptp(ends, axis=0).max() < 1e-3
    assert (ends > models.min(0) - 1e-5).all()
    assert (ends < models.max(0) + 1e-5).all()


# Receivers


def test_failed_nodes_are_not_sent_fragments() -> None:
    fake = FakeRuntime().mark_failed(1, 2, 3, at=2.5)
    fake.run(DivShare(4, QUARTERS, degree=7).run(make(fake)))
    assert {to for to, _ in sent_in(fake, 1)} == set(range(1, 9))
    assert Counter(number for _, number in sent_in(fake, 2)) == dict.fromkeys(range(4), 5)
    assert {to for to, _ in sent_in(fake, 2)} == set(range(4, 9))


def test_last_remaining_node_continues() -> None:
    fake = FakeRuntime().mark_failed(1)
    node = make(fake, 2, train=lambda params: params + 1)
    fake.run(DivShare(2, QUARTERS).run(node))
    assert fake.sent == []
    np.testing.assert_allclose(node.params, model(0) + 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("peers", "expected"), [("neighbours", {3, 5}), ("all", {*range(9)} - {4})])
def test_receivers_come_from_all_nodes_or_from_neighbours(peers: Any, expected: set[int]) -> None:
    fake = FakeRuntime()
    fake.run(DivShare(20, QUARTERS, degree=3, peers=peers).run(make(fake, id=4, topology=Ring())))
    assert {to for to, _ in fake.sent} == expected
    assert {len(sent_in(fake, r)) for r in range(19)} == {4 * min(3, len(expected))}


def test_neighbours_on_a_full_graph_are_all_others() -> None:
    fakes = [FakeRuntime(), FakeRuntime()]
    for fake, peers in zip(fakes, ("all", "neighbours"), strict=True):
        fake.run(DivShare(3, QUARTERS, peers=peers).run(make(fake, id=4, topology=Full())))  # type: ignore[arg-type]
    assert [to for to, _ in fakes[0].sent] == [to for to, _ in fakes[1].sent]


# State


@pytest.mark.parametrize("unsent", [8, 3, 0])
def test_restored_node_sends_the_unsent_fragments(unsent: int) -> None:
    first, rest = FakeRuntime(), FakeRuntime()
    first.transmission = 5.0
    node = make(first, train=lambda params: params + 1)
    first.run(DivShare(2, QUARTERS, degree=2).run(node))
    state = node.state()
    assert state["algorithm"]["unsent"] == 8  # the last fragment of the first round is still being sent

    again = make(rest, train=lambda params: params + 1)
    again.restore({**state, "algorithm": {**state["algorithm"], "unsent": unsent}})
    rest.run(DivShare(3, QUARTERS, degree=2).run(again))
    pairs = state["algorithm"]["outgoing"]["pairs"].tolist()
    assert [list(pair) for pair in sent_in(rest, 1)] == pairs[8 - unsent :]
    for _, message in rest.sent:
        expected = FRAGMENTS.payload(model(0) + 1 + message.round, int(message.payload.fields["fragment"]))
        np.testing.assert_allclose(message.payload.arrays["values"], expected.arrays["values"], rtol=1e-5, atol=1e-5)


def test_state_holds_the_number_of_waiting_fragments() -> None:
    fake = FakeRuntime()
    waiting: list[int] = []

    def train(params: Any) -> Any:
        waiting.append(node.algorithm_state.get("unsent", 0))
        return params

    node = make(fake, train=train)
    fake.transmission = 0.3
    fake.run(DivShare(3, QUARTERS, degree=2).run(node))
    assert waiting == [0, 8 - 4, 8 - 3]


# Complete runs


def test_nodes_learn_and_the_same_seed_gives_the_same_models(tmp_path: Path) -> None:
    described = experiment(DivShare(50), network={"name": "uniform", "latency": 0.001})
    run, again = described.run(tmp_path), described.run(tmp_path)
    assert run.summary["digest"] == again.summary["digest"]
    assert run.summary["accuracy"]["mean"] > 0.8
    assert run.summary["messages_rejected"] == 0


def test_fewer_fragments_are_sent_on_a_slow_network(tmp_path: Path) -> None:
    fast = experiment(DivShare(10), network={"name": "uniform", "upload": 1000.0}).run(tmp_path)
    slow = experiment(DivShare(10), network={"name": "uniform", "upload": 0.05}).run(tmp_path)
    assert 0 < slow.summary["messages_sent"] < fast.summary["messages_sent"] <= 8 * 10 * 10 * 3


def test_processes_learn(tmp_path: Path) -> None:
    # No node waits for another: on a busy machine some may receive little.
    described = experiment(DivShare(60), nodes=4, engine="processes", partition={"name": "iid"})
    run = described.run(tmp_path)
    assert run.status == "completed"
    assert run.summary["messages_rejected"] == 0
    assert 0 < run.summary["messages_sent"] <= 4 * 60 * 10 * 2
    assert run.summary["accuracy"]["mean"] > 0.7


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(DivShare(30)), tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "more", "problem"),
    [
        (
            {"degree": 8},
            {},
            r"algorithm.degree = 8: each of 8 nodes .* at most 7 others; use a smaller degree",
        ),
        ({"degree": 0}, {}, "algorithm.degree = 0"),
        ({"fraction": 0.0}, {}, "algorithm.fraction = 0.0"),
        ({"fraction": 1.5}, {}, "algorithm.fraction = 1.5"),
        ({"streams": 0}, {}, "algorithm.streams = 0"),
        ({"peers": "some"}, {}, "algorithm.peers = 'some'"),
        ({}, {"sharing": {"name": "topk"}}, "sharing = 'topk': 'divshare' builds its own payloads"),
    ],
)
def test_invalid_options_are_rejected_before_the_run_starts(algorithm: Any, more: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "divshare", **algorithm}, **more)


def test_degree_above_the_number_of_neighbours_is_allowed() -> None:
    experiment(DivShare(degree=8, peers="neighbours"))
