"""A node's state is all that its next round depends on: nodes made anew from it end where the old ones would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.experiment import Experiment
from shoal.node import Node
from shoal.randomness import generator
from shoal.records import RunFolder
from shoal.simulation.engine import Simulation
from shoal.state import generator_state, restore_generator


@dataclass(frozen=True)
class Part:
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
    experiment = Experiment(**{**settings, "algorithm": Part(last), **changed})
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
def test_nodes_restored_after_three_rounds_end_as_those_that_ran_six(
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


ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
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
