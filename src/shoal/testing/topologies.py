"""The conformance suite of topologies. Every algorithm can use a topology that passes.

    def test_my_topology():
        check_topology(MyTopology(degree=4), nodes=20)

Failures are AssertionErrors that name the node, the round and the problem.
"""

from __future__ import annotations

import itertools
import math

from shoal.topologies.graph import Graph, Links, Mixing, Topology
from shoal.types import NodeId

TOLERANCE = 1e-12


def check_topology(topology: Topology, nodes: int, seed: int = 0, rounds: int = 5) -> None:
    """Assert that `topology`, the graph that it builds and the weights on that graph keep their contracts."""
    graph = topology.build(nodes, seed)
    check_graph(graph, nodes, rounds)
    again = topology.build(nodes, seed)
    for r in reversed(range(rounds)):  # the order of calls must not matter
        for node in reversed(range(nodes)):
            before, after = graph.links(node, r), again.links(node, r)
            _check(before == after, node, r, f"built twice from seed {seed}, links are {before} and {after}")
    for scheme in ("metropolis-hastings", "uniform"):
        check_mixing(Mixing(graph, scheme), rounds)


def check_graph(graph: Graph, nodes: int, rounds: int = 5) -> None:
    """Assert that both ends of every link agree about it, in every round."""
    assert graph.nodes == nodes, f"the graph has {graph.nodes} nodes; it was built for {nodes}"
    first: list[Links] = []
    for r in range(rounds):
        links = [graph.links(node, r) for node in range(nodes)]
        for node in range(nodes):
            _check_links(graph, links, node, r)
        first = first or links
        for node in range(nodes) if graph.static else ():
            _check(
                links[node] == first[node],
                node,
                r,
                f"the graph is declared static, but links changed from {first[node]} to {links[node]}",
            )


def check_mixing(mixing: Mixing, rounds: int = 5) -> None:
    """Assert that every row of W sums to 1, and every column where the weights must be doubly stochastic."""
    nodes = mixing.graph.nodes
    for r in range(rounds):
        columns = [0.0] * nodes
        symmetric = True
        degrees = {mixing.graph.degree(node, r) for node in range(nodes)}
        for node in range(nodes):
            links = mixing.graph.links(node, r)
            peers = mixing.peers(node, r)
            symmetric &= links.receivers == links.senders
            _check(
                peers.receivers == links.receivers,
                node,
                r,
                f"it sends to {peers.receivers}, but its links go to {links.receivers}",
            )
            _check(
                tuple(peers.weights) == links.senders,
                node,
                r,
                f"it has weights for {tuple(peers.weights)}, but receives from {links.senders}",
            )
            own = 1.0 - math.fsum(peers.weights.values())
            _check(own >= -TOLERANCE, node, r, f"its own weight is {own}, below 0")
            columns[node] += own
            for peer, weight in peers.weights.items():
                _check(weight >= 0.0, node, r, f"the weight of {peer} is {weight}, below 0")
                columns[peer] += weight
        doubly = len(degrees) == 1 or (symmetric and mixing.scheme == "metropolis-hastings")
        for node in range(nodes) if doubly else ():
            _check(
                abs(columns[node] - 1.0) < TOLERANCE * nodes,
                node,
                r,
                f"its column of W sums to {columns[node]}, not to 1",
            )


def _check_links(graph: Graph, links: list[Links], node: NodeId, round: int) -> None:
    own = links[node]
    for name, peers in (("receivers", own.receivers), ("senders", own.senders)):
        _check(isinstance(peers, tuple), node, round, f"links.{name} is a {type(peers).__name__}, not a tuple")
        _check(
            all(type(peer) is int for peer in peers),
            node,
            round,
            f"links.{name} has elements that are not int: {peers}",
        )
        _check(
            all(0 <= peer < graph.nodes for peer in peers),
            node,
            round,
            f"links.{name} has ids outside the graph: {peers}",
        )
        _check(node not in peers, node, round, f"links.{name} contains the node itself: {peers}")
        _check(
            all(a < b for a, b in itertools.pairwise(peers)),
            node,
            round,
            f"links.{name} is not in ascending order without repetition: {peers}",
        )
    for peer in own.receivers:
        _check(
            node in links[peer].senders,
            node,
            round,
            f"it sends to {peer}, which receives only from {links[peer].senders}",
        )
    for peer in own.senders:
        _check(
            node in links[peer].receivers,
            node,
            round,
            f"it receives from {peer}, which sends only to {links[peer].receivers}",
        )
    degree = graph.degree(node, round)
    _check(
        degree == len(own.senders),
        node,
        round,
        f"degree() is {degree}, but it receives from {len(own.senders)} nodes: {own.senders}",
    )


def _check(holds: bool, node: NodeId, round: int, problem: str) -> None:
    assert holds, f"node {node}, round {round}: {problem}"
