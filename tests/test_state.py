"""A node's state has all that its next round depends on: restored nodes end like the original ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.engines.simulation.engine import Simulation
from shoal.experiment import Experiment
from shoal.experiment.registry import from_table, to_table
from shoal.node import Node
from shoal.randomness import generator
from shoal.results.records import Round, RunFolder
from shoal.state import generator_state, restore_generator
from shoal.topologies.files import File
from shoal.topologies.given import Edges
from shoal.topologies.regular import Regular
from shoal.topologies.sampling.central import PeerSampler
from shoal.topologies.static import Full, Ring
from shoal.training.optimizers import arrays_to_tensors


@dataclass(frozen=True)
class FirstRounds:
    """D-PSGD to the round `last`, with some noise of its own."""

    last: int

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.last + 1):
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))
            node.params = node.params + node.rng("noise").standard_normal(node.params.size, np.float32) * 1e-3


def simulation(last: int, folder: Path, **changed: Any) -> Simulation:
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 3,
        "topology": {"name": "ring"},
        "partition": {"name": "shards", "per_node": 2},
        "model": {"name": "logistic"},
        "training": {"lr": 0.1, "batch_size": 50, "momentum": 0.9, "local_steps": 3},
        "evaluation": {"every": 0, "average": False},
        "simulation": {"batching": "off"},
    }
    experiment = Experiment(**{**settings, "algorithm": FirstRounds(last), **changed})
    return Simulation(experiment, RunFolder.create(folder, "state"))


def models(simulation: Simulation) -> Any:
    return np.stack([node.params for node in simulation.nodes])


@pytest.mark.parametrize(
    "sharing",
    [
        {"name": "full"},
        {"name": "random", "fraction": 0.2},
        {"name": "topk", "fraction": 0.2, "values": "int8"},
        {"name": "choco"},
        {"name": "deepsqueeze"},
        {"name": "powergossip"},
        {"name": "jwins"},
        {"name": "qsgd"},
        {"name": "data", "samples": 4},
    ],
    ids=lambda s: s["name"],
)
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0}], ids=["momentum", "adam"])
def test_nodes_restored_after_three_rounds_end_like_nodes_that_ran_six(
    sharing: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    training = {"lr": 0.1, "batch_size": 50, "momentum": 0.9, "local_steps": 3, **optimizer}
    settings = {"sharing": sharing, "training": training}
    whole = simulation(5, tmp_path, **settings)
    whole.run()
    first = simulation(2, tmp_path, **settings)
    first.run()
    rest = simulation(5, tmp_path, **settings)
    for node, before in zip(rest.nodes, first.nodes, strict=True):
        node.restore(over_the_disk(before.state()))
    rest.run()
    assert np.array_equal(models(rest), models(whole))
    assert not np.array_equal(models(first), models(whole))


DYNAMIC = {"name": "regular", "degree": 2, "dynamic": True}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "peer sampler": {"algorithm": {"name": "dpsgd"}, "topology": {"name": "peer-sampler", "graph": DYNAMIC}},
    "peer sampler, static": {"algorithm": {"name": "dpsgd"}, "topology": {"name": "peer-sampler", "graph": "ring"}},
    "rewired beside a sampler": {
        "algorithm": {"name": "el-local", "peers": 2},
        "topology": {"name": "peer-sampler", "graph": DYNAMIC},
    },
    "rewired beside gossip": {
        "algorithm": {"name": "d-cliques", "size": 2},
        "topology": {"name": "gossip-sampler", "degree": 1},
    },
    "el-oracle": {"algorithm": {"name": "el-oracle", "degree": 2}},
    "el-local": {"algorithm": {"name": "el-local", "peers": 2}},
    "sgp": {"topology": {"name": "one-peer-exponential"}},
    "relaysum": {"topology": {"name": "star"}},
    "d2": {},
    "gradient-tracking": {},
    "qg-dsgdm": {},
    "muffliato": {},
    "d-cliques": {"algorithm": {"name": "d-cliques", "size": 2}},
    "ipls": {},
    "shatter": {"algorithm": {"name": "shatter", "virtual_nodes": 3, "degree": 2}},
    "fedavg": {"algorithm": {"name": "fedavg", "fraction": 0.5, "server": "adam"}},
    "parameter-server": {"algorithm": {"name": "parameter-server", "server": "momentum"}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_restored_after_three_rounds_ends_as_one_that_ran_six(name: str, tmp_path: Path) -> None:
    settings = {"algorithm": {"name": name}, "training": {"lr": 0.1, "batch_size": 50}, **ALGORITHMS[name]}

    def run(rounds: int, states: Any = None) -> Simulation:
        algorithm = {**settings["algorithm"], "rounds": rounds}
        made = simulation(0, tmp_path, **{**settings, "algorithm": algorithm})
        for node, state in zip(made.nodes, states or [], strict=False):
            node.restore(state)
        made.run()
        return made

    whole, first = run(6), run(3)
    rest = run(6, [over_the_disk(node.state()) for node in first.nodes])
    assert np.array_equal(models(rest), models(whole))
    assert not np.array_equal(models(first), models(whole))


@dataclass(frozen=True)
class RingThenFull(FirstRounds):
    """Changes the graph on its way."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.last + 1):
            if r == 1:
                node.set_topology(Full(), "uniform")
            peers = await node.peers(r)
            node.params = await node.train(node.params)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))


@pytest.mark.parametrize("topology", [{"name": "ring"}, {"name": "gossip-sampler", "degree": 1}], ids=str)
def test_a_node_that_was_rewired_is_restored_to_the_graph_it_had(topology: Any, tmp_path: Path) -> None:
    whole, first = (simulation(0, tmp_path, algorithm=RingThenFull(n), topology=topology) for n in (5, 2))
    whole.run()
    first.run()
    rest = simulation(0, tmp_path, algorithm=RingThenFull(5), topology=topology)
    for node, before in zip(rest.nodes, first.nodes, strict=True):
        node.restore(over_the_disk(before.state()))
    rest.run()
    assert np.array_equal(models(rest), models(whole))


def test_a_graph_that_was_set_is_created_from_plain_data() -> None:
    for topology in (Regular(3, dynamic=True), Edges(((0, 1), (1, 2))), File(Path("graph.txt")), PeerSampler(Ring())):
        assert from_table("topology", over_the_disk(to_table("topology", topology))) == topology


@pytest.mark.parametrize("network", [{"name": "ideal"}, {"name": "uniform", "latency": 0.01}], ids=lambda n: n["name"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_nodes_that_ask_around_go_on_from_their_state(at: int, network: Any, tmp_path: Path) -> None:
    """Links that were agreed on stay valid: no node waits for a peer that does not know the link."""
    settings = {"nodes": 10, "topology": {"name": "gossip-sampler", "degree": 2}, "partition": {"name": "iid"}}
    whole = simulation(8, tmp_path, network=network, **settings)
    states: dict[int, Any] = {}
    for node in whole.nodes:
        _keep_state(node, at, states)
    whole.run()
    rest = simulation(8, tmp_path, network=network, **settings)
    linked: dict[tuple[int, int], set[int]] = {}
    for node in rest.nodes:
        node.restore(over_the_disk(states[node.id]))
        _keep_links(node, linked)
    assert rest.run().status == "completed"
    assert {round for round, _ in linked} == set(range(at, 9))
    for (round, node), peers in linked.items():
        assert all(node in linked[round, peer] for peer in peers)
    assert sum(len(peers) for (round, _), peers in linked.items() if round > at + 1) > 0


def _keep_state(node: Node, at: int, states: dict[int, Any]) -> None:
    """Have the state of `node` kept when it begins a round."""
    rounds = node.rounds

    async def and_keep(count: int) -> AsyncIterator[int]:
        async for round in rounds(count):
            if round == at:
                states[node.id] = node.state()
            yield round

    node.rounds = and_keep  # type: ignore[method-assign]


def _keep_links(node: Node, linked: dict[tuple[int, int], set[int]]) -> None:
    find = node.peers

    async def and_keep(round: int) -> Any:
        peers = await find(round)
        linked[round, node.id] = set(peers.receivers)
        return peers

    node.peers = and_keep  # type: ignore[method-assign]


def test_a_restored_sampler_does_not_send_past_rounds(tmp_path: Path) -> None:
    settings = {"topology": {"name": "peer-sampler", "graph": DYNAMIC}}
    first, rest = simulation(2, tmp_path / "first", **settings), simulation(5, tmp_path / "rest", **settings)
    first.run()
    for node, before in zip(rest.nodes, first.nodes, strict=True):
        node.restore(over_the_disk(before.state()))
    rest.run()
    folder = RunFolder(next((tmp_path / "rest" / "state").iterdir()))
    assert [r.round for r in folder.read(4) if isinstance(r, Round)] == [3, 4, 5, 6]


def test_a_state_does_not_change_when_training_goes_on(tmp_path: Path) -> None:
    trainer = simulation(2, tmp_path).nodes[0].trainer
    params = np.zeros(650, np.float32)
    trainer.train(params)
    state = trainer.state()  # type: ignore[attr-defined]
    before = over_the_disk(state["optimizer"])
    trainer.train(params)
    assert np.array_equal(state["optimizer"]["momentum_buffer"], before["momentum_buffer"])


def test_optimizer_state_is_restored_on_the_training_device() -> None:
    import torch

    state = {"exp_avg": np.ones(3, np.float32), "step": np.array(4.0, np.float32)}
    restored = arrays_to_tensors(state, torch.device("meta"))
    assert (restored["exp_avg"].device.type, restored["step"].device.type) == ("meta", "cpu")


def over_the_disk(state: Any) -> Any:
    """A state as MessagePack would keep it: nothing in it may need more."""

    def encode(value: Any) -> Any:
        assert isinstance(value, np.ndarray | np.generic), type(value)
        array = np.asarray(value)
        return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"dtype", "shape", "bytes"}:
                return np.frombuffer(value["bytes"], value["dtype"]).reshape(value["shape"]).copy()
            return {key: decode(inner) for key, inner in value.items()}
        return [decode(inner) for inner in value] if isinstance(value, list) else value

    return decode(msgspec.msgpack.decode(msgspec.msgpack.encode(state, enc_hook=encode)))


@pytest.mark.parametrize("draw", [lambda g: g.random(), lambda g: int(g.integers(2**31, dtype=np.uint32))])
def test_a_generator_goes_on_from_where_it_stood(draw: Callable[[Any], Any]) -> None:
    one, other = generator(1, "a"), generator(2, "b")
    draw(one)  # half of a 64-bit word may be left
    restore_generator(other, generator_state(one))
    assert [draw(one) for _ in range(5)] == [draw(other) for _ in range(5)]
