"""Nodes find their peers from the graph, from a central sampler or by gossip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peer_experiments
from conftest import models_of
from peer_experiments import ENGINES, REGULAR, TIMEOUTS, events, experiment
from shoal.algorithms.dpsgd import DPSGD
from shoal.errors import NodeError
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.results.records import End, Event, Round
from shoal.testing import FakeRuntime
from shoal.topologies.regular import Regular
from shoal.topologies.sampling.central import NEIGHBOURS, REACHED, CentralDiscovery, PeerSampler

pytestmark = pytest.mark.slow

# The central sampler


@pytest.mark.parametrize("graph", [REGULAR, {"name": "star"}, {"name": "one-peer-exponential"}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_central_sampler_gives_the_same_models_as_its_graph(graph: dict[str, Any], engine: str, tmp_path: Path) -> None:
    known = experiment(topology=graph).run(tmp_path)
    sampled = experiment(topology={"name": "peer-sampler", "graph": graph}, engine=engine).run(tmp_path)
    assert sampled.status == "completed"
    assert np.array_equal(models_of(known), models_of(sampled))
    assert sampled.summary["nodes"] == 8
    assert sampled.summary["rounds"] == 6


def test_static_graph_is_sent_once(tmp_path: Path) -> None:
    known = experiment(topology={"name": "ring"}).run(tmp_path)
    sampled = experiment(topology={"name": "peer-sampler", "graph": "ring"}).run(tmp_path)
    assert sampled.summary["messages_sent"] == known.summary["messages_sent"] + 8 + 8


@pytest.mark.parametrize("engine", ENGINES)
def test_nodes_keep_their_last_peers_if_the_sampler_fails(engine: str, tmp_path: Path) -> None:
    run = experiment(
        engine=engine,
        topology={"name": "peer-sampler", "graph": REGULAR},
        fault=[{"kind": "crash", "node": 8, "round": 3}],
    ).run(tmp_path)
    assert run.status == "incomplete"
    assert list(run.summary["lost"]) == ["8"]
    assert run.summary["rounds"] == 6
    details = events(run, "peer sampler unreachable")
    assert list(details) == list(range(8))
    # A real failure may be noticed before the last messages arrive: then round 2 is missing too.
    missing = (3,) if engine == "simulation" else (2, 3)
    assert set(details.values()) <= {
        f"round {r}: node 8 failed; this node keeps the peers of round {r - 1}" for r in missing
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_nodes_keep_their_last_peers_if_the_sampler_hangs(engine: str, tmp_path: Path) -> None:
    run = experiment(
        engine=engine,
        topology={"name": "peer-sampler", "graph": REGULAR},
        fault=[{"kind": "hang", "node": 8, "round": 3}],
        **TIMEOUTS,
    ).run(tmp_path)
    assert run.status == "incomplete"
    assert list(run.summary["lost"]) == ["8"]
    assert "hung" in run.summary["lost"]["8"]
    assert run.summary["rounds"] == 6
    details = events(run, "peer sampler unreachable")
    assert list(details) == list(range(8))
    assert set(details.values()) == {"round 3: node 8 timed out; this node keeps the peers of round 2"}


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_end_if_the_server_hangs(engine: str, tmp_path: Path) -> None:
    run = experiment(
        engine=engine,
        algorithm={"name": "fedavg", "rounds": 6, "fraction": 0.5},
        fault=[{"kind": "hang", "node": 8, "round": 3}],
        **TIMEOUTS,
    ).run(tmp_path)
    assert run.status == "incomplete"
    assert list(run.summary["lost"]) == ["8"]
    details = events(run, "server unreachable")
    assert list(details) == list(range(8))
    assert all(detail.startswith("node 8 timed out; this node keeps") for detail in details.values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "service",
    [
        {"topology": {"name": "peer-sampler", "graph": REGULAR}},
        {"algorithm": {"name": "parameter-server", "rounds": 6}},
    ],
    ids=["sampler", "server"],
)
def test_learning_node_that_hangs_is_lost_alone(engine: str, service: Any, tmp_path: Path) -> None:
    run = experiment(engine=engine, fault=[{"kind": "hang", "node": 1, "round": 3}], **service, **TIMEOUTS).run(
        tmp_path
    )
    assert run.status == "incomplete"
    assert list(run.summary["lost"]) == ["1"]
    assert any(isinstance(record, End) for record in run.folder.read(8))


def test_client_that_is_not_sampled_for_long_keeps_its_server(tmp_path: Path) -> None:
    run = experiment(
        algorithm={"name": "fedavg", "rounds": 60, "fraction": 0.1},
        simulation={"batching": "off", "receive_timeout": 0.05},
        speed={"step_seconds": 0.04},
    ).run(tmp_path)
    assert run.status == "completed"
    assert "server unreachable" not in run.summary["events"]


@pytest.mark.parametrize("engine", ENGINES)
def test_fault_strikes_in_the_next_round_of_its_node(engine: str, tmp_path: Path) -> None:
    described = experiment(engine=engine, algorithm={"name": "fedavg", "rounds": 20, "fraction": 0.25})
    rounds = [r.round for r in described.run(tmp_path).folder.read(1) if isinstance(r, Round)]
    missed = next(r for r in range(1, 20) if r not in rounds and rounds[-1] > r)
    run = replace(described, fault=[{"kind": "crash", "node": 1, "round": missed}]).run(tmp_path)
    assert list(run.summary["lost"]) == ["1"]
    assert events(run, "fault")[1] == f"crash at round {min(r for r in rounds if r > missed)}"


def test_sampler_uses_a_graph_built_from_labels(tmp_path: Path) -> None:
    graph = {"name": "d-cliques", "size": 3}
    known = experiment(topology=graph).run(tmp_path)
    sampled = experiment(topology={"name": "peer-sampler", "graph": graph}).run(tmp_path)
    assert np.array_equal(models_of(known), models_of(sampled))


def test_report_of_an_impossible_round_is_rejected() -> None:
    fake = FakeRuntime(Message(0, REACHED, 10**9, Payload({})), Message(1, REACHED, 0, Payload({})))
    fake.deliver(Message(2, REACHED, 0, Payload({})), Message(2, REACHED, 5, Payload({})), at=1.0)
    node = fake.node(3, nodes=3, params=np.zeros(4, np.float32), topology=Regular(2, dynamic=True))

    async def serve_for_two_seconds() -> None:
        node.background(PeerSampler(Regular(2, dynamic=True)).serve(node))
        await node.sleep(2.0)

    fake.run(serve_for_two_seconds())
    assert node.rejected_count == 1
    assert [message.round for to, message in fake.sent if to == 0] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("skipped", "rejected"), [(64, 0), (65, 1)])
def test_node_may_report_a_round_that_is_a_little_ahead(skipped: int, rejected: int) -> None:
    fake = FakeRuntime(Message(0, REACHED, skipped, Payload({})))
    node = fake.node(3, nodes=3, params=np.zeros(4, np.float32), topology=Regular(2, dynamic=True))

    async def serve_for_a_second() -> None:
        node.background(PeerSampler(Regular(2, dynamic=True)).serve(node))
        await node.sleep(1.0)

    fake.run(serve_for_a_second())
    assert node.rejected_count == rejected
    assert max(message.round for _, message in fake.sent) == (0 if rejected else 65)


def test_node_without_a_server_raises_an_error() -> None:
    node = FakeRuntime().node(nodes=3, params=np.zeros(4, np.float32))
    with pytest.raises(NodeError, match="node 0 has no server: the experiment's algorithm has no method `serve`"):
        node.server  # noqa: B018


def test_nodes_train_alone_if_the_sampler_fails_at_once(tmp_path: Path) -> None:
    run = experiment(
        topology={"name": "peer-sampler", "graph": REGULAR}, fault=[{"kind": "crash", "node": 8, "round": 0}]
    ).run(tmp_path)
    assert set(events(run, "peer sampler unreachable").values()) == {
        "round 0: node 8 failed; this node keeps no neighbours: it never received any"
    }
    assert run.summary["rounds"] == 6


def neighbours(round: int, **changed: Any) -> Message:
    arrays = {"to": np.array([1, 2], np.uint32), "of": np.array([1, 2], np.uint32), "weights": np.array([0.3, 0.3])}
    return Message(3, NEIGHBOURS, round, Payload({**arrays, **changed}, {"lasting": False}))


def test_kept_peers_that_time_out_are_not_waited_for_twice() -> None:
    fake = FakeRuntime(neighbours(0), Message(1, "model", 0, Payload({"params": np.ones(4, np.float32)})))
    fake.mark_failed(3, at=0.5)
    node = fake.node(
        nodes=3,
        params=np.zeros(4, np.float32),
        services={"topology": 3},
        receive_timeout=5.0,
        discovery=CentralDiscovery(),
    )
    fake.deliver(*(Message(1, "model", r, Payload({"params": np.ones(4, np.float32)})) for r in (1, 2)))
    fake.run(DPSGD(rounds=3).run(node))
    assert fake.now() == pytest.approx(3 + 5)  # three trainings, and one timeout of node 2
    assert [r.what for r in fake.records if isinstance(r, Event)].count("peers dropped") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"to": np.array([1, 1], np.uint32)},
        {"to": np.array([0, 1], np.uint32)},
        {"of": np.array([1, 7], np.uint32)},
        {"of": np.array([1, 2], np.int64)},
        {"weights": np.array([0.3, np.nan])},
        {"weights": np.array([0.9, 0.9])},
        {"weights": np.array([0.3])},
    ],
    ids=["repeated", "itself", "out of range", "dtype", "nan", "above 1", "short"],
)
def test_invalid_neighbours_are_rejected_and_counted(changed: dict[str, Any]) -> None:
    fake = FakeRuntime(neighbours(0, **changed), neighbours(0))
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), services={"topology": 3})
    peers = fake.run(CentralDiscovery().peers(node, 0))
    assert peers.receivers == (1, 2)
    assert node.rejected_count == 1


def test_central_discovery_is_restored_from_its_state() -> None:
    fake = FakeRuntime(neighbours(0))
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), services={"topology": 3})
    discovery, restored = CentralDiscovery(), CentralDiscovery()
    peers = fake.run(discovery.peers(node, 0))
    restored.restore(discovery.state())
    assert FakeRuntime().run(restored.peers(node, 0)) == peers


# Changed by the algorithm


@pytest.mark.parametrize("engine", ENGINES)
def test_algorithm_may_change_the_graph_during_a_run(engine: str, tmp_path: Path) -> None:
    run = experiment(
        engine=engine, topology={"name": "ring"}, algorithm={"name": f"{peer_experiments.__file__}:RingThenFull"}
    ).run(tmp_path)
    assert run.summary["messages_sent"] == 8 * (3 * 2 + 3 * 7)
    models = models_of(run)
    assert np.allclose(models, models[0], atol=1e-6)  # on a full graph all models agree after every round


# Invalid options


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            {"name": "peer-sampler", "graph": "rign"},
            "topology.graph.name = 'rign': unknown topology 'rign'; did you mean 'ring'",
        ),
        (
            {"name": "peer-sampler", "graph": {"name": "regular", "degre": 4}},
            "topology.graph.degre: unknown key; did you mean 'degree'",
        ),
        (
            {"name": "peer-sampler", "graph": {"name": "peer-sampler", "graph": "ring"}},
            "topology.graph = 'peer-sampler': its nodes find their peers by a protocol",
        ),
        ({"name": "peer-sampler", "graph": "gossip-sampler"}, "topology.graph = 'gossip-sampler': its nodes find"),
        ({"name": "peer-sampler", "graph": {"name": "regular", "degree": 8}}, "topology.graph: .*8"),
        ({"name": "gossip-sampler", "view": 4, "healer": 3}, "their sum at most half of size"),
        ({"name": "gossip-sampler", "degree": 0}, "topology.degree = 0: expected integer at least 1"),
    ],
    ids=[
        "unknown graph",
        "misspelt key",
        "a sampler in a sampler",
        "gossip in a sampler",
        "too many links",
        "healer too large",
        "no degree",
    ],
)
def test_invalid_samplers_are_rejected(topology: dict[str, Any], message: str) -> None:
    from shoal.errors import ExperimentError

    with pytest.raises(ExperimentError, match=message):
        experiment(topology=topology)


def test_sampler_object_has_the_table_of_a_file() -> None:
    made = experiment(topology=PeerSampler(Regular(degree=3, dynamic=True)))
    assert made.to_table()["topology"] == {"name": "peer-sampler", "graph": REGULAR, "weights": "metropolis-hastings"}
    assert Experiment.from_table(made.to_table()).topology == made.topology
