"""Experiments whose nodes find their peers by a protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.algorithms.dpsgd import DPSGD
from shoal.experiment import Experiment
from shoal.node import Node
from shoal.results.records import Event
from shoal.topologies.static import Full

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
