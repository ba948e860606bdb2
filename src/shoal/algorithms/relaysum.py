"""RelaySum: on a tree, sums are relayed, and every model counts alike from the tree's diameter on.

Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi: RelaySum for Decentralized Deep Learning on Heterogeneous Data,
NeurIPS 2021 (arXiv:2110.04175).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from shoal.algorithms.support.presence import PeerMonitor
from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.graph import Graph
from shoal.topologies.inspection import directed, graph_of
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

RELAY = "relay"


@dataclass(frozen=True)
class RelaySum:
    """Vogels et al. 2021: train, relay sums of models along a tree, average all n models.

    With x½ = train(x) and N_i the neighbours of i, node i tells j the sum m_ij = x½_i + Σ_{k ∈ N_i, k ≠ j} m_ki, with
    m_ki as last heard, and the number c_ij of models in it. Then x_i ← (x½_i + Σ_j m_ji + (n − c_i) x⁰)/n, where
    c_i = 1 + Σ_j c_ji, and x⁰, the first model, stands for those that are too far away to be heard yet.

    A neighbour that has died, or kept silent in a round, is missing from the sums, and so is all that it would have
    relayed: the others divide by so many fewer. What a death leaves of the tree goes on in parts.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        first, n = node.memory.setdefault("first", node.params), node.nodes
        check = partial(_check, size=first.size, nodes=n)
        heard = _remembered(node.memory.get("heard", {}))
        reach, listener = _reach(node.mixing.graph, node.id), PeerMonitor(node)
        async for r in node.rounds(self.rounds):
            half = await node.train(node.params)
            neighbours = await node.peers(r)
            await node.send(neighbours, partial(_relayed, half, heard), round=r, kind=RELAY)
            heard = await listener.hear(neighbours, round=r, kind=RELAY, check=check)
            total, count = _sum(half, heard.values())
            in_reach = reach[min(r, len(reach) - 1)]
            missing = in_reach - count
            total = total + first * np.float32(n - in_reach)
            node.params = total / np.float32(max(1, n - missing))
            node.memory["heard"] = {str(j): [m.arrays["sum"], m.fields["count"]] for j, m in heard.items()}

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        if graph is not None and _is_tree(graph):
            return []
        return [
            f"topology = {experiment.topology.name!r}: 'relaysum' relays sums along a tree, a connected graph without "
            "circles that stays as it is; use topology = { name = 'tree' }, { name = 'star' }, "
            "or { name = 'grid', rows = 1 } for a chain"
        ]


def _relayed(half: Params, heard: Mapping[NodeId, Payload], to: NodeId) -> Payload:
    total, count = _sum(half, (said for peer, said in heard.items() if peer != to))
    return Payload({"sum": total}, {"count": count})


def _sum(half: Params, relayed: Iterable[Payload]) -> tuple[Params, int]:
    """The own model and those that were relayed, and how many they are."""
    total, count = half, 1
    for said in relayed:
        total, count = total + said.arrays["sum"], count + int(said.fields["count"])
    return total, count


def _remembered(heard: Mapping[str, Any]) -> Mapping[NodeId, Payload]:
    return {int(peer): Payload({"sum": total}, {"count": count}) for peer, (total, count) in heard.items()}


def _reach(graph: Graph, node: NodeId) -> list[int]:
    """How many nodes of a tree are at most 1, 2, 3, … links away from `node`, itself among them."""
    counts = [1]
    frontier = [(node, node)]
    while frontier:
        frontier = [(peer, at) for at, before in frontier for peer in graph.links(at, 0).of if peer != before]
        counts.append(counts[-1] + len(frontier))
    return counts[1:]


def _is_tree(graph: Graph) -> bool:
    if not graph.static or directed(graph):
        return False
    if sum(graph.degree(node, 0) for node in range(graph.nodes)) != 2 * (graph.nodes - 1):
        return False
    # As many links as a tree: one in which all are reached from node 0.
    reached, frontier = {0}, [0]
    for at in frontier:  # grows while we walk it
        found = [peer for peer in graph.links(at, 0).of if peer not in reached]
        reached.update(found)
        frontier += found
    return len(reached) == graph.nodes


def _check(payload: Payload, size: int, nodes: int) -> None:
    check_vectors(payload, size, ("sum",))
    count = payload.fields.get("count")
    if type(count) is not int or not 1 <= count < nodes:
        raise MessageError(f"count = {count!r}: expected a number of models from 1 to {nodes - 1}")
