"""DivShare: fragments to random nodes while the next model is trained, and averages of whatever has come."""

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


def reference(own: Any, heard: list[tuple[int, Any]]) -> Any:
    """(x[p] + Σ v[p]) / (1 + how many cover p), parameter by parameter."""
    result = np.empty(SIZE)
    for p in range(SIZE):
        covering = [float(params[p]) for number, params in heard if p in FRAGMENTS.positions[number]]
        result[p] = (float(own[p]) + sum(covering)) / (1 + len(covering))
    return result


# What comes


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


def test_what_has_come_counts_once_and_in_the_round_in_which_it_is_there() -> None:
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
def test_what_is_no_fragment_is_dropped_and_counted(fields: Any, values: Any) -> None:
    fake = FakeRuntime(Message(1, "fragment", 0, Payload({"values": values}, fields)), fragment(2, 1, model(2)))
    node = make(fake)
    fake.run(DivShare(1, QUARTERS).run(node))
    assert node.rejected == 1
    np.testing.assert_allclose(node.params, reference(model(0), [(1, model(2))]), rtol=1e-5, atol=1e-6)


# What is sent


def sent_in(fake: FakeRuntime, round: int) -> list[tuple[int, int]]:
    return [(to, int(m.payload.fields["fragment"])) for to, m in fake.sent if m.round == round]


def test_the_trained_model_is_sent_before_it_is_averaged() -> None:
    fake = FakeRuntime(*(fragment(1, number, model(1)) for number in range(4)))
    node = make(fake, train=lambda params: params + 1)
    fake.run(DivShare(2, QUARTERS).run(node))
    from_table = np.full(SIZE, np.nan, np.float32)
    for _, message in fake.sent:
        if message.round == 0:
            from_table[FRAGMENTS.positions[int(message.payload.fields["fragment"])]] = message.payload.arrays["values"]
    assert np.array_equal(from_table, model(0) + 1)


def test_a_message_carries_a_number_and_values_and_nothing_else() -> None:
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


def test_fragments_go_to_nodes_of_their_own_in_random_order_and_every_node_is_as_likely() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(200, QUARTERS, degree=3).run(make(fake, 9, id=4)))
    rounds = [sent_in(fake, r) for r in range(199)]
    drawn = Counter(to for pairs in rounds for to, _ in pairs)
    first = Counter(pairs[0][1] for pairs in rounds)
    alike = sum(
        {to for to, number in pairs if number == 0} == {to for to, number in pairs if number == 1} for pairs in rounds
    )
    assert drawn.keys() == set(range(9)) - {4}
    for count in drawn.values():  # 298.5 of 2388; a standard deviation is below 16
        assert 230 < count < 370
    for number in range(4):  # 50 of 199; a standard deviation is 6
        assert 20 < first[number] < 85
    assert alike < 20  # one in 56


def test_fragments_without_parameters_are_not_sent() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, fraction=0.001, degree=2).run(fake.node(nodes=5, params=np.zeros(7, np.float32))))
    sizes = [m.payload.arrays["values"].size for _, m in fake.sent if m.round == 0]
    assert sizes == [1] * 14


def test_one_payload_serves_all_who_are_sent_a_fragment() -> None:
    fake = FakeRuntime()
    fake.run(DivShare(2, QUARTERS, degree=5).run(make(fake)))
    said = defaultdict(set)
    for _, message in fake.sent:
        said[message.round, message.payload.fields["fragment"]].add(id(message.payload.arrays["values"]))
    assert {len(ids) for ids in said.values()} == {1}


@given(st.integers(1, 10_000))
def test_a_fraction_of_one_in_k_is_k_fragments(k: int) -> None:
    assert DivShare(fraction=1 / k).fragments == k


@pytest.mark.parametrize(("fraction", "k"), [(1.0, 1), (0.7, 1), (0.5, 2), (0.4, 2), (0.3, 3), (0.1, 10), (0.09, 11)])
def test_there_are_as_many_fragments_as_fit_whole(fraction: float, k: int) -> None:
    assert DivShare(fraction=fraction).fragments == k


# When it is sent


def test_what_is_unsent_when_the_next_model_is_there_is_dropped() -> None:
    fake = FakeRuntime()
    fake.transmission = 0.3
    fake.run(DivShare(4, QUARTERS, degree=2).run(make(fake, train=lambda params: params + 1)))
    # Models are there at 1, 2, 3 and 4 s. What has begun to leave goes on to its end, and the next is a newer one.
    assert [m.round for _, m in fake.sent] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(fake.sent_at, 1 + 0.3 * np.arange(1, 11))
    for _, message in fake.sent:
        values = FRAGMENTS.payload(model(0) + message.round + 1, int(message.payload.fields["fragment"]))
        np.testing.assert_allclose(message.payload.arrays["values"], values.arrays["values"], rtol=1e-5, atol=1e-5)


def test_an_out_queue_that_ran_empty_is_filled_again() -> None:
    fake = FakeRuntime()
    fake.transmission = 0.05
    fake.run(DivShare(3, QUARTERS, degree=2).run(make(fake)))
    assert [m.round for _, m in fake.sent] == [0] * 8 + [1] * 8
    np.testing.assert_allclose(fake.sent_at[:8], 1 + 0.05 * np.arange(1, 9))
    np.testing.assert_allclose(fake.sent_at[8:], 2 + 0.05 * np.arange(1, 9))


@pytest.mark.parametrize("streams", [2, 3, 50])
def test_several_leave_at_a_time_with_streams(streams: int) -> None:
    fake = FakeRuntime()
    fake.transmission = 0.4
    fake.run(DivShare(2, QUARTERS, degree=3, streams=streams).run(make(fake)))
    expected = {1.4: 12} if streams > 12 else {1.4: streams, 1.8: streams}
    assert Counter(np.round(fake.sent_at, 9)) == expected
    assert len(set(sent_in(fake, 0))) == len(fake.sent)


def paced(algorithm: DivShare, models: Any, seconds: dict[int, float]) -> list[Node]:
    """Nodes that train for a second and take so many `seconds` for each message, at their end."""
    world = World(len(models))
    nodes = [FakeRuntime().node(id, nodes=len(models), params=params) for id, params in enumerate(models)]
    for node, runtime in zip(nodes, world.runtimes, strict=True):
        node.runtime = runtime
        _pace(runtime, seconds[node.id])
        runtime.start(algorithm.run(node))
    world.kernel.run()
    return nodes


def _pace(runtime: Any, seconds: float) -> None:
    async def transmit(to: int, message: Message) -> bool:
        await runtime.sleep(seconds)
        return bool(await runtime.send(to, message))

    runtime.transmit = transmit


def test_a_slow_node_gets_out_a_part_of_each_model() -> None:
    seconds = {**dict.fromkeys(range(8), 0.01), 3: 0.35}
    nodes = paced(DivShare(10, 0.1, degree=2), np.zeros((8, 100), np.float32), seconds)
    sent = {node.id: node.messages_sent for node in nodes}
    assert {sent[id] for id in sent if id != 3} == {9 * 20}
    assert sent[3] == 25  # in nine seconds, one after another


def test_whole_models_to_all_give_all_the_mean() -> None:
    models = np.random.default_rng(1).standard_normal((6, 40)).astype(np.float32)
    for node in paced(DivShare(2, fraction=1.0, degree=5), models, dict.fromkeys(range(6), 0.001)):
        np.testing.assert_allclose(node.params, models.mean(0), atol=1e-6)


def test_fragments_to_a_few_bring_all_to_one_model_within_the_bounds_of_the_first() -> None:
    models = np.random.default_rng(1).standard_normal((10, 40)).astype(np.float32)
    ends = np.stack([n.params for n in paced(DivShare(25, 0.2), models, dict.fromkeys(range(10), 0.001))])
    assert np.ptp(ends, axis=0).max() < 1e-3
    assert (ends > models.min(0) - 1e-5).all()
    assert (ends < models.max(0) + 1e-5).all()


# Who is sent to


def test_the_dead_are_not_sent_to() -> None:
    fake = FakeRuntime().mark_failed(1, 2, 3, at=2.5)
    fake.run(DivShare(4, QUARTERS, degree=7).run(make(fake)))
    assert {to for to, _ in sent_in(fake, 1)} == set(range(1, 9))
    assert Counter(number for _, number in sent_in(fake, 2)) == dict.fromkeys(range(4), 5)
    assert {to for to, _ in sent_in(fake, 2)} == set(range(4, 9))


def test_a_node_that_is_left_alone_goes_on() -> None:
    fake = FakeRuntime().mark_failed(1)
    node = make(fake, 2, train=lambda params: params + 1)
    fake.run(DivShare(2, QUARTERS).run(node))
    assert fake.sent == []
    np.testing.assert_allclose(node.params, model(0) + 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("peers", "expected"), [("neighbours", {3, 5}), ("all", {*range(9)} - {4})])
def test_who_is_drawn_from(peers: Any, expected: set[int]) -> None:
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
def test_a_node_made_anew_from_its_state_sends_what_was_unsent(unsent: int) -> None:
    first, rest = FakeRuntime(), FakeRuntime()
    first.transmission = 5.0
    node = make(first, train=lambda params: params + 1)
    first.run(DivShare(2, QUARTERS, degree=2).run(node))
    state = node.state()
    assert state["memory"]["unsent"] == 8  # the last of the first round's is still on its way

    again = make(rest, train=lambda params: params + 1)
    again.restore({**state, "memory": {**state["memory"], "unsent": unsent}})
    rest.run(DivShare(3, QUARTERS, degree=2).run(again))
    pairs = state["memory"]["outgoing"]["pairs"].tolist()
    assert [list(pair) for pair in sent_in(rest, 1)] == pairs[8 - unsent :]
    for _, message in rest.sent:
        expected = FRAGMENTS.payload(model(0) + 1 + message.round, int(message.payload.fields["fragment"]))
        np.testing.assert_allclose(message.payload.arrays["values"], expected.arrays["values"], rtol=1e-5, atol=1e-5)


def test_the_state_says_how_many_have_not_begun_to_leave() -> None:
    fake = FakeRuntime()
    left: list[int] = []

    def train(params: Any) -> Any:
        left.append(node.memory.get("unsent", 0))
        return params

    node = make(fake, train=train)
    fake.transmission = 0.3
    fake.run(DivShare(3, QUARTERS, degree=2).run(node))
    assert left == [0, 8 - 4, 8 - 3]


# Whole runs


def test_nodes_learn_and_the_same_seed_gives_the_same_models(tmp_path: Path) -> None:
    described = experiment(DivShare(50), network={"name": "uniform", "latency": 0.001})
    run, again = described.run(tmp_path), described.run(tmp_path)
    assert run.summary["digest"] == again.summary["digest"]
    assert run.summary["accuracy"]["mean"] > 0.8
    assert run.summary["messages_rejected"] == 0


def test_a_slow_network_is_sent_less(tmp_path: Path) -> None:
    fast = experiment(DivShare(10), network={"name": "uniform", "upload": 1000.0}).run(tmp_path)
    slow = experiment(DivShare(10), network={"name": "uniform", "upload": 0.05}).run(tmp_path)
    assert 0 < slow.summary["messages_sent"] < fast.summary["messages_sent"] <= 8 * 10 * 10 * 3


def test_nodes_that_are_processes_learn(tmp_path: Path) -> None:
    # Nobody waits for anybody: on a busy machine some may hear little.
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
        ({"degree": 8}, {}, r"algorithm.degree = 8: each of 8 nodes has 7 others .* use a smaller degree"),
        ({"degree": 0}, {}, "algorithm.degree = 0"),
        ({"fraction": 0.0}, {}, "algorithm.fraction = 0.0"),
        ({"fraction": 1.5}, {}, "algorithm.fraction = 1.5"),
        ({"streams": 0}, {}, "algorithm.streams = 0"),
        ({"peers": "some"}, {}, "algorithm.peers = 'some'"),
        ({}, {"sharing": {"name": "topk"}}, "sharing = 'topk': 'divshare' builds its own payloads"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(algorithm: Any, more: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "divshare", **algorithm}, **more)


def test_a_degree_beyond_the_neighbours_goes() -> None:
    experiment(DivShare(degree=8, peers="neighbours"))
