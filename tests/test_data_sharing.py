"""Data sharing: samples travel, each is kept once, models are left alone, and nodes learn what others hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.dataset import Data, Samples
from shoal.data.local import NodeData
from shoal.engines.simulation.batching import choose_batching
from shoal.engines.simulation.compute import StackedExecutor
from shoal.engines.simulation.engine import Simulation
from shoal.errors import ExperimentError, MessageError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Payload
from shoal.randomness import generator
from shoal.results.records import RunFolder
from shoal.sharing.data import DataSharing
from shoal.sharing.sharing import NodeInfo
from shoal.testing import check_sharing
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Train

MODEL = np.zeros(3, np.float32)


def common(count: int = 30) -> Samples:
    """Samples whose first value is their number, so that they can be distinguished."""
    x = np.zeros((count, 2), np.float32)
    x[:, 0] = np.arange(count)
    return Samples(x, np.arange(count) % 5)


def joined(samples: int, held: list[int], id: int = 0) -> tuple[DataSharing, NodeData]:
    data = NodeData(Data(common(), common(), 5), np.array(held, np.int64))
    sharing = DataSharing(samples)
    sharing.bind(NodeInfo(id, 4, 7, ((3,),), data))
    sharing.start(MODEL)
    return sharing, data


def numbers(data: NodeData) -> list[int]:
    return sorted(int(n) for n in data.sample(10**6, np.random.default_rng(0)).x[:, 0])


# Sent and kept samples


def test_a_node_draws_new_samples_each_round() -> None:
    sharing, _ = joined(4, list(range(10, 20)))
    payloads = [sharing.outgoing(MODEL, r) for r in (0, 0, 1)]
    assert np.array_equal(payloads[0].arrays["x"], payloads[1].arrays["x"])
    assert not np.array_equal(payloads[0].arrays["x"], payloads[2].arrays["x"])
    for payload in payloads:
        drawn = payload.arrays["x"][:, 0].astype(int).tolist()
        assert len(set(drawn)) == 4
        assert set(drawn) <= set(range(10, 20))
        assert payload.arrays["y"].tolist() == [n % 5 for n in drawn]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 29), max_size=12), max_size=5), st.sets(st.integers(0, 29), min_size=1))
def test_every_sample_is_kept_once_and_the_model_left_alone(batches: list[list[int]], held: set[int]) -> None:
    sharing, data = joined(4, sorted(held))
    rows = common()
    received = {peer: Payload({"x": rows.x[part], "y": rows.y[part]}) for peer, part in enumerate(batches)}
    for payload in received.values():
        sharing.check(payload, MODEL)
    for _ in range(2):
        merged = sharing.merge(MODEL, received, {})
        assert np.array_equal(merged, MODEL)
        assert merged is not MODEL
        assert numbers(data) == sorted(held.union(*batches))


def test_received_samples_are_passed_on() -> None:
    sharing, _ = joined(100, [1])
    sharing.merge(MODEL, {2: Payload({"x": common().x[[7]], "y": common().y[[7]]})}, {2: 0.5})
    assert sorted(sharing.outgoing(MODEL, 1).arrays["x"][:, 0]) == [1, 7]


@pytest.mark.parametrize("size", [1, 100])
def test_it_conforms_where_no_data_is_to_be_seen(size: int) -> None:
    check_sharing(DataSharing, size)


# What comes from the network


@pytest.mark.parametrize(
    ("x", "y", "problem"),
    [
        (None, np.zeros(1, np.int64), "expected samples 'x'"),
        (np.zeros((1, 2), np.float32), None, "their targets 'y'"),
        (np.zeros((1, 2), np.float64), np.zeros(1, np.int64), "'x' is float64"),
        (np.zeros((1, 2), np.float32), np.zeros(1, np.int32), "'y' is int32"),
        (np.zeros((2, 2), np.float32), np.zeros(1, np.int64), "a target for each"),
        (np.zeros((), np.float32), np.zeros((), np.int64), "expected samples 'x'"),
        (np.zeros((1, 2), np.float32), np.zeros((1, 1), np.int64), r"'y' is int64 of shape \(1,\) per sample"),
        (
            np.zeros((1, 3), np.float32),
            np.zeros(1, np.int64),
            r"shape \(3,\) per sample, expected float32 of shape \(2,\)",
        ),
        (np.zeros(1, np.float32), np.zeros(1, np.int64), r"shape \(\) per sample"),
        (np.zeros((1, 2), np.float32), np.full(1, 5), "targets from 5 to 5, expected 0 to 4"),
        (np.zeros((1, 2), np.float32), np.full(1, -1), "targets from -1"),
        (np.full((1, 2), np.nan, np.float32), np.zeros(1, np.int64), "not finite"),
    ],
)
def test_samples_of_other_data_are_rejected(x: Any, y: Any, problem: str) -> None:
    sharing, _ = joined(4, [1])
    arrays = {name: array for name, array in (("x", x), ("y", y)) if array is not None}
    with pytest.raises(MessageError, match=problem):
        sharing.check(Payload(arrays), MODEL)


def test_a_neighbour_may_send_sixteen_times_the_samples_of_the_node() -> None:
    sharing, _ = joined(2, [1])
    for count in (32, 33):
        payload = Payload({"x": np.zeros((count, 2), np.float32), "y": np.zeros(count, np.int64)})
        if count == 32:
            sharing.check(payload, MODEL)
        else:
            with pytest.raises(MessageError, match="33 samples, expected at most 32: 16 times `samples` of this node"):
                sharing.check(payload, MODEL)


def test_samples_that_are_added_are_moved_a_few_times_at_most() -> None:
    data = NodeData(Data(common(), common(), 5), np.array([3, 1]))
    held, views, moved = data.held, [], {"x": 0, "y": 0, "held": 0}
    for n in range(1000):
        before = data.added
        assert data.add(Samples(np.array([[n, 7], [n, 8]], np.float32), np.array([n % 5, 0]))) == 2
        assert data.added is not None
        moved["held"] += not np.shares_memory(held, data.held)
        if before is not None:
            moved["x"] += not np.shares_memory(before.x, data.added.x)
            moved["y"] += not np.shares_memory(before.y, data.added.y)
        held = data.held
        views.append(data.added)
    assert max(moved.values()) <= 12
    assert held.tolist() == [3, 1, *range(30, 2030)]
    for count, view in enumerate(views, 1):
        assert len(view) == 2 * count
        assert np.array_equal(view.x[:, 0], np.repeat(np.arange(count), 2))
        assert not view.x.flags.writeable
    assert numbers(data) == sorted([3, 1, *np.repeat(np.arange(1000), 2)])


def test_a_node_whose_trainer_gives_no_data_sends_and_takes_nothing() -> None:
    sharing = DataSharing()
    sharing.bind(NodeInfo(0, 2, 0, ((3,),)))
    nothing = sharing.outgoing(MODEL, 0)
    assert nothing.arrays["y"].size == 0
    sharing.check(nothing, MODEL)
    with pytest.raises(MessageError, match="1 samples for a node whose trainer takes none"):
        sharing.check(Payload({"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.int64)}), MODEL)


# Whole runs


def experiment(**changed: Any) -> Experiment:
    described: dict[str, Any] = {
        "nodes": 5,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 5},
        "sharing": {"name": "data", "samples": 64},
        "topology": {"name": "full"},
        "partition": {"name": "shards", "per_node": 2},
        "model": {"name": "logistic"},
        "training": {"lr": 0.5, "batch_size": 16, "local_steps": 40},
        "evaluation": {"every": 0, "average": False},
    }
    return Experiment(**{**described, **changed})


def accuracy(run: Any) -> float:
    return float(run.summary["accuracy"]["mean"])


def simulated(described: Experiment, folder: Path) -> Simulation:
    simulation = Simulation(described, RunFolder.create(folder, described.name))
    simulation.run()
    return simulation


@pytest.mark.filterwarnings("ignore::shoal.topologies.graph.TopologyWarning")
def test_nodes_learn_from_the_data_of_others_in_both_engines(tmp_path: Path) -> None:
    described = experiment(simulation={"batching": "off"})
    alone = experiment(topology={"name": "edges", "edges": []})
    runs = [e.run(tmp_path) for e in (described, dataclasses.replace(described, engine="processes"), alone)]
    models = [np.stack([np.load(run.folder.model(node)) for node in range(5)]) for run in runs]
    assert np.array_equal(models[0], models[1])
    assert runs[0].summary["bytes_sent"] == runs[1].summary["bytes_sent"]
    assert accuracy(runs[2]) < 0.5  # each knows a few classes
    assert accuracy(runs[0]) == accuracy(runs[1]) > accuracy(runs[2]) + 0.35


def test_no_node_keeps_a_sample_twice_and_all_come_to_hold_nearly_all(tmp_path: Path) -> None:
    simulation = simulated(experiment(sharing={"name": "data", "samples": 400}), tmp_path)
    total = len(simulation.setup.data.train)
    for node in simulation.nodes:
        data = node.trainer.data  # type: ignore[attr-defined]
        held = data.sample(10 * total, np.random.default_rng(0))
        assert len(data) == len(held)
        assert len(np.unique(np.column_stack([held.x, held.y]), axis=0)) == len(held)
        assert 0.9 * total < len(data) <= total


def test_with_stacking_nodes_that_were_sent_samples_train_alone_and_alike(tmp_path: Path) -> None:
    apart, stacked = (
        simulated(experiment(simulation={"batching": way}, algorithm={"name": "dpsgd", "rounds": 3}), tmp_path)
        for way in ("off", "vmap")
    )
    for one, other in zip(apart.nodes, stacked.nodes, strict=True):
        np.testing.assert_allclose(one.params, other.params, atol=1e-3)
        assert one.trainer.samples == other.trainer.samples > 5 * 64


def test_works_of_nodes_with_added_samples_are_not_stacked() -> None:
    setup = Setup(experiment())
    trainers = [_trainer(setup, node) for node in range(3)]
    works = [Train(trainer, setup.initial) for trainer in trainers]
    assert len({work.batch_key for work in works}) == 1
    others = trainers[1].data.sample(20, np.random.default_rng(0))
    assert trainers[0].data.add(others) == 20
    assert len({work.batch_key for work in works}) == 2
    alone = [_trainer(setup, node) for node in range(3)]
    alone[0].data.add(others)
    expected = [trainer.train(setup.initial) for trainer in alone]
    for found, wanted in zip(StackedExecutor().run(works), expected, strict=True):
        np.testing.assert_allclose(found.params, wanted.params, atol=1e-4)


def _trainer(setup: Setup, node: int) -> TorchTrainer:
    return TorchTrainer(
        setup.trainer_factory.learner(setup.experiment.training), setup.parts[node], generator(1, "t", node), 0.01
    )


@pytest.mark.parametrize(
    "grouped",
    [
        {},
        {"group": [{"nodes": "3-4", "sharing": {"samples": 5}}]},
    ],
    ids=["all", "some"],
)
def test_a_process_pool_is_never_selected_and_rejected_if_requested(grouped: dict[str, Any]) -> None:
    described = experiment(**grouped)
    setup = Setup(described)
    assert choose_batching(described, setup) in ("off", "vmap")
    for way in ("off", "vmap"):
        assert choose_batching(dataclasses.replace(described, simulation={"batching": way}), setup) == way  # type: ignore[arg-type]
    pooled = dataclasses.replace(described, simulation={"batching": "pool"})  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match=r"simulation.batching = 'pool': .* use 'off' or 'vmap'"):
        choose_batching(pooled, setup)


def test_other_sharings_may_have_a_pool() -> None:
    described = experiment(sharing={"name": "full"}, simulation={"batching": "pool"})
    assert choose_batching(described, Setup(described)) == "pool"


def test_a_restored_node_has_the_samples_it_received(tmp_path: Path) -> None:
    simulation = simulated(experiment(), tmp_path)
    node = simulation.nodes[0]
    anew = Simulation(experiment(), RunFolder.create(tmp_path, "anew")).nodes[0]
    anew.restore(node.state())
    assert anew.samples == node.samples
    payloads = [n.sharing.outgoing(n.params, 9) for n in (node, anew)]
    assert np.array_equal(payloads[0].arrays["x"], payloads[1].arrays["x"])  # type: ignore[union-attr]


def test_ids_outside_the_embedding_are_rejected() -> None:
    ratings = Samples(np.array([[0, 1], [2, 0]], np.int32), np.array([1.0, 4.5], np.float32))
    data = NodeData(Data(ratings, ratings, 1, task="regression", sizes=(3, 2)), np.array([0]))
    data.validate(ratings.x, ratings.y)
    for x in ([[0, 2]], [[3, 0]], [[-1, 0]]):
        with pytest.raises(ValueError, match="expected them below"):
            data.validate(np.array(x, np.int32), np.array([1.0], np.float32))
    assert data.add(ratings) == 1


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_bytes_of_images_are_shared_as_they_are(engine: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (40, 4), np.uint8), "y": np.arange(40) % 2}
    np.savez(tmp_path / "train.npz", **arrays)
    np.savez(tmp_path / "test.npz", **arrays)
    run = Experiment(
        nodes=4,
        engine=engine,
        algorithm={"name": "dpsgd", "rounds": 3},
        sharing={"name": "data", "samples": 2},
        dataset={"name": "arrays", "path": str(tmp_path)},
        model={"name": "logistic"},
        simulation={"batching": "off"},
    ).run(tmp_path / "runs")
    assert run.status == "completed"
    assert run.summary["messages_rejected"] == 0
