"""Bipartite subgraphs, for algorithms in which one side of each link starts an exchange and the other answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.topologies.graph import Graph, Mixing, cached_per_mixing
from shoal.types import NodeId


@dataclass(frozen=True)
class Bipartition:
    """The two sides of a graph, and the links between them."""

    active: frozenset[NodeId]
    """The nodes that start exchanges. All others are passive."""
    neighbours: Mapping[NodeId, tuple[NodeId, ...]]
    """The neighbours of each node on the other side."""
    links: int
    """The number of links in the graph."""
    dropped: int
    """The number of links within a side, which are not used."""


@cached_per_mixing
def bipartition_of(mixing: Mixing) -> Bipartition:
    """Return the bipartition of the mixing's graph."""
    return bipartition(mixing.graph)


def bipartition(graph: Graph) -> Bipartition:
    """Split a static undirected graph into two sides. Connected components stay connected.

    Nodes alternate sides along a depth-first tree. All links of the tree are kept; links within a side are dropped. A
    bipartite graph loses no link. Other graphs lose about half of the links outside the tree. The search is depth
    first, because a shallow tree would turn a full graph into a star. The larger side of each component is active; of
    two equal sides, the side of the lowest node.
    """
    neighbours = [graph.links(node, 0).senders for node in range(graph.nodes)]
    side: dict[NodeId, int] = {}
    active: set[NodeId] = set()
    for root in range(graph.nodes):
        if root not in side:
            component = _assign_sides(root, neighbours, side)
            first = {node for node in component if side[node] == 0}
            active |= first if 2 * len(first) >= len(component) else component - first
    kept = {node: tuple(p for p in peers if (p in active) != (node in active)) for node, peers in enumerate(neighbours)}
    links = sum(map(len, neighbours)) // 2
    return Bipartition(frozenset(active), kept, links, links - sum(map(len, kept.values())) // 2)


def _assign_sides(root: NodeId, neighbours: list[tuple[NodeId, ...]], side: dict[NodeId, int]) -> set[NodeId]:
    """Walk depth first from `root`, assign sides 0 and 1 alternately, and return the nodes reached."""
    side[root] = 0
    reached, path = {root}, [(root, iter(neighbours[root]))]
    while path:
        node, unvisited = path[-1]
        peer = next((peer for peer in unvisited if peer not in side), None)
        if peer is None:
            path.pop()
        else:
            side[peer] = 1 - side[node]
            reached.add(peer)
            path.append((peer, iter(neighbours[peer])))
    return reached
