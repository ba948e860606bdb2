"""The conformance suite of topologies: run it on yours, and any algorithm can use it.

    def test_my_topology():
        check_topology(MyTopology(degree=4), nodes=20)

Failures are AssertionErrors that name the node, the round and what was found.
"""

from __future__ import annotations

import itertools
import math

from shoal.topologies.graph import Graph, Links, Mixing, Topology
from shoal.types import NodeId

TOLERANCE = 1e-12


def check_topology(topology: Topology, nodes: int, seed: int = 0, rounds: int = 5) -> None:
    """Assert that `topology` keeps its contract, and the graph it builds, and the weights on that graph."""
    graph = topology.build(nodes, seed)
    check_graph(graph, nodes, rounds)
    again = topology.build(nodes, seed)
    for r in reversed(range(rounds)):  # the order of questions must not matter
        for node in reversed(range(nodes)):
            before, after = graph.links(node, r), again.links(node, r)
            _say(before == after, node, r, f"built twice from seed {seed}, links are {before} and {after}")
    for scheme in ("metropolis-hastings", "uniform"):
        check_mixing(Mixing(graph, scheme), rounds)


def check_graph(graph: Graph, nodes: int, rounds: int = 5) -> None:
    """Assert that a graph answers alike at both ends of each link, in every round."""
    assert graph.nodes == nodes, f"the graph says it has {graph.nodes} nodes; it was built for {nodes}"
    first: list[Links] = []
    for r in range(rounds):
        links = [graph.links(node, r) for node in range(nodes)]
        for node in range(nodes):
            _check_links(graph, links, node, r)
        first = first or links
        for node in range(nodes) if graph.static else ():
            _say(
                links[node] == first[node],
                node,
                r,
                f"the graph says it is static, but links changed from {first[node]} to {links[node]}",
            )


def check_mixing(mixing: Mixing, rounds: int = 5) -> None:
    """Assert that every row of W is an average, and its columns too where the weights promise it."""
    nodes = mixing.graph.nodes
    for r in range(rounds):
        columns = [0.0] * nodes
        symmetric = True
        degrees = {mixing.graph.degree(node, r) for node in range(nodes)}
        for node in range(nodes):
            links = mixing.graph.links(node, r)
            peers = mixing.peers(node, r)
            symmetric &= links.to == links.of
            _say(peers.to == links.to, node, r, f"sends to {peers.to}, and its links go to {links.to}")
            _say(
                tuple(peers.weights) == links.of,
                node,
                r,
                f"weighs {tuple(peers.weights)}, hears {links.of}",
            )
            own = 1.0 - math.fsum(peers.weights.values())
            _say(own >= -TOLERANCE, node, r, f"its own weight is {own}, below 0")
            columns[node] += own
            for peer, weight in peers.weights.items():
                _say(weight >= 0.0, node, r, f"the weight of {peer} is {weight}, below 0")
                columns[peer] += weight
        doubly = len(degrees) == 1 or (symmetric and mixing.scheme == "metropolis-hastings")
        for node in range(nodes) if doubly else ():
            _say(
                abs(columns[node] - 1.0) < TOLERANCE * nodes,
                node,
                r,
                f"its column of W sums to {columns[node]}, not to 1",
            )


def _check_links(graph: Graph, links: list[Links], node: NodeId, round: int) -> None:
    own = links[node]
    for word, peers in (("to", own.to), ("of", own.of)):
        _say(isinstance(peers, tuple), node, round, f"links.{word} is a {type(peers).__name__}, not a tuple")
        _say(
            all(type(peer) is int for peer in peers),
            node,
            round,
            f"links.{word} holds other things than int: {peers}",
        )
        _say(
            all(0 <= peer < graph.nodes for peer in peers),
            node,
            round,
            f"links.{word} leaves the graph: {peers}",
        )
        _say(node not in peers, node, round, f"links.{word} holds the node itself: {peers}")
        _say(
            all(a < b for a, b in itertools.pairwise(peers)),
            node,
            round,
            f"links.{word} is not in ascending order without repetition: {peers}",
        )
    for peer in own.to:
        _say(node in links[peer].of, node, round, f"sends to {peer}, which hears only from {links[peer].of}")
    for peer in own.of:
        _say(node in links[peer].to, node, round, f"hears from {peer}, which sends only to {links[peer].to}")
    degree = graph.degree(node, round)
    _say(degree == len(own.of), node, round, f"degree() is {degree}, but it hears from {len(own.of)}: {own.of}")


def _say(holds: bool, node: NodeId, round: int, problem: str) -> None:
    assert holds, f"node {node}, round {round}: {problem}"
