"""Nodes that find their peers by gossip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer_experiments import ENGINES, experiment
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation.engine import Simulation
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import RunFolder
from shoal.testing import FakeRuntime
from shoal.topologies.overlay import measure_overlay
from shoal.topologies.sampling.gossip import ANSWER, MAX_LEAD, PUSH, REQUEST, REQUEST_AHEAD, GossipSampler
from shoal.topologies.static import Ring

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
