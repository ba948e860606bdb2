"""IPLS: x ← mean_i train_i(x) on every node, against NumPy; and its behaviour with failed, late or invalid peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import models_of
from oracle import Shoal, experiment, same_in_both_engines
from shoal.algorithms.ipls import IPLS
from shoal.algorithms.support.partition_exchange import PARTIAL, RESULT, UPDATE
from shoal.algorithms.support.partition_roles import assign_roles
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.testing import FakeRuntime, Faults
from unsteady import Unsteady

ROUNDS = 4


def federated(shoal: Shoal, weights: Any = None) -> Any:
    """FedAvg in which all nodes take part."""
    model = shoal.start[:1]
    for _ in range(ROUNDS):
        trained = model + shoal.steps(np.repeat(model, shoal.nodes, 0))
        model = np.average(trained, axis=0, weights=weights, keepdims=True)
    return np.repeat(model, shoal.nodes, 0)


# Without faults


@pytest.mark.parametrize(
    ("nodes", "partitions", "per_node"),
    [(8, None, 1), (8, 1, 1), (8, 3, 1), (5, 13, 1), (6, 4, 2), (5, 5, 5), (4, 2, 7), (1, 3, 1), (3, 700, 1)],
)
def test_every_node_holds_the_mean(nodes: int, partitions: int | None, per_node: int, tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, partitions, per_node), nodes=nodes)
    run = described.run(tmp_path)
    models = models_of(run)
    np.testing.assert_allclose(models, federated(Shoal(described)), atol=2e-5)
    assert np.ptp(models, axis=0).max() == 0, "identical: replicas sum in the same order"
    assert run.summary["status"] == "completed"
    assert not run.summary["events"]


def test_mean_weighted_by_sample_counts(tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, 4, weights="samples"), partition={"name": "dirichlet", "alpha": 0.1})
    shoal = Shoal(described)
    counts = [len(part) for part in shoal.setup.parts]
    assert max(counts) > 2 * min(counts)
    np.testing.assert_allclose(models_of(described.run(tmp_path)), federated(shoal, counts), atol=2e-5)


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, 3, per_node=2), nodes=5)
    run = same_in_both_engines(described, tmp_path)
    np.testing.assert_allclose(models_of(run), federated(Shoal(described)), atol=2e-5)


@pytest.mark.parametrize(("nodes", "partitions", "per_node"), [(8, 8, 1), (8, 4, 1), (6, 6, 3), (4, 12, 1)])
def test_traffic_is_two_models_per_round_and_the_exchanges_of_replicas(
    nodes: int, partitions: int, per_node: int, tmp_path: Path
) -> None:
    run = experiment(IPLS(2, partitions, per_node), nodes=nodes, model={"name": "mlp", "hidden": [512]}).run(tmp_path)
    size = 4 * models_of(run).shape[1]
    replicas = max(1.0, nodes * per_node / partitions)
    predicted = (2 * (nodes - replicas) / nodes + replicas * (replicas - 1) / nodes) * size
    assert run.summary["bytes_sent"]["per_node_mean"] == pytest.approx(2 * predicted, rel=0.02)


def test_two_messages_to_each_peer_if_each_node_has_one_partition(tmp_path: Path) -> None:
    summary = experiment(IPLS(ROUNDS)).run(tmp_path).summary
    assert summary["messages_sent"] == ROUNDS * 8 * 7 * 2


# Responsibility for partitions

sizes = st.tuples(st.integers(1, 14), st.integers(1, 20), st.integers(1, 5))


@st.composite
def settings_with_absent_nodes(draw: st.DrawFn) -> tuple[int, int, int, frozenset[int]]:
    """The numbers of nodes, partitions and partitions per node, and the absent nodes."""
    nodes, partitions, per_node = draw(sizes)
    absent = draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - 1))
    return nodes, partitions, per_node, frozenset(absent)


@given(settings_with_absent_nodes())
@settings(max_examples=80, deadline=None)
def test_every_partition_has_a_holder_and_loads_are_even(
    setting: tuple[int, int, int, frozenset[int]],
) -> None:
    nodes, partitions, per_node, absent = setting
    roles = assign_roles(*setting)
    loads = [len(roles.held_by(node)) for node in range(nodes) if node not in absent]
    assert all(roles.holders)
    assert not absent & {node for holders in roles.holders for node in holders}
    assert min(loads) >= min(per_node, partitions)
    assert max(loads) - min(loads) <= 1
    again = assign_roles.__wrapped__(*setting)
    assert roles.holders == again.holders
    assert np.array_equal(roles.destinations, again.destinations)


@given(sizes)
def test_partitions_are_replicated_evenly(size: tuple[int, int, int]) -> None:
    copies = [len(holders) for holders in assign_roles(*size, frozenset()).holders]
    assert max(copies) - min(copies) <= 1


@given(settings_with_absent_nodes())
@settings(max_examples=80, deadline=None)
def test_only_partitions_without_a_holder_move(setting: tuple[int, int, int, frozenset[int]]) -> None:
    *size, absent = setting
    before, after = assign_roles(*size, frozenset()), assign_roles(*setting)  # type: ignore[arg-type]
    for old, new in zip(before.holders, after.holders, strict=True):
        left = tuple(node for node in old if node not in absent)
        assert new == left or (not left and len(new) == 1)


@given(settings_with_absent_nodes())
@settings(max_examples=80, deadline=None)
def test_slices_are_spread_evenly_over_holders(setting: tuple[int, int, int, frozenset[int]]) -> None:
    nodes, partitions, _, absent = setting
    roles = assign_roles(*setting)
    present = [node for node in range(nodes) if node not in absent]
    for p, holders in enumerate(roles.holders):
        assert set(roles.destinations[:, p].tolist()) <= set(holders)
        assert all(roles.destinations[node, p] == node for node in holders)
        shares = [sum(roles.destinations[node, p] == holder for node in present) for holder in holders]
        assert max(shares) - min(shares) <= 1
    for node in range(nodes):
        assert sorted(p for sent in roles.receivers(node).values() for p in sent) == list(range(partitions))
        assert all(roles.senders(home)[node] == sent for home, sent in roles.receivers(node).items())
        assert all(roles.replicas(other)[node] == shared for other, shared in roles.replicas(node).items())


# Crashes and hangs


ONE = (Faults().crash(2, round=2), None, 1)
ONE_AFTER_ANOTHER = (Faults().crash(0, round=1).crash(4, round=3), 4, 2)
TWO_AT_ONCE = (Faults().crash(1, round=2).crash(5, round=2), 3, 1)


@pytest.mark.parametrize(
    ("faults", "partitions", "per_node", "engine"),
    [
        pytest.param(*ONE, "simulation", id="one, simulation"),
        pytest.param(*ONE, "processes", id="one, processes"),
        pytest.param(*ONE_AFTER_ANOTHER, "simulation", id="one after another, simulation"),
        pytest.param(*ONE_AFTER_ANOTHER, "processes", id="one after another, processes"),
        pytest.param(*TWO_AT_ONCE, "simulation", id="two at once, simulation"),
    ],
)
def test_survivors_agree_again_and_learn(
    faults: Faults, partitions: int | None, per_node: int, engine: str, tmp_path: Path
) -> None:
    described = experiment(IPLS(12, partitions, per_node), nodes=6, engine=engine, fault=faults.schedule)
    run = described.run(tmp_path)
    models = models_of(run)
    assert run.summary["status"] == "incomplete"
    assert len(models) == 6 - len(faults.schedule) == 6 - len(run.summary["lost"])
    assert np.ptp(models, axis=0).max() == 0
    setup = Setup(described)
    assert run.summary["loss"]["mean"] < 0.75 * setup.evaluate(setup.initial)["loss"]


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_peer_that_hangs_is_waited_for_once(engine: str, tmp_path: Path) -> None:
    described = experiment(
        IPLS(6, 3, 1),
        nodes=4,
        engine=engine,
        fault=Faults().hang(1, round=2).schedule,
        simulation={"batching": "off", "receive_timeout": 100.0},
        processes={"receive_timeout": 5.0},  # longer than any delay on a busy machine
    )
    run = described.run(tmp_path)
    models = np.stack([np.load(run.folder.model(node)) for node in (0, 2, 3)])
    assert run.summary["status"] == "incomplete"
    assert [*map(int, run.summary["lost"])] == [1]
    assert np.ptp(models, axis=0).max() == 0
    if engine == "simulation":
        assert run.summary["events"]["timed out"] == 3
        assert 100 < run.summary["time"]["virtual_s"] < 200


@given(seed=st.integers(0, 2**32), size=st.tuples(st.integers(2, 7), st.integers(1, 9), st.integers(1, 3)))
@settings(max_examples=40, deadline=None)
def test_failures_at_any_moment_block_no_node(seed: int, size: tuple[int, int, int]) -> None:
    nodes, partitions, per_node = size
    unsteady = Unsteady(seed, nodes, IPLS(30, partitions, per_node))
    for node in unsteady.rng.choice(nodes, min(3, nodes - 1), replace=False).tolist():
        unsteady.fail(node, at=20 * unsteady.rng.random())
    left = unsteady.run()
    models = np.stack([node.params for node in left])
    assert np.ptp(models, axis=0).max() == 0
    np.testing.assert_allclose(models, 2 * np.mean([node.id + 1 for node in left]), rtol=1e-3)


def test_peer_too_slow_for_the_deadline_still_receives_the_averages() -> None:
    unsteady = Unsteady(0, 4, IPLS(30, 5, 1, deadline=8.0))
    unsteady.nodes[2].trainer.step_seconds = 20.0  # type: ignore[attr-defined]
    models = np.stack([node.params for node in unsteady.run()])
    assert len(models) == 4
    np.testing.assert_allclose(models, 2 * np.mean([1, 2, 4]), rtol=1e-3)
    assert np.ptp(models, axis=0).max() == 0


@given(seed=st.integers(0, 2**32), size=st.tuples(st.integers(2, 6), st.integers(1, 9), st.integers(1, 3)))
@settings(max_examples=10, deadline=None)
def test_late_peer_counts_again(seed: int, size: tuple[int, int, int]) -> None:
    nodes, partitions, per_node = size
    unsteady = Unsteady(seed, nodes, IPLS(70, partitions, per_node, deadline=5.0))
    late = unsteady.nodes[1].trainer
    fast = min(node.trainer.step_seconds for node in unsteady.nodes) / 2  # no node waits for it: it has to catch up
    late.step_seconds = 12.0  # type: ignore[attr-defined]
    unsteady.world.kernel.at(15.0, lambda: setattr(late, "step_seconds", fast))
    models = np.stack([node.params for node in unsteady.run()])
    np.testing.assert_allclose(models, 2 * np.mean(np.arange(nodes) + 1), rtol=1e-3)
    assert np.ptp(models, axis=0).max() == 0


def test_missed_peers_are_part_of_the_state() -> None:
    def absent(rounds: int, state: Any = None) -> tuple[list[bool], Node]:
        """Whether each update that node 0 sent to node 2 lists absent nodes."""
        fake = FakeRuntime(*(Message(2, UPDATE, r, Payload({})) for r in range(2)))
        node = fake.node(nodes=3, params=np.ones(6, np.float32), receive_timeout=1.0)
        if state:
            node.restore(state)
        fake.run(IPLS(rounds).run(node))
        payloads = [message.payload for to, message in fake.sent if to == 2 and message.kind == UPDATE]
        return ["absent" in payload.arrays for payload in payloads], node

    listed, node = absent(1)
    assert (listed, node.algorithm_state["missed"]) == ([False], [[1, 1]])
    assert absent(2, node.state())[0] == [True]


ABSENT_1 = np.packbits(np.array([0, 1, 0], np.bool_))


@pytest.mark.parametrize(("absent", "waits"), [({"absent": ABSENT_1}, {0, 4, 8, 16}), ({}, set(range(20)))])
def test_missing_peer_is_waited_for_ever_less_often_if_no_peer_receives_from_it(
    absent: dict[str, Any], waits: set[int]
) -> None:
    """After 4, 8, 16 … missed rounds, and in every round in which another peer takes it to be present."""
    script = [Message(2, UPDATE, r, Payload(absent)) for r in range(20)]
    script += [Message(2, RESULT, r, Payload({})) for r in range(20)]
    fake = FakeRuntime(*script)
    node = fake.node(nodes=3, params=np.ones(6, np.float32))
    fake.run(IPLS(20, deadline=5.0).run(node))
    updates = [
        at for at, (to, m) in zip(fake.sent_at, fake.sent, strict=True) if (to, m.kind) == (2, UPDATE)
    ]  # after a second of training
    assert {r for r, seconds in enumerate(np.diff([*updates, fake.now() + 1.0])) if seconds == 6.0} == waits


@pytest.mark.parametrize(
    ("weights", "expected"), [((2.0, 2.0), 7), ((3.0, 2.0), 5), ((2.0, 3.0), 7)], ids=["equal", "other", "own"]
)
def test_of_two_results_the_larger_weight_counts_and_of_equal_weights_that_of_the_own_holder(
    weights: tuple[float, float], expected: int
) -> None:
    """Node 0 takes node 2 to be absent, and averages its partition in its place; node 3 sent its slice to node 2."""
    absent = Payload({"absent": np.packbits(np.array([0, 0, 1, 0], np.bool_))})
    results = {0: (F([5, 5]), weights[0]), 2: (F([7, 7]), weights[1])}
    fake = FakeRuntime(*(Message(peer, UPDATE, 0, absent if peer == 0 else Payload({})) for peer in range(3)))
    for peer, (values, weight) in results.items():
        fake.deliver(Message(peer, RESULT, 0, slices([2], values, weights=np.array([weight]))))
    fake.deliver(Message(1, RESULT, 0, Payload({})))
    node = fake.node(3, nodes=4, params=np.ones(8, np.float32))
    fake.run(IPLS(1, deadline=5.0).run(node))
    assert node.params.tolist() == [1, 1, 1, 1, expected, expected, 1, 1]
    assert node.rejected_count == 0


# Invalid payloads


def after_receiving(kind: str, payload: Payload, algorithm: IPLS | None = None) -> Node:
    """Run a round of node 0 of two; the other node sends `payload`, and valid messages of the other kinds."""
    values = np.full(2, 3, np.float32)
    payloads = {
        UPDATE: Payload({"partitions": np.array([0], np.int32), "values": values}),
        PARTIAL: Payload({}),
        RESULT: Payload({"partitions": np.array([1], np.int32), "values": values, "weights": np.array([2.0])}),
        kind: payload,
    }
    fake = FakeRuntime(*(Message(1, kind, 0, payload) for kind, payload in payloads.items()))
    node = fake.node(nodes=2, params=np.ones(4, np.float32), receive_timeout=1.0)
    fake.run((algorithm or IPLS(1)).run(node))
    return node


def slices(partitions: Any, values: Any, dtype: Any = np.int32, **more: Any) -> Payload:
    return Payload({"partitions": np.array(partitions, dtype), "values": np.array(values), **more})


F = np.float32
INVALID_SLICES = {
    "a partition out of range": slices([2], F([3, 3])),
    "a negative partition": slices([-1], F([3, 3])),
    "partitions twice": slices([0, 0], F([3, 3, 3, 3])),
    "partitions as floats": slices([0], F([3, 3]), dtype=np.float64),
    "partitions in a square": slices([[0]], F([3, 3])),
    "too few values": slices([0], F([3])),
    "too many values": slices([0], F([3, 3, 3])),
    "values of another type": slices([0], np.array([3.0, 3.0])),
    "values in a square": slices([0], F([[3, 3]])),
    "values that are not finite": slices([0], F([3, np.nan])),
    "no values": Payload({"partitions": np.array([0], np.int32)}),
}


def test_valid_payloads_are_averaged() -> None:
    node = after_receiving(PARTIAL, Payload({}))
    assert node.params.tolist() == [2, 2, 3, 3]
    assert node.rejected_count == 0


@pytest.mark.parametrize("payload", INVALID_SLICES.values(), ids=INVALID_SLICES)
def test_invalid_updates_are_rejected_and_counted(payload: Payload) -> None:
    node = after_receiving(UPDATE, payload)
    assert node.rejected_count == 1
    assert node.params[:2].tolist() == [1, 1]


INVALID_AVERAGES = {
    **INVALID_SLICES,
    "no weights": slices([0], F([3, 3])),
    "a weight of zero": slices([0], F([3, 3]), weights=np.array([0.0])),
    "an infinite weight": slices([0], F([3, 3]), weights=np.array([np.inf])),
    "a weight above the limit": slices([0], F([3, 3]), weights=np.array([1e300])),
    "weights that are not numbers": slices([0], F([3, 3]), weights=np.array([np.nan])),
    "too many weights": slices([0], F([3, 3]), weights=np.array([1.0, 1.0])),
    "weights of another type": slices([0], F([3, 3]), weights=np.array([1])),
}


@pytest.mark.parametrize("payload", INVALID_AVERAGES.values(), ids=INVALID_AVERAGES)
def test_invalid_partial_averages_are_rejected_and_counted(payload: Payload) -> None:
    fake = FakeRuntime(Message(1, UPDATE, 0, Payload({})), Message(1, PARTIAL, 0, payload))
    node = fake.node(nodes=2, params=np.ones(4, np.float32))
    fake.run(IPLS(1, 2, per_node=2).run(node))
    assert node.rejected_count == 1
    assert node.params.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("payload", INVALID_AVERAGES.values(), ids=INVALID_AVERAGES)
def test_invalid_results_are_rejected_and_counted(payload: Payload) -> None:
    moved = {name: array + (name == "partitions") for name, array in payload.arrays.items()}  # 1: the other's
    node = after_receiving(RESULT, Payload(moved))
    assert node.rejected_count == 1
    assert node.params.tolist() == [2, 2, 1, 1]


def test_result_for_an_own_partition_is_rejected() -> None:
    node = after_receiving(RESULT, slices([0], F([9, 9]), weights=np.array([99.0])))
    assert node.rejected_count == 1
    assert node.params.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "bits", [np.zeros(2, np.uint8), np.zeros(1, np.int32), np.array([0b01000000], np.uint8)], ids=str
)
def test_invalid_lists_of_absent_nodes_are_rejected(bits: Any) -> None:
    node = after_receiving(UPDATE, slices([0], F([3, 3]), absent=bits))
    assert node.rejected_count == 1
    assert node.params[:2].tolist() == [1, 1]


@pytest.mark.parametrize("samples", [0, -1, 1.5, 2**60, True, "many", None])
def test_invalid_sample_counts_are_rejected(samples: Any) -> None:
    fields = {} if samples is None else {"samples": samples}
    update = slices([0], F([3, 3]))
    node = after_receiving(UPDATE, Payload(update.arrays, fields), IPLS(1, weights="samples"))
    assert node.rejected_count == 1
    assert after_receiving(UPDATE, Payload(update.arrays, {"samples": 3}), IPLS(1, weights="samples")).params[0] == 2.5


def test_averages_of_the_largest_models_do_not_overflow() -> None:
    most = np.finfo(F).max
    fake = FakeRuntime(Message(1, UPDATE, 0, slices([0], F([most, most]))))
    node = fake.node(nodes=2, params=np.full(4, most), receive_timeout=1.0)
    fake.run(IPLS(1).run(node))
    assert node.params.tolist() == [most] * 4


def test_model_that_is_not_finite_is_not_sent_and_is_replaced() -> None:
    unsteady = Unsteady(2, 3, IPLS(2, 4))
    unsteady.nodes[1].params = np.full(23, np.nan, np.float32)
    models = np.stack([node.params for node in unsteady.run()])
    assert np.isfinite(models).all()
    assert np.ptp(models, axis=0).max() == 0
    assert not any(node.rejected_count for node in unsteady.nodes)


def test_peer_that_sends_only_invalid_payloads_blocks_no_node() -> None:
    unsteady = Unsteady(3, 4, IPLS(30, 6, 2))
    send = unsteady.world.runtimes[3].send

    async def send_invalid(to: int, message: Message) -> bool:
        return await send(to, Message(3, message.kind, message.round, slices([0, 1], F([np.nan]))))

    unsteady.world.runtimes[3].send = send_invalid  # type: ignore[method-assign]
    models = np.stack([node.params for node in unsteady.run()])
    np.testing.assert_allclose(models[:3], 2 * np.mean([1, 2, 3]), rtol=1e-3)
    assert all(node.rejected_count for node in unsteady.nodes[:3])
