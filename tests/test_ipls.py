"""IPLS: x ← mean_i train_i(x) for everybody, against NumPy; and what is left of it when peers die, lag or lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import Shoal, experiment, models_of, same_in_both_engines
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
    """FedAvg in which everybody takes part."""
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
def test_everybody_holds_the_mean_of_all(nodes: int, partitions: int | None, per_node: int, tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, partitions, per_node), nodes=nodes)
    run = described.run(tmp_path)
    models = models_of(run)
    np.testing.assert_allclose(models, federated(Shoal(described)), atol=2e-5)
    assert np.ptp(models, axis=0).max() == 0, "to the bit: replicas sum in the same order"
    assert run.summary["status"] == "completed"
    assert not run.summary["events"]


def test_the_mean_may_be_weighted_by_sample_counts(tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, 4, weights="samples"), partition={"name": "dirichlet", "alpha": 0.1})
    shoal = Shoal(described)
    counts = [len(part) for part in shoal.setup.parts]
    assert max(counts) > 2 * min(counts)
    np.testing.assert_allclose(models_of(described.run(tmp_path)), federated(shoal, counts), atol=2e-5)


def test_processes_agree_with_the_simulation_to_the_bit(tmp_path: Path) -> None:
    described = experiment(IPLS(ROUNDS, 3, per_node=2), nodes=5)
    run = same_in_both_engines(described, tmp_path)
    np.testing.assert_allclose(models_of(run), federated(Shoal(described)), atol=2e-5)


@pytest.mark.parametrize(("nodes", "partitions", "per_node"), [(8, 8, 1), (8, 4, 1), (6, 6, 3), (4, 12, 1)])
def test_traffic_is_two_models_a_round_and_what_replicas_exchange(
    nodes: int, partitions: int, per_node: int, tmp_path: Path
) -> None:
    run = experiment(IPLS(2, partitions, per_node), nodes=nodes, model={"name": "mlp", "hidden": [512]}).run(tmp_path)
    size = 4 * models_of(run).shape[1]
    replicas = max(1.0, nodes * per_node / partitions)
    predicted = (2 * (nodes - replicas) / nodes + replicas * (replicas - 1) / nodes) * size
    assert run.summary["bytes_sent"]["per_node_mean"] == pytest.approx(2 * predicted, rel=0.02)


def test_when_each_has_its_own_partition_a_peer_sends_two_messages_to_each_other(tmp_path: Path) -> None:
    summary = experiment(IPLS(ROUNDS)).run(tmp_path).summary
    assert summary["messages_sent"] == ROUNDS * 8 * 7 * 2


# Who is responsible

sizes = st.tuples(st.integers(1, 14), st.integers(1, 20), st.integers(1, 5))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int, frozenset[int]]:
    """Nodes, partitions, how many for each, and who is absent."""
    nodes, partitions, per_node = draw(sizes)
    absent = draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - 1))
    return nodes, partitions, per_node, frozenset(absent)


@given(worlds())
@settings(max_examples=80, deadline=None)
def test_every_partition_has_somebody_and_nobody_has_much_more_than_others(
    world: tuple[int, int, int, frozenset[int]],
) -> None:
    nodes, partitions, per_node, absent = world
    made = assign_roles(*world)
    loads = [len(made.held_by(node)) for node in range(nodes) if node not in absent]
    assert all(made.holders)
    assert not absent & {node for holders in made.holders for node in holders}
    assert min(loads) >= min(per_node, partitions)
    assert max(loads) - min(loads) <= 1
    again = assign_roles.__wrapped__(*world)
    assert made.holders == again.holders
    assert np.array_equal(made.destinations, again.destinations)


@given(sizes)
def test_partitions_are_replicated_alike(size: tuple[int, int, int]) -> None:
    copies = [len(holders) for holders in assign_roles(*size, frozenset()).holders]
    assert max(copies) - min(copies) <= 1


@given(worlds())
@settings(max_examples=80, deadline=None)
def test_only_what_nobody_is_left_for_is_inherited(world: tuple[int, int, int, frozenset[int]]) -> None:
    *size, absent = world
    before, after = assign_roles(*size, frozenset()), assign_roles(*world)  # type: ignore[arg-type]
    for old, new in zip(before.holders, after.holders, strict=True):
        left = tuple(node for node in old if node not in absent)
        assert new == left or (not left and len(new) == 1)


@given(worlds())
@settings(max_examples=80, deadline=None)
def test_slices_go_to_the_responsible_evenly(world: tuple[int, int, int, frozenset[int]]) -> None:
    nodes, partitions, _, absent = world
    made = assign_roles(*world)
    present = [node for node in range(nodes) if node not in absent]
    for p, holders in enumerate(made.holders):
        assert set(made.destinations[:, p].tolist()) <= set(holders)
        assert all(made.destinations[node, p] == node for node in holders)
        shares = [sum(made.destinations[node, p] == holder for node in present) for holder in holders]
        assert max(shares) - min(shares) <= 1
    for node in range(nodes):
        assert sorted(p for sent in made.receivers(node).values() for p in sent) == list(range(partitions))
        assert all(made.senders(home)[node] == sent for home, sent in made.receivers(node).items())
        assert all(made.replicas(other)[node] == shared for other, shared in made.replicas(node).items())


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
def test_a_peer_that_hangs_is_waited_for_once(engine: str, tmp_path: Path) -> None:
    described = experiment(
        IPLS(6, 3, 1),
        nodes=4,
        engine=engine,
        fault=Faults().hang(1, round=2).schedule,
        simulation={"batching": "off", "receive_timeout": 100.0},
        processes={"receive_timeout": 5.0},  # longer than a busy machine makes anybody wait
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
def test_deaths_at_any_moment_and_slow_news_of_them_stop_nobody(seed: int, size: tuple[int, int, int]) -> None:
    nodes, partitions, per_node = size
    unsteady = Unsteady(seed, nodes, IPLS(30, partitions, per_node))
    for node in unsteady.rng.choice(nodes, min(3, nodes - 1), replace=False).tolist():
        unsteady.die(node, at=20 * unsteady.rng.random())
    left = unsteady.run()
    models = np.stack([node.params for node in left])
    assert np.ptp(models, axis=0).max() == 0
    np.testing.assert_allclose(models, 2 * np.mean([node.id + 1 for node in left]), rtol=1e-3)


def test_a_peer_too_slow_for_the_deadline_is_left_behind_but_told_the_averages() -> None:
    unsteady = Unsteady(0, 4, IPLS(30, 5, 1, deadline=8.0))
    unsteady.nodes[2].trainer.step_seconds = 20.0  # type: ignore[attr-defined]
    models = np.stack([node.params for node in unsteady.run()])
    assert len(models) == 4
    np.testing.assert_allclose(models, 2 * np.mean([1, 2, 4]), rtol=1e-3)
    assert np.ptp(models, axis=0).max() == 0


@given(seed=st.integers(0, 2**32), size=st.tuples(st.integers(2, 6), st.integers(1, 9), st.integers(1, 3)))
@settings(max_examples=10, deadline=None)
def test_a_peer_that_was_late_counts_again(seed: int, size: tuple[int, int, int]) -> None:
    nodes, partitions, per_node = size
    unsteady = Unsteady(seed, nodes, IPLS(70, partitions, per_node, deadline=5.0))
    late = unsteady.nodes[1].trainer
    fast = min(node.trainer.step_seconds for node in unsteady.nodes) / 2  # nobody waits for it: it has to catch up
    late.step_seconds = 12.0  # type: ignore[attr-defined]
    unsteady.world.kernel.at(15.0, lambda: setattr(late, "step_seconds", fast))
    models = np.stack([node.params for node in unsteady.run()])
    np.testing.assert_allclose(models, 2 * np.mean(np.arange(nodes) + 1), rtol=1e-3)
    assert np.ptp(models, axis=0).max() == 0


def test_whom_a_peer_missed_is_in_its_state() -> None:
    def absent(rounds: int, state: Any = None) -> tuple[list[bool], Node]:
        """Of each update that node 0 said to node 2: whether it held anybody absent."""
        fake = FakeRuntime(*(Message(2, UPDATE, r, Payload({})) for r in range(2)))
        node = fake.node(nodes=3, params=np.ones(6, np.float32), receive_timeout=1.0)
        if state:
            node.restore(state)
        fake.run(IPLS(rounds).run(node))
        said = [message.payload for to, message in fake.sent if to == 2 and message.kind == UPDATE]
        return ["absent" in payload.arrays for payload in said], node

    held, node = absent(1)
    assert (held, node.memory["missed"]) == ([False], [[1, 1]])
    assert absent(2, node.state())[0] == [True]


# Payloads that make no sense


def hears(kind: str, said: Payload, algorithm: IPLS | None = None) -> Node:
    """Node 0 of two, after a round in which the other said this, and otherwise nothing wrong."""
    values = np.full(2, 3, np.float32)
    plain = {
        UPDATE: Payload({"partitions": np.array([0], np.int32), "values": values}),
        PARTIAL: Payload({}),
        RESULT: Payload({"partitions": np.array([1], np.int32), "values": values, "weights": np.array([2.0])}),
        kind: said,
    }
    fake = FakeRuntime(*(Message(1, kind, 0, payload) for kind, payload in plain.items()))
    node = fake.node(nodes=2, params=np.ones(4, np.float32), receive_timeout=1.0)
    fake.run((algorithm or IPLS(1)).run(node))
    return node


def slices(partitions: Any, values: Any, dtype: Any = np.int32, **more: Any) -> Payload:
    return Payload({"partitions": np.array(partitions, dtype), "values": np.array(values), **more})


F = np.float32
NONSENSE = {
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


def test_what_makes_sense_is_averaged() -> None:
    node = hears(PARTIAL, Payload({}))
    assert node.params.tolist() == [2, 2, 3, 3]
    assert node.rejected == 0


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_updates_that_make_no_sense_are_dropped_and_counted(said: Payload) -> None:
    node = hears(UPDATE, said)
    assert node.rejected == 1
    assert node.params[:2].tolist() == [1, 1]


UNWEIGHED = {
    **NONSENSE,
    "no weights": slices([0], F([3, 3])),
    "a weight of nothing": slices([0], F([3, 3]), weights=np.array([0.0])),
    "an infinite weight": slices([0], F([3, 3]), weights=np.array([np.inf])),
    "a weight beyond all bounds": slices([0], F([3, 3]), weights=np.array([1e300])),
    "weights that are no numbers": slices([0], F([3, 3]), weights=np.array([np.nan])),
    "too many weights": slices([0], F([3, 3]), weights=np.array([1.0, 1.0])),
    "weights of another type": slices([0], F([3, 3]), weights=np.array([1])),
}


@pytest.mark.parametrize("said", UNWEIGHED.values(), ids=UNWEIGHED)
def test_partial_averages_that_make_no_sense_are_dropped_and_counted(said: Payload) -> None:
    fake = FakeRuntime(Message(1, UPDATE, 0, Payload({})), Message(1, PARTIAL, 0, said))
    node = fake.node(nodes=2, params=np.ones(4, np.float32))
    fake.run(IPLS(1, 2, per_node=2).run(node))
    assert node.rejected == 1
    assert node.params.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("said", UNWEIGHED.values(), ids=UNWEIGHED)
def test_results_that_make_no_sense_are_dropped_and_counted(said: Payload) -> None:
    moved = {name: array + (name == "partitions") for name, array in said.arrays.items()}  # 1 is the other node's
    node = hears(RESULT, Payload(moved))
    assert node.rejected == 1
    assert node.params.tolist() == [2, 2, 1, 1]


def test_nobody_is_told_of_a_partition_of_its_own() -> None:
    node = hears(RESULT, slices([0], F([9, 9]), weights=np.array([99.0])))
    assert node.rejected == 1
    assert node.params.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "bits", [np.zeros(2, np.uint8), np.zeros(1, np.int32), np.array([0b01000000], np.uint8)], ids=str
)
def test_whom_a_peer_holds_absent_must_make_sense(bits: Any) -> None:
    node = hears(UPDATE, slices([0], F([3, 3]), absent=bits))
    assert node.rejected == 1
    assert node.params[:2].tolist() == [1, 1]


@pytest.mark.parametrize("samples", [0, -1, 1.5, 2**60, True, "many", None])
def test_sample_counts_must_make_sense(samples: Any) -> None:
    fields = {} if samples is None else {"samples": samples}
    said = slices([0], F([3, 3]))
    node = hears(UPDATE, Payload(said.arrays, fields), IPLS(1, weights="samples"))
    assert node.rejected == 1
    assert hears(UPDATE, Payload(said.arrays, {"samples": 3}), IPLS(1, weights="samples")).params[0] == 2.5


def test_averages_of_the_greatest_models_do_not_overflow() -> None:
    most = np.finfo(F).max
    fake = FakeRuntime(Message(1, UPDATE, 0, slices([0], F([most, most]))))
    node = fake.node(nodes=2, params=np.full(4, most), receive_timeout=1.0)
    fake.run(IPLS(1).run(node))
    assert node.params.tolist() == [most] * 4


def test_a_model_that_is_not_finite_is_kept_from_the_others_and_healed_by_them() -> None:
    unsteady = Unsteady(2, 3, IPLS(2, 4))
    unsteady.nodes[1].params = np.full(23, np.nan, np.float32)
    models = np.stack([node.params for node in unsteady.run()])
    assert np.isfinite(models).all()
    assert np.ptp(models, axis=0).max() == 0
    assert not any(node.rejected for node in unsteady.nodes)


def test_a_peer_that_talks_nonsense_throughout_stops_nobody() -> None:
    unsteady = Unsteady(3, 4, IPLS(30, 6, 2))
    plain = unsteady.world.runtimes[3].send

    async def spoilt(to: int, message: Message) -> bool:
        return await plain(to, Message(3, message.kind, message.round, slices([0, 1], F([np.nan]))))

    unsteady.world.runtimes[3].send = spoilt  # type: ignore[method-assign]
    models = np.stack([node.params for node in unsteady.run()])
    np.testing.assert_allclose(models[:3], 2 * np.mean([1, 2, 3]), rtol=1e-3)
    assert all(node.rejected for node in unsteady.nodes[:3])
