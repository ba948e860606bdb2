"""RelaySum: nodes relay sums along a tree, and from the tree's diameter on every model has the same weight.

Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi: RelaySum for Decentralized Deep Learning on Heterogeneous Data,
NeurIPS 2021 (arXiv:2110.04175).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from shoal.algorithms.support.peer_monitor import PeerMonitor
from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.graph import Graph
from shoal.topologies.inspection import graph_of, is_tree
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

RELAY = "relay"


@dataclass(frozen=True)
class RelaySum:
    """Vogels et al. 2021: train, relay sums of models along a tree, average all n models.

    With x½ = train(x) and N_i the neighbours of i, node i sends j the sum m_ij = x½_i + Σ_{k ∈ N_i, k ≠ j} m_ki, with
    m_ki as last received, and the number c_ij of models in it. Then x_i ← (x½_i + Σ_j m_ji + (n − c_i) x⁰)/n, where
    c_i = 1 + Σ_j c_ji, and x⁰, the first model, replaces the models of nodes too far away to have arrived yet.

    If a neighbour fails or times out, its sum is missing, with all models that it would have relayed. The other nodes
    then divide by the number of models that they have. After a failure the remaining parts of the tree continue.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        first, n = node.algorithm_state.setdefault("first", node.params), node.nodes
        check = partial(_check, size=first.size, nodes=n)
        received = _restored(node.algorithm_state.get("received", {}))
        reach, monitor = _reach(node.mixing.graph, node.id), PeerMonitor(node)
        async for r in node.rounds(self.rounds):
            half = await node.train(node.params)
            neighbours = await node.peers(r)
            await node.send(neighbours, partial(_relayed, half, received), round=r, kind=RELAY)
            received = await monitor.receive(neighbours, round=r, kind=RELAY, check=check)
            total, count = _sum(half, received.values())
            in_reach = reach[min(r, len(reach) - 1)]
            missing = in_reach - count
            total = total + first * np.float32(n - in_reach)
            node.params = total / np.float32(max(1, n - missing))
            node.algorithm_state["received"] = {
                str(j): [m.arrays["sum"], m.fields["count"]] for j, m in received.items()
            }

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        if graph is not None and is_tree(graph):
            return []
        return [
            f"topology = {experiment.topology.name!r}: 'relaysum' needs a tree, an undirected connected graph without "
            "cycles that does not change; use topology = { name = 'tree' }, { name = 'star' }, "
            "or { name = 'grid', rows = 1 } for a chain"
        ]


def _relayed(half: Params, received: Mapping[NodeId, Payload], to: NodeId) -> Payload:
    """The sum for one neighbour: all models except the models that it relayed."""
    total, count = _sum(half, (payload for peer, payload in received.items() if peer != to))
    return Payload({"sum": total}, {"count": count})


def _sum(half: Params, relayed: Iterable[Payload]) -> tuple[Params, int]:
    """The sum of the node's own model and all relayed ones, and the number of models in it."""
    total, count = half, 1
    for payload in relayed:
        total, count = total + payload.arrays["sum"], count + int(payload.fields["count"])
    return total, count


def _restored(received: Mapping[str, Any]) -> Mapping[NodeId, Payload]:
    return {int(peer): Payload({"sum": total}, {"count": count}) for peer, (total, count) in received.items()}


def _reach(graph: Graph, node: NodeId) -> list[int]:
    """How many nodes of a tree are at most 1, 2, 3, … hops away from `node`, itself included."""
    counts = [1]
    frontier = [(node, node)]
    while frontier:
        frontier = [(peer, at) for at, before in frontier for peer in graph.links(at, 0).senders if peer != before]
        counts.append(counts[-1] + len(frontier))
    return counts[1:]


def _check(payload: Payload, size: int, nodes: int) -> None:
    check_vectors(payload, size, ("sum",))
    count = payload.fields.get("count")
    if type(count) is not int or not 1 <= count < nodes:
        raise MessageError(f"count = {count!r}: expected a number of models from 1 to {nodes - 1}")
