"""Nodes find their peers from the graph, from a central sampler or by gossip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import models_of
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation.engine import Simulation
from shoal.errors import NodeError
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import End, Event, Round, RunFolder
from shoal.testing import FakeRuntime
from shoal.topologies.overlay import measure_overlay
from shoal.topologies.regular import Regular
from shoal.topologies.sampling.central import NEIGHBOURS, REACHED, CentralDiscovery, PeerSampler
from shoal.topologies.sampling.gossip import ANSWER, MAX_LEAD, PUSH, REQUEST, REQUEST_AHEAD, GossipSampler
from shoal.topologies.static import Full, Ring

ENGINES = ["simulation", "processes"]
TIMEOUTS: dict[str, Any] = {
    "simulation": {"batching": "off", "receive_timeout": 1.0},
    "processes": {"receive_timeout": 3.0},  # longer than any delay on a busy machine
}
REGULAR = {"name": "regular", "degree": 3, "dynamic": True}


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 8,
        "seed": 5,
        "algorithm": DPSGD(6),
        "partition": {"name": "shards", "per_node": 2},
        "model": {"name": "logistic"},
        "training": {"lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 0, "average": False},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def events(run: Any, what: str) -> dict[int, str]:
    found = {n: [r for r in run.folder.read(n) if isinstance(r, Event) and r.what == what] for n in range(9)}
    return {node: records[0].detail for node, records in found.items() if records}


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
        device={"step_seconds": 0.04},
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


# By gossip


@dataclass(frozen=True)
class Mix:
    """Average without training, from models that all differ."""

    rounds: int = 30

    async def run(self, node: Node) -> None:
        node.params = node.rng("start").standard_normal(node.params.size, np.float32)
        async for r in node.rounds(self.rounds):
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))


def mixed(tmp_path: Path, nodes: int, rounds: int, **changed: Any) -> Simulation:
    settings = {"topology": {"name": "gossip-sampler"}, "partition": {"name": "iid"}, **changed}
    simulation = Simulation(
        experiment(nodes=nodes, algorithm=Mix(rounds), checkpoint={"final": False}, **settings),
        RunFolder.create(tmp_path, "mixed"),
    )
    simulation.run()
    return simulation


def views(simulation: Simulation) -> Mapping[int, Any]:
    running = [n for n in simulation.nodes if n.id not in simulation.lost]
    return {node.id: node.discovery.known for node in running}  # type: ignore[attr-defined]


def test_gossip_links_keep_the_mean_and_lead_to_consensus(tmp_path: Path) -> None:
    simulation = mixed(tmp_path, 40, 30)
    started = np.stack([_start(simulation, n) for n in range(40)])
    ended = np.stack([node.params for node in simulation.nodes])
    assert np.allclose(started.mean(0), ended.mean(0), atol=1e-5)
    assert ended.std(0).max() < 0.01 * started.std(0).min()


def _start(simulation: Simulation, node: int) -> Any:
    from shoal.randomness import generator

    size = simulation.nodes[node].params.size
    return generator(simulation.setup.experiment.seed, "start", node).standard_normal(size, np.float32)


def test_views_approach_a_random_graph(tmp_path: Path) -> None:
    overlay = measure_overlay(views(mixed(tmp_path, 150, 40, topology=GossipSampler(degree=1, view=10, swapper=4))))
    assert len(overlay.components) == 1
    assert overlay.in_degree_std < 1.5 * overlay.random_in_degree_std
    assert overlay.clustering < 2 * overlay.random_clustering


def test_failed_nodes_leave_the_views_and_the_others_continue(tmp_path: Path) -> None:
    faults = [{"kind": "crash", "node": node, "round": 10} for node in range(0, 40, 4)]
    simulation = mixed(tmp_path, 40, 30, fault=faults)
    assert len(simulation.lost) == 10
    assert not {peer for known in views(simulation).values() for peer in known} & simulation.lost.keys()
    models = np.stack([n.params for n in simulation.nodes if n.id not in simulation.lost])
    assert models.std(0).max() < 0.05


@pytest.mark.parametrize("engine", ENGINES)
def test_nodes_learn_with_gossip_sampling_in_both_engines(engine: str, tmp_path: Path) -> None:
    run = experiment(engine=engine, topology={"name": "gossip-sampler", "degree": 2}, algorithm=DPSGD(30)).run(tmp_path)
    assert run.status == "completed"
    assert run.summary["messages_rejected"] == 0
    assert run.summary["accuracy"]["mean"] > 0.5


def test_invalid_gossip_is_rejected_and_counted() -> None:
    invalid = [
        Message(1, PUSH, 0, Payload({"ids": np.array([1, 99], np.uint32), "ages": np.zeros(2, np.uint32)})),
        Message(1, PUSH, 0, Payload({"ids": np.array([1], np.uint32)})),
        Message(1, PUSH, 0, Payload({"ids": np.array([1.5]), "ages": np.zeros(1, np.uint32)})),
        Message(9, REQUEST, 2, Payload({})),
    ]
    fake = FakeRuntime(*invalid, *(Message(p, ANSWER, 2, Payload({}, {"yes": True})) for p in (1, 2)))
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), topology=Ring())
    discovery = GossipSampler(degree=2).discovery()

    async def three_rounds() -> None:
        async for r in node.rounds(3):
            peers = await discovery.peers(node, r)
            assert peers.receivers == (1, 2)
            await node.sleep(1.0)

    fake.run(three_rounds())
    assert node.rejected_count == 4


def test_requests_for_distant_rounds_are_not_granted_or_stored() -> None:
    rounds = [2, 2, 2, 10**6, 10**9, REQUEST_AHEAD + MAX_LEAD - 1, REQUEST_AHEAD + MAX_LEAD + 1]
    fake = FakeRuntime(*(Message(1 + index % 2, REQUEST, wanted, Payload({})) for index, wanted in enumerate(rounds)))
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), topology=Ring())
    discovery = GossipSampler(degree=1).discovery()

    async def first_round() -> None:
        await discovery.peers(node, 0)
        await node.sleep(1.0)

    fake.run(first_round())
    answers = [(to, m.round, m.payload.fields["yes"]) for to, m in fake.sent if m.kind == ANSWER]
    assert [yes for _, _, yes in answers] == [True, False, True, False, False, True, False]
    assert set(discovery.state()["links"]) == {"0", "2", str(REQUEST_AHEAD + MAX_LEAD - 1)}


def test_gossip_sampling_numbers_exchanges_beyond_the_rounds(tmp_path: Path) -> None:
    """Muffliato numbers its exchanges consecutively over all rounds."""
    algorithm = {"name": "muffliato", "rounds": 4, "gossip": 5, "accelerated": False, "sigma": 0.0}
    described = experiment(nodes=12, algorithm=algorithm, topology={"name": "gossip-sampler", "degree": 2})
    simulation = Simulation(replace(described, partition={"name": "iid"}), RunFolder.create(tmp_path, "exchanges"))
    linked: list[int] = []
    for node in simulation.nodes:
        _count_links(node, linked)
    simulation.run()
    assert len(linked) == 12 * 20
    assert sum(linked[-12:]) > 12


def _count_links(node: Node, linked: list[int]) -> None:
    find = node.peers

    async def find_and_count(round: int) -> Any:
        peers = await find(round)
        linked.append(len(peers.receivers))
        return peers

    node.peers = find_and_count  # type: ignore[method-assign]


def test_peer_that_no_longer_answers_costs_one_timeout() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), topology=Ring())
    discovery = GossipSampler(degree=2, patience=10.0).discovery()
    for wanted in range(2, 8):
        fake.deliver(Message(1, ANSWER, wanted, Payload({}, {"yes": True})))  # node 2 never answers

    async def rounds() -> list[tuple[int, ...]]:
        return [(await discovery.peers(node, r)).receivers for r in range(8)]

    found = fake.run(rounds())
    assert found == [(1, 2)] * 2 + [(1,)] * 6
    assert fake.now() == 10.0
    assert discovery.known == (1,)


def test_peer_that_timed_out_counts_again_when_it_sends() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), topology=Ring())
    node.timed_out_peers = frozenset({2})
    discovery = GossipSampler(degree=2).discovery()
    fake.deliver(Message(1, ANSWER, 2, Payload({}, {"yes": True})), Message(2, REQUEST, 2, Payload({})))

    async def rounds() -> Any:
        for r in range(2):
            await discovery.peers(node, r)
            await node.sleep(1.0)
        return await discovery.peers(node, 2)

    assert fake.run(rounds()).weights.keys() == {1, 2}


def test_gossip_discovery_is_restored_from_its_state() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(4, np.float32), topology=Ring())
    discovery, restored = GossipSampler(degree=1).discovery(), GossipSampler(degree=1).discovery()
    fake.run(discovery.peers(node, 0))
    restored.restore(discovery.state())
    assert restored.state() == discovery.state()
    assert restored.known == discovery.known
    assert fake.run(restored.peers(node, 0)) == fake.run(discovery.peers(node, 0))


# Changed by the algorithm


@dataclass(frozen=True)
class RingThenFull:
    """D-PSGD that changes the graph on its way."""

    rounds: int = 6

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):
            if r == 3:
                node.set_topology(Full(), "uniform")
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))


@pytest.mark.parametrize("engine", ENGINES)
def test_algorithm_may_change_the_graph_during_a_run(engine: str, tmp_path: Path) -> None:
    run = experiment(engine=engine, topology={"name": "ring"}, algorithm={"name": f"{__file__}:RingThenFull"}).run(
        tmp_path
    )
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
